"""Commands that are imported when they are used, so that ``saltern --help`` is quick and needs no server package."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any, Final

import click

from saltern.cli.settings import Command, Group, format_examples
from saltern.errors import FailedPreconditionError

ENTRY_POINT_GROUP: Final = "saltern.commands"


class _WithExamples(click.Command):
    """A plain command with the end of the help that ours have."""

    def __init__(self, command: click.Command) -> None:
        self.__dict__.update(command.__dict__)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        format_examples(ctx, formatter)


class DeferredCommand(click.Command):
    """Stands in for a command of ours at ``module:attribute`` until it is invoked."""

    def __init__(self, name: str, target: str, short_help: str) -> None:
        super().__init__(name, help=short_help, short_help=short_help)
        self._target = target

    def load(self) -> click.Command:
        module, _, attribute = self._target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command if isinstance(command, Command | Group) else _WithExamples(command)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return self.load().make_context(info_name, args, parent, **extra)


class ServerCommand(DeferredCommand):
    """Stands in for a command that the server distribution brings through an entry point."""

    def load(self) -> click.Command:
        """Import the command; raises FailedPreconditionError where the server distribution is not installed."""
        found = [entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name == self._target]
        if not found:
            raise FailedPreconditionError(
                f"`saltern {self.name}` belongs to the server, and saltern-server is not installed here",
                reason="SERVER_NOT_INSTALLED",
                hint="pip install 'saltern-server[embedded]' into this environment",
            )
        command = found[0].load()
        assert isinstance(command, click.Command)
        return _WithExamples(command)
