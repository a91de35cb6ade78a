"""``--wait``: a changing command that ends when its change is in force on every node. One option for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from saltern.cli.failure import say
from saltern.cli.parameters import ParameterError
from saltern.cli.settings import settings_of
from saltern.policy_version import WAIT_DEFAULT_S, WAIT_MAX_S

if TYPE_CHECKING:
    from saltern.admin_client import AdminClient

_CLIENT: Final = "saltern.admin_client"
ResultT = TypeVar("ResultT")


class _Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(str(value).removesuffix("s"))
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= WAIT_MAX_S:
            raise ParameterError(
                f"{str(value)[:64]!r} is not a number of seconds up to {WAIT_MAX_S:.0f}",
                "write --wait=SECONDS, or --wait behind everything else",
                param,
                ctx,
            )
        return seconds


def wait_option(command: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Give a changing command ``--wait[=SECONDS]``; write it right above ``@click.pass_context``."""

    @click.option(
        "--wait",
        "wait_s",
        is_flag=False,
        flag_value=f"{WAIT_DEFAULT_S:.0f}",
        type=_Seconds(),
        metavar="[=SECONDS]",
        help="End when the change is in force on every node, or its lease has run out; for at most"
        f" {WAIT_DEFAULT_S:.0f} s where nothing else is said.",
    )
    @functools.wraps(command)
    def waiting(*arguments: Any, wait_s: float | None, **options: Any) -> ResultT:
        result = command(*arguments, **options)
        if wait_s is not None:
            _wait(click.get_current_context(), wait_s)
        return result

    return waiting


def remember_client(ctx: click.Context, client: AdminClient) -> None:
    """The client of a command, whose last change is the one to wait for."""
    ctx.find_root().meta[_CLIENT] = client


def _wait(ctx: click.Context, wait_s: float) -> None:
    client: AdminClient | None = ctx.find_root().meta.get(_CLIENT)
    if client is None or not client.policy_version:
        return  # nothing was changed
    reached = client.wait_for_policy(timeout_s=wait_s)
    if not settings_of(ctx).json:
        expired = f"; the leases of {reached.expired_nodes} others have run out" if reached.expired_nodes else ""
        say(f"in force on {reached.acknowledged_nodes} nodes (policy {reached.version}){expired}", err=True)
