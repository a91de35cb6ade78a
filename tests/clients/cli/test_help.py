"""Every command explains itself: what it does, each option, an example; and docs/cli.md says the same."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

from saltern.cli import cli
from saltern.cli.deferred import DeferredCommand, ServerCommand
from saltern.cli.examples import EXAMPLES
from saltern.cli.failure import EXIT_CODES_TEXT
from saltern.cli.reference import Walked, replace_section, walk

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
COMMANDS = list(walk())


def words(walked: Walked) -> str:
    return " ".join(walked[0])


@pytest.mark.parametrize("walked", COMMANDS, ids=words)
def test_a_command_has_help_an_example_and_no_unexplained_option(walked: Walked) -> None:
    path, command, context = walked
    shown = command.get_help(context)
    assert command.help and len(command.help.split()) >= 3, "say what it does"
    example = f"saltern {' '.join(path)}"
    lines = shown.splitlines()[1:]
    assert any(example in line for line in lines), "add an example to saltern/cli/examples.py"
    assert EXIT_CODES_TEXT.split()[-1] in shown
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, f"{option.opts[0]} has no help"
    summary = command.get_short_help_str(200)
    assert summary[0].isupper() and "`" not in summary[:1]


def test_examples_are_of_commands_that_are_there_and_can_be_parsed() -> None:
    commands = {words(walked): walked for walked in COMMANDS}
    assert EXAMPLES.keys() <= commands.keys()
    for name, examples in EXAMPLES.items():
        path, command, _ = commands[name]
        for example in examples:
            first = example.removeprefix('eval "$(').replace(')"', " ").split("#")[0]
            typed = shlex.split(first.split(" | ")[0].split(" > ")[0])
            assert typed[0] == "saltern"
            start = next(index for index in range(1, len(typed)) if typed[index : index + len(path)] == list(path))
            rest = typed[start + len(path) :]
            if "--help" not in rest:
                files = {"--token-file", "--save-secrets"} & set(rest)
                if not files:  # click would look for them
                    command.make_context(name, rest, resilient_parsing=False).close()


def test_every_group_lists_its_commands_with_a_word_on_each() -> None:
    def groups(command: click.Command) -> list[click.Group]:
        if not isinstance(command, click.Group):
            return []
        return [command, *(one for child in command.commands.values() for one in groups(child))]

    for group in groups(cli):
        assert group.help
        for child in group.commands.values():
            assert child.hidden or child.get_short_help_str(), f"{group.name} {child.name}"


def test_deferred_commands_say_in_lists_what_they_say_themselves() -> None:
    for child in cli.commands.values():
        if isinstance(child, DeferredCommand) and not isinstance(child, ServerCommand):
            assert child.load().name == child.name


def test_the_page_has_the_reference_of_these_commands() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == replace_section(page), "run `make cli-reference`"
