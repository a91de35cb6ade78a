"""Destructive work asks first, on stderr, so that stdout stays the command's own; ``--yes`` answers for scripts."""

from __future__ import annotations

import sys

import click

from saltern.cli.failure import one_line

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


def confirm(yes: bool, question: str) -> None:
    """Return if the caller agrees.

    Raises:
        click.UsageError: there is nobody to ask. click.ClickException: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{one_line(question)} Nobody can be asked here: pass --yes to agree.")
    if not click.confirm(one_line(question), err=True):
        raise click.ClickException("not confirmed; nothing was changed")
