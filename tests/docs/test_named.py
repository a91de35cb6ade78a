"""What pages name in passing is there: commands with their options, make targets, files of the repository."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from saltern.cli.app import cli
from saltern.cli.deferred import DeferredCommand
from tests.docs.markdown import ROOT

PAGES = ["README.md", "ARCHITECTURE.md", "SECURITY.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
#: Words of a command line up to something that stands for other words.
_PLACEHOLDER = re.compile(r"[|<>…]|\.\.\.|^#")
_FILES = re.compile(r"`((?:clients|controlplane|dataplane|tests|proto|docker|migrations)/[\w/-][\w/.-]*?)(?::\w+)?`")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def named_commands(page: str) -> Iterator[list[str]]:
    """``saltern ...`` in the text and in fences, as words."""
    text = text_of(page)
    found = re.findall(r"`(saltern [a-z][^`\n]*)`", text)
    found += re.findall(r"^(?:\$ )?(saltern [a-z].*)$", text.replace("\\\n", " "), re.MULTILINE)
    for command in found:
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a sentence that begins with the name
            continue
        end = next((number for number, word in enumerate(words) if _PLACEHOLDER.search(word)), len(words))
        yield words[1:end]


def unknown(words: list[str]) -> str:
    """The first word that the command line does not know; empty where there is none."""
    command: click.Command = cli
    context = click.Context(cli, info_name="saltern")
    for number, word in enumerate(words):
        if not isinstance(command, click.Group):
            break
        if word.startswith("-"):
            continue
        following = command.get_command(context, word)
        if following is None:
            if number == 0 or (word.isalpha() and word.islower()):
                return word
            return ""  # an argument, of a group that is a command itself
        following = following.load() if isinstance(following, DeferredCommand) else following
        command, context = following, click.Context(following, info_name=word, parent=context)
    with context:
        options = {name for one in (*command.get_params(context), *cli.get_params(context)) for name in one.opts}
        options |= {name for one in command.get_params(context) for name in one.secondary_opts}
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in options:
            return word
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_is_there_with_its_options(page: str) -> None:
    wrong = [f"{what} of saltern {' '.join(words)}" for words in named_commands(page) if (what := unknown(words))]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_and_file_that_a_page_names_is_there(page: str) -> None:
    text = text_of(page)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z][a-z-]*)", text)) <= targets
    assert [path for path in _FILES.findall(text) if not (ROOT / path).exists()] == []
