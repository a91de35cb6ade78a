"""What commands print: tables for people, proto JSON for programs.

JSON has one shape: a resource is printed as its message in proto JSON (lowerCamelCase names, 64-bit integers as
strings, RFC 3339 times in UTC, every field present), a list as ``{"<plural>": [...]}`` with all pages joined. Tables
show local times and may change between releases.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from saltern.cli.failure import one_line, say
from saltern.cli.settings import Settings

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper as EnumTypeWrapper
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp
    from rich.console import Console, RenderableType

#: Wide enough that nothing is cut when a table goes to a file or a pipe.
_PIPE_WIDTH: Final = 240
_BAR_CELLS: Final = 20


def message_dict(message: Message) -> dict[str, Any]:
    """A message as the JSON object that ``--output json`` prints."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, always_print_fields_with_no_presence=True)


def print_json(value: object) -> None:
    say(json.dumps(value, indent=2))


def print_messages(settings: Settings, plural: str, messages: Sequence[Message], table: Table) -> None:
    """Print a list of resources as ``{plural: [...]}`` or as ``table``."""
    if settings.json:
        print_json({plural: [message_dict(message) for message in messages]})
    else:
        table.print(settings)


def print_message(settings: Settings, message: Message, rows: Iterable[tuple[str, object]]) -> None:
    """Print one resource as JSON or as ``name  value`` lines."""
    if settings.json:
        print_json(message_dict(message))
    else:
        table = Table()
        for row in rows:
            table.add(*row)
        table.print(settings)


class Table:
    """A table without lines: bold headings, cells of text or of rich renderables; text is never read as markup."""

    def __init__(self, *headings: str, right: Sequence[str] = ()) -> None:
        self._headings, self._right = headings, frozenset(right)
        self._rows: list[tuple[object, ...]] = []

    def add(self, *cells: object) -> None:
        self._rows.append(cells)

    def print(self, settings: Settings) -> None:
        from rich import table as rich_table

        console = make_console(settings)
        grid = rich_table.Table(
            box=None, pad_edge=False, show_header=bool(self._headings), header_style="bold", padding=(0, 2, 0, 0)
        )
        for index in range(max([len(self._headings), *map(len, self._rows)])):
            heading = self._headings[index] if self._headings else ""
            style = "" if self._headings or index else "bold"
            grid.add_column(
                heading, justify="right" if heading in self._right else "left", style=style, overflow="fold"
            )
        for row in self._rows:
            grid.add_row(*map(_cell, row))
        if not self._rows:
            say("(none)")
        elif console.is_terminal:
            console.print(grid)
        else:
            with console.capture() as captured:
                console.print(grid)
            say("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _cell(value: object) -> RenderableType:
    from rich.text import Text

    if hasattr(value, "__rich_console__") or hasattr(value, "__rich__"):
        return value  # type: ignore[return-value]
    return Text(one_line("-" if value is None or value == "" else str(value)))


def make_console(settings: Settings, *, stderr: bool = False) -> Console:
    """A console on the stream that is current now (tests and pipes replace it)."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else _PIPE_WIDTH,
        no_color=settings.no_color or "NO_COLOR" in os.environ,
        highlight=False,
        emoji=False,
        markup=False,
    )


def local_time(timestamp: Timestamp) -> str:
    """A protobuf Timestamp as local ISO 8601 to the second, with the offset; empty if it is unset."""
    if not (timestamp.seconds or timestamp.nanos):
        return ""
    return datetime.fromtimestamp(timestamp.seconds).astimezone().isoformat(timespec="seconds")


def enum_word(kind: EnumTypeWrapper[Any], value: int, prefix: str) -> str:
    """``STATE_ACTIVE`` as ``active``, ``ROLE_PLATFORM_ADMIN`` as ``platform-admin``; a newer server's as a number."""
    name = kind.DESCRIPTOR.values_by_number.get(value)
    return str(value) if name is None else name.name.removeprefix(prefix).lower().replace("_", "-")


def ratio_text(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def bar(part: int, whole: int, mark: int = 0) -> RenderableType:
    """A bar of ``part`` in ``whole`` with a tick at ``mark`` (the reservation); red from 90% on, the soft mark."""
    from rich.text import Text

    filled = min(_BAR_CELLS, round(_BAR_CELLS * part / whole)) if whole else 0
    cells = ["█"] * filled + ["░"] * (_BAR_CELLS - filled)
    if whole and 0 < mark < whole:
        cells[min(_BAR_CELLS - 1, int(_BAR_CELLS * mark / whole))] = "│"
    return Text("".join(cells), style="red" if whole and part * 10 >= whole * 9 else "green")
