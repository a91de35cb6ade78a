"""Options that ``saltern replay`` and ``saltern plan`` have in common, in the order in which their help names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

# Profiles are read when a command runs, so that help is quick.
if TYPE_CHECKING:
    from saltern.replay.profiles import Profiles

_F = TypeVar("_F", bound=Callable[..., Any])
FILE: Final = click.Path(path_type=Path)


def _all_of(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """One decorator of several; the first is named first."""

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


#: Parameters ``model``, ``hardware`` and ``profiles``.
profile_options: Final = _all_of(
    click.option("--model", default="llama-3-70b", show_default=True, metavar="NAME", help="Model profile."),
    click.option("--hardware", default="8xa800", show_default=True, metavar="NAME", help="Profile of one engine."),
    click.option("--profile", "profiles", multiple=True, type=FILE, help="JSON file of profiles of your own."),
)

#: Parameter ``engines``.
engines_option: Final = click.option(
    "--engines", type=click.IntRange(1), default=8, show_default=True, help="Model replicas."
)

#: Parameters ``requests``, ``block_tokens`` and ``seed``.
traffic_options: Final = _all_of(
    click.option("--requests", type=click.IntRange(1), metavar="N", help="The first N requests only."),
    click.option("--block-tokens", type=click.IntRange(1, 1_048_576), metavar="N", help="Block size of all of it."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of what is drawn by chance."),
)

#: Parameter ``html_file``.
html_option: Final = click.option("--html", "html_file", type=FILE, help="Write one page here that needs no network.")


def profiles_of(files: Sequence[Path]) -> Profiles:
    """Ours, with those of the files over them; raises InvalidArgumentError as reading one does."""
    from saltern.replay.profiles import builtin_profiles, read_profiles

    known = builtin_profiles()
    for path in files:
        known = read_profiles(path).over(known)
    return known
