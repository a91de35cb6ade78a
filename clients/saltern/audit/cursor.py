"""How far an export has got, in a small file: what makes it go on after any crash without a loss or a repetition.

The cursor is written after what it speaks of is on disk. A crash in between leaves output that no cursor speaks of; the
next run cuts that off and makes it again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from saltern.errors import DataLossError, FailedPreconditionError

_VERSION: Final = 1


class Cursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an export stands.

    Attributes:
        chain, format: what is exported, and how.
        after_sequence: everything up to this event is in the output.
        output: absolute path of the output, or ``-``.
        size_bytes: of the output, up to and with that event.
        pending: an output that is about to appear under its name, whole.
    """

    version: int = _VERSION
    chain: str
    format: str
    after_sequence: int = 0
    output: str = ""
    size_bytes: int = 0
    pending: str = ""


class CursorFile:
    """The file that holds a cursor: read whole, replaced whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, chain: str, format_name: str) -> Cursor | None:
        """The cursor, or None if there is none yet.

        Raises:
            DataLossError: reason CURSOR_DAMAGED: the file holds something else.
            FailedPreconditionError: reason CURSOR_OF_ANOTHER_EXPORT: of another chain or format.
            OSError: it cannot be read.
        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            cursor = msgspec.json.decode(content, type=Cursor)
            if cursor.version != _VERSION or cursor.after_sequence < 0 or cursor.size_bytes < 0:
                raise ValueError(cursor.version)
        except (msgspec.MsgspecError, ValueError):
            raise DataLossError(
                f"the cursor {str(self._path)!r} is damaged, or not one of an export",
                reason="CURSOR_DAMAGED",
                hint="name another file; without its cursor an export begins anew",
            ) from None
        if (cursor.chain, cursor.format) != (chain, format_name):
            raise FailedPreconditionError(
                f"the cursor {str(self._path)!r} is of the chain {cursor.chain} as {cursor.format}",
                reason="CURSOR_OF_ANOTHER_EXPORT",
                hint="keep one cursor for each chain and format",
            )
        return cursor

    def save(self, cursor: Cursor) -> None:
        """Replace the cursor; it is on disk when this returns. Raises OSError."""
        partial = self._path.with_name(f".{self._path.name}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            os.write(descriptor, msgspec.json.encode(cursor) + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(self._path)
        sync_folder(self._path.parent)


def sync_folder(path: Path) -> None:
    """Make renames and new names in ``path`` last through a power cut; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
