"""Writes an export to a file or to standard output, so that it can be interrupted at any moment and go on.

::

    pages of the service ──> format ──> output: written, synced ──> cursor: replaced, synced
                                           a crash here ─┘ └─ or here: the output is cut back to the cursor
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from msgspec.structs import replace

from saltern.audit.cursor import Cursor, CursorFile, sync_folder
from saltern.audit.formats import TEXT_FORMATS
from saltern.audit.parquet import ParquetFile
from saltern.errors import AlreadyExistsError, DataLossError, InvalidArgumentError

STDOUT: Final = "-"
#: Syncing after each page would cost more than the pages do.
_SAVE_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Page:
    """Whole events as JSON Lines, how many, and the sequence of the last."""

    lines: bytes
    events: int
    last_sequence: int


class _Output(Protocol):
    def write(self, data: bytes) -> None: ...

    def sync(self) -> int:
        """Make what was written last; return the size of the output in bytes."""
        ...

    def close(self) -> None: ...


class _FileOutput:
    """A file that grows, from ``size_bytes`` on; what lies behind that is of a run that did not end."""

    def __init__(self, path: Path, size_bytes: int, *, is_new: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else 0)
        try:
            self._file = os.fdopen(os.open(path, flags, 0o640), "r+b")
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:
            raise _unwritable(path, error) from None
        found_bytes = os.fstat(self._file.fileno()).st_size
        if found_bytes < size_bytes:
            self._file.close()
            raise DataLossError(
                f"{str(path)!r} has {found_bytes} bytes, and its cursor speaks of {size_bytes}",
                reason="OUTPUT_CUT_OFF",
                hint="put the file back, or begin anew with another output and cursor",
            )
        self._file.truncate(size_bytes)
        self._file.seek(size_bytes)
        if is_new:
            sync_folder(path.parent)

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def sync(self) -> int:
        self._file.flush()
        os.fdatasync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class _StreamOutput:
    """Standard output: what is flushed is gone, so a crash may repeat what no cursor speaks of yet, never lose it."""

    def __init__(self, stream: BinaryIO, size_bytes: int) -> None:
        self._stream = stream
        self._size_bytes = size_bytes

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._size_bytes += len(data)

    def sync(self) -> int:
        self._stream.flush()
        return self._size_bytes

    def close(self) -> None:
        self._stream.flush()


class TextExport:
    """An export as text that is in progress. Close it, or use it as a context manager through ``contextlib.closing``.

    Attributes:
        after_sequence: everything up to this event has been written.
        events: how many were written by this run.
    """

    def __init__(
        self, chain: str, format_name: str, *, output: str, stdout: BinaryIO, cursor_file: CursorFile | None
    ) -> None:
        """Open the output where its cursor says.

        Raises:
            AlreadyExistsError: the output is there, and no cursor speaks of it.
            DataLossError: the output is shorter than its cursor says, or the cursor is damaged.
            FailedPreconditionError: the cursor is of another export.
            InvalidArgumentError: the output cannot be written.
        """
        self._format = TEXT_FORMATS[format_name]
        self._cursor_file = cursor_file
        path = None if output == STDOUT else Path(output).absolute()
        name = output if path is None else str(path)
        cursor = cursor_file.load(chain, format_name) if cursor_file is not None else None
        is_new = cursor is None or cursor.output != name
        if is_new:
            after = cursor.after_sequence if cursor is not None else 0
            cursor = Cursor(chain=chain, format=format_name, after_sequence=after, output=name)
            if path is not None and path.exists():
                raise _exists(path)
        assert cursor is not None
        self._output: _Output
        if path is None:
            self._output = _StreamOutput(stdout, cursor.size_bytes)
        else:
            if is_new and cursor_file is not None:
                cursor_file.save(cursor)  # before the file: what it does not speak of would be refused next time
            self._output = _FileOutput(path, cursor.size_bytes, is_new=is_new)
        self._cursor = cursor
        self._saved_s = time.monotonic()
        self.after_sequence = cursor.after_sequence
        self.events = 0
        if cursor.size_bytes == 0:
            self._output.write(self._format.header)

    def write(self, page: Page) -> None:
        """Add the events of a page; now and then save how far it got."""
        self._output.write(self._format.encode(page.lines))
        self.after_sequence = page.last_sequence
        self.events += page.events
        if time.monotonic() - self._saved_s >= _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Make what was written last, then the cursor that speaks of it."""
        size_bytes = self._output.sync()
        if self._cursor_file is not None:
            self._cursor = replace(self._cursor, after_sequence=self.after_sequence, size_bytes=size_bytes)
            self._cursor_file.save(self._cursor)
        self._saved_s = time.monotonic()

    def finish(self) -> None:
        """As :meth:`save`, at the end."""
        self.save()

    def close(self) -> None:
        self._output.close()


def parquet_start(chain: str, output: str, cursor_file: CursorFile | None) -> int:
    """After which event an export as Parquet goes on; each run makes a file of its own.

    Raises:
        AlreadyExistsError: the output is there already; errors of the cursor as :class:`TextExport`.
        InvalidArgumentError: the output is not a file.
    """
    if output == STDOUT:
        raise InvalidArgumentError(
            "a Parquet file cannot be written to standard output", reason="USAGE", hint="name a file with --output"
        )
    path = Path(output).absolute()
    cursor = cursor_file.load(chain, "parquet") if cursor_file is not None else None
    # A crash between the file and its cursor: it is made again, whole.
    if path.exists() and not (cursor is not None and cursor.pending == str(path)):
        raise _exists(path)
    return cursor.after_sequence if cursor is not None else 0


def write_parquet(
    chain: str, pages: Iterable[Page], output: str, after_sequence: int, cursor_file: CursorFile | None
) -> int:
    """Write all pages as one Parquet file, whole or not at all; return how many events. Nothing is written for none.

    Raises:
        FailedPreconditionError: pyarrow is not installed.
        InvalidArgumentError: the output cannot be written.
    """
    path = Path(output).absolute()
    partial = path.with_name(f".{path.name}.partial")
    events, last = 0, after_sequence
    try:
        with ParquetFile(partial) as file:
            for page in pages:
                file.write(page.lines)
                events, last = events + page.events, page.last_sequence
        if not events:
            return 0
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        cursor = Cursor(chain=chain, format="parquet", after_sequence=after_sequence, pending=str(path))
        if cursor_file is not None:
            cursor_file.save(cursor)
        partial.replace(path)
        sync_folder(path.parent)
        if cursor_file is not None:
            done = replace(cursor, after_sequence=last, output=str(path), size_bytes=path.stat().st_size, pending="")
            cursor_file.save(done)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        partial.unlink(missing_ok=True)
    return events


def _exists(path: Path) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"the file {str(path)!r} exists and is not overwritten",
        hint="name another file; to go on with an export, give the --cursor that it was made with",
    )


def _unwritable(path: Path, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"cannot write {str(path)!r}: {error.strerror or error}",
        reason="FILE_NOT_WRITABLE",
        hint="name a file in a folder that exists and is writable",
    )
