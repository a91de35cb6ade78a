"""``saltern top``: who uses the cache now, and how; looked at again and again."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from saltern.cli.failure import say
from saltern.cli.parameters import TENANT
from saltern.cli.render import make_console, print_json
from saltern.cli.settings import Command, Settings, settings_of
from saltern.cli.stack import connect
from saltern.cli.top_frame import SORTS, Frame, Look, make_frame, to_json, to_table
from saltern.errors import UnavailableError
from saltern.names import TenantId, tenant_name

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from saltern.admin_client import AdminClient

#: Nodes report every two seconds.
_INTERVAL_DEFAULT_S: Final = 2.0
_INTERVAL_MIN_S: Final = 0.2
_INTERVAL_MAX_S: Final = 3600.0
_LIMIT_DEFAULT: Final = 20
_QUIT: Final = frozenset("qQ\x04")
_NEXT_SORT: Final = frozenset("sS")


@click.command("top", cls=Command)
@click.argument("tenant_id", metavar="[TENANT]", type=TENANT, required=False)
@click.option(
    "--interval", "interval_s", type=click.FloatRange(_INTERVAL_MIN_S, _INTERVAL_MAX_S), default=_INTERVAL_DEFAULT_S,
    show_default=True, metavar="SECONDS", help="Look again after so long.",
)  # fmt: skip
@click.option("--sort", type=click.Choice(SORTS), default="used", show_default=True, help="What comes first.")
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=_LIMIT_DEFAULT,
    show_default=True,
    help="Tenants at most.",
)
@click.option("--once", is_flag=True, help="One frame, after two looks, and the end.")
@click.pass_context
def top(
    ctx: click.Context, *, tenant_id: TenantId | None, interval_s: float, sort: str, limit: int, once: bool
) -> None:
    """Watch who uses the cache: use against quota, hit rate, bytes per second, refusals, evictions; and the nodes.

    Of every tenant (platform-admin), of TENANT, or of the key's own one. Rates are of the time between two looks. In a
    terminal: q quits, s sorts by the next column. Into a pipe or a file: one frame after the other; with --output json
    one object a line.

    \b
    saltern top
    saltern top acme --interval 5
    saltern top --once --output json | jq '.tenants[0].rates'
    """
    admin, settings = connect(ctx), settings_of(ctx)
    own = tenant_id or (TenantId(admin.tenant_id) if admin.tenant_id else None)
    watch = _Watch(admin, own, limit)
    watch.look()
    if once:
        time.sleep(interval_s)
        _show(settings, watch.frame(sort))
    elif not settings.json and sys.stdout.isatty():
        _live(make_console(settings), watch, interval_s, sort)
    else:
        while True:
            time.sleep(interval_s)
            frame = watch.frame(sort)
            if settings.json:
                say(json.dumps(to_json(frame)))
            else:
                _show(settings, frame)
                say()
            sys.stdout.flush()


class _Watch:
    """Looks at usage with the rights of the key: every tenant and the nodes, or one tenant alone."""

    def __init__(self, admin: AdminClient, tenant: TenantId | None, limit: int) -> None:
        self._admin = admin
        self._tenant = tenant
        self._limit = limit
        self._before: Look | None = None
        self._now: Look | None = None

    def look(self) -> None:
        """Look now; raises SalternError."""
        from saltern.admin.v1.usage_pb2 import GetUsageRequest, ListNodesRequest, ListUsagesRequest

        admin = self._admin
        at_s = time.monotonic()
        if self._tenant is None:
            usages = list(admin.iterate(admin.usage.ListUsages, ListUsagesRequest(), "usages"))
            nodes = list(admin.iterate(admin.usage.ListNodes, ListNodesRequest(), "nodes"))
            look = Look(at_s, usages, nodes)
        else:
            request = GetUsageRequest(tenant=tenant_name(self._tenant))
            look = Look(at_s, [admin.call(admin.usage.GetUsage, request)], None)
        self._before, self._now = self._now, look

    def frame(self, sort: str) -> Frame:
        """Look once more and compare with the look before."""
        self.look()
        return self.arranged(sort)

    def arranged(self, sort: str) -> Frame:
        """The newest look in another order."""
        assert self._now is not None, "there is something to arrange once there was a look"
        return make_frame(self._before or self._now, self._now, sort=sort, limit=self._limit)


def _show(settings: Settings, frame: Frame) -> None:
    if settings.json:
        print_json(to_json(frame))
        return
    console = make_console(settings)
    with console.capture() as captured:
        console.print(to_table(frame))
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _live(console: Console, watch: _Watch, interval_s: float, sort: str) -> None:
    """Frames in place of one another until q is typed."""
    from rich.live import Live

    frame, words = watch.arranged(sort), ""
    with _keys() as has_keys, Live(console=console, screen=True, auto_refresh=False) as live:
        due_s = time.monotonic() + interval_s
        while True:
            live.update(_screen(frame, interval_s, words), refresh=True)
            key = _next_key(max(0.0, due_s - time.monotonic())) if has_keys else _wait(due_s)
            if key in _QUIT:
                return
            if key in _NEXT_SORT:
                sort = SORTS[(SORTS.index(sort) + 1) % len(SORTS)]
                frame = watch.arranged(sort)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + interval_s
                try:
                    frame, words = watch.frame(sort), ""
                except UnavailableError as error:  # what was seen last stays, until it is back
                    words = f"the control plane does not answer: {error.reason}"


def _screen(frame: Frame, interval_s: float, words: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    head = f"saltern top   every {interval_s:g} s   sorted by {frame.sort}   q quits, s sorts"
    return Group(Text(head, style="bold"), Text(words, style="red"), to_table(frame))


@contextmanager
def _keys() -> Iterator[bool]:
    """Let keys come as they are typed; whether they can."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)  # Ctrl-C stays what it is
    try:
        yield True
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _next_key(timeout_s: float) -> str:
    """The next key, empty if none was typed in time."""
    descriptor = sys.stdin.fileno()
    readable, _, _ = select.select([descriptor], [], [], timeout_s)
    # Not sys.stdin.read: it would take all that was typed into a buffer that select does not see.
    return os.read(descriptor, 1).decode("ascii", "replace") if readable else ""


def _wait(until_s: float) -> str:
    time.sleep(max(0.0, until_s - time.monotonic()))
    return ""
