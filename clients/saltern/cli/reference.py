"""The reference of ``docs/cli.md``, written from the commands themselves.

``python -m saltern.cli.reference docs/cli.md`` puts it below its heading there; a test compares the two.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from saltern.cli.app import cli
from saltern.cli.deferred import DeferredCommand
from saltern.cli.examples import examples_of
from saltern.cli.settings import GlobalOption, global_options

HEADING: Final = "## Reference\n"
_INTRODUCTION: Final = (
    "Written from the commands by `make cli-reference`; `saltern COMMAND --help` says the same, and the exit codes.\n"
)
Walked = tuple[tuple[str, ...], click.Command, click.Context]


def walk(command: click.Command = cli, parent: click.Context | None = None) -> Iterator[Walked]:
    """Every command that has no commands below it, with its words after ``saltern`` and a context for its help."""
    loaded = command.load() if isinstance(command, DeferredCommand) else command
    context = click.Context(loaded, info_name=command.name if parent else "saltern", parent=parent)
    if isinstance(loaded, click.Group):
        for child in loaded.commands.values():
            if not child.hidden:
                yield from walk(child, context)
    else:
        yield tuple(context.command_path.split()[1:]), loaded, context


def reference() -> str:
    """The whole section as Markdown, with its heading."""
    parts = [HEADING, "\n", _INTRODUCTION, "\n### Options of every command\n\n", *_options(global_options())]
    for _, command, context in walk():
        parts += _entry(command, context)
    return "".join(parts)


def replace_section(page: str) -> str:
    """``page`` with its reference, which is its last section, made anew."""
    start = page.find(HEADING)
    before = page if start < 0 else page[:start]
    return f"{before.rstrip()}\n\n{reference()}"


def _entry(command: click.Command, context: click.Context) -> Iterator[str]:
    arguments = " ".join(one.make_metavar(context) for one in command.params if isinstance(one, click.Argument))
    yield f"\n### `{f'{context.command_path} {arguments}'.strip()}`\n\n"
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or "").partition("\f")[0])
    shown: list[str] = []
    for paragraph in paragraphs:
        if paragraph.startswith("\b"):
            shown.append(paragraph.removeprefix("\b").strip("\n"))
        else:
            yield f"{_text(' '.join(paragraph.split()))}\n\n"
    own = [one for one in command.params if isinstance(one, click.Option) and not isinstance(one, GlobalOption)]
    yield from _options([one for one in own if not one.hidden])
    if examples := "\n".join([*shown, *examples_of(context.command_path)]):
        gap = "\n" if own else ""
        yield f"{gap}```text\n{inspect.cleandoc(examples)}\n```\n"


def _options(options: list[click.Option]) -> Iterator[str]:
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        context = click.Context(click.Command("saltern"))
        value = "" if option.is_flag else f" {_text(option.make_metavar(context))}"
        needed = " Required." if option.required else ""
        yield f"- {names}{value}: {_text(option.help or '')}{needed}\n"


def _text(text: str) -> str:
    """Text that Markdown shows as it is; what stands between backticks stays so."""
    parts = text.split("`")
    return "`".join(part if index % 2 else re.sub(r"([\\*<>\[\]])", r"\\\1", part) for index, part in enumerate(parts))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(replace_section(path.read_text(encoding="utf-8")), encoding="utf-8")
