"""Writes an export to an object store, as objects that are whole and written once; it can be interrupted and go on.

``CHAIN-<first sequence>-<last sequence>.<format>``: in the order of their names they are the export. An object is put,
then the cursor is saved; after a crash in between, the next run finds the object by its name and goes on behind it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from saltern.audit.cursor import Cursor, CursorFile
from saltern.audit.exporting import Page
from saltern.audit.formats import TEXT_FORMATS
from saltern.audit.parquet import ParquetFile
from saltern.errors import AlreadyExistsError
from saltern.objects import ObjectFolder

PARQUET: Final = "parquet"
#: An object is put when it has so many events, or, with ``--follow``, when its first one has waited for so long.
OBJECT_EVENTS: Final = 100_000
FLUSH_EVERY_S: Final = 60.0
_DIGITS: Final = 20


class ObjectExport:
    """An export to an object store that is in progress; used as :class:`saltern.audit.exporting.TextExport`.

    Attributes:
        after_sequence: everything up to this event was taken; what is not put yet, the next run takes again.
        events: how many this run has put.
    """

    def __init__(
        self,
        chain: str,
        format_name: str,
        *,
        folder: ObjectFolder,
        cursor_file: CursorFile | None,
        object_events: int = OBJECT_EVENTS,
    ) -> None:
        """Find out where to go on.

        Raises:
            AlreadyExistsError: objects of this chain and format are there, and no cursor speaks of them.
            DataLossError, FailedPreconditionError: of the cursor; of the store, as :class:`ObjectFolder`.
        """
        self._chain, self._format = chain, format_name
        self._folder, self._cursor_file, self._object_events = folder, cursor_file, object_events
        cursor = cursor_file.load(chain, format_name) if cursor_file is not None else None
        is_ours = cursor is not None and cursor.output == folder.url
        after = cursor.after_sequence if cursor is not None else 0
        found = self._last_object(after if is_ours else 0)
        if found and not is_ours:
            raise AlreadyExistsError(
                f"objects of the chain {chain} as {format_name} are at {folder.url} already",
                reason="OUTPUT_EXISTS",
                hint="name another folder, or the cursor of the export that wrote them",
            )
        self._cursor = Cursor(chain=chain, format=format_name, after_sequence=max(after, found), output=folder.url)
        if cursor_file is not None:
            cursor_file.save(self._cursor)
        self.after_sequence = self._cursor.after_sequence
        self.events = 0
        self._lines: list[bytes] = []
        self._waiting = 0
        self._since_s = 0.0

    def write(self, page: Page) -> None:
        """Take the events of a page; put an object when it is full."""
        if not self._waiting:
            self._since_s = time.monotonic()
        self._lines.append(page.lines)
        self._waiting += page.events
        self.after_sequence = page.last_sequence
        if self._waiting >= self._object_events:
            self.finish()

    def save(self) -> None:
        """Put what has waited long enough."""
        if self._waiting and time.monotonic() - self._since_s >= FLUSH_EVERY_S:
            self.finish()

    def finish(self) -> None:
        """Put what waits, then save the cursor that speaks of it.

        Raises:
            AlreadyExistsError: somebody else has put the same object.
        """
        if not self._waiting:
            return
        first = self.after_sequence - self._waiting + 1
        name = f"{self._stem(first)}-{self.after_sequence:0{_DIGITS}}.{self._format}"
        if not self._folder.create(name, self._encoded()):
            raise AlreadyExistsError(
                f"{self._folder.url}/{name} is there already",
                reason="OUTPUT_EXISTS",
                hint="one export at a time writes to a folder; run it again with its cursor",
            )
        self.events += self._waiting
        self._lines, self._waiting = [], 0
        if self._cursor_file is not None:
            self._cursor = replace(self._cursor, after_sequence=self.after_sequence)
            self._cursor_file.save(self._cursor)

    def close(self) -> None:
        """Nothing is held."""

    def _encoded(self) -> bytes:
        if self._format != PARQUET:
            text = TEXT_FORMATS[self._format]
            return text.header + b"".join(text.encode(lines) for lines in self._lines)
        with tempfile.TemporaryDirectory(prefix="saltern-export-") as folder:
            path = Path(folder) / "part.parquet"
            with ParquetFile(path) as file:
                for lines in self._lines:
                    file.write(lines)
            return path.read_bytes()

    def _stem(self, sequence: int) -> str:
        return f"{self._chain}-{sequence:0{_DIGITS}}"

    def _last_object(self, after: int) -> int:
        """The last event of the objects that begin behind ``after``; 0 for none."""
        last = 0
        for names in self._folder.names(after=f"{self._stem(after)}~"):
            for name in names:
                stem, _, suffix = name.rpartition(".")
                chain, _, end = stem.rpartition("-")
                if suffix == self._format and chain.rpartition("-")[0] == self._chain and end.isdecimal():
                    last = max(last, int(end))
        return last
