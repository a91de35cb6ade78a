"""Arguments of calls: keys checked in one sweep, bytes-like objects as flat views that are never copied."""

from __future__ import annotations

from collections.abc import Iterable
from operator import countOf
from typing import TYPE_CHECKING

from saltern.errors import InvalidArgumentError
from saltern.keys import KEY_BYTES, BlockKey

if TYPE_CHECKING:
    from typing_extensions import Buffer


def byte_view(payload: Buffer) -> memoryview:
    """A flat view of the bytes of ``payload``; raises InvalidArgumentError if it has none or they have gaps."""
    try:
        view = memoryview(payload)
    except TypeError:
        raise InvalidArgumentError(
            f"a payload must be bytes-like, not {type(payload).__name__}", reason="INVALID_BUFFER"
        ) from None
    if not view.c_contiguous:
        raise InvalidArgumentError("a buffer is not contiguous", reason="INVALID_BUFFER", hint="make a contiguous copy")
    if not view.nbytes:
        raise InvalidArgumentError("a buffer is empty", reason="INVALID_BUFFER", hint="an entry has at least one byte")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def room_view(buffer: Buffer) -> memoryview:
    """A flat, writable view of ``buffer``; raises InvalidArgumentError where there is none."""
    view = byte_view(buffer)
    if view.readonly:
        raise InvalidArgumentError("a buffer to read into is read-only", reason="INVALID_BUFFER")
    return view


def checked_keys(keys: Iterable[BlockKey]) -> list[BlockKey]:
    """The keys as a list; raises InvalidArgumentError for one that is not 32 bytes."""
    checked = list(keys)
    # Loops in C: existence checks carry hundreds of keys.
    if countOf(map(type, checked), bytes) < len(checked) or countOf(map(len, checked), KEY_BYTES) < len(checked):
        raise InvalidArgumentError(
            f"a block key must be {KEY_BYTES} bytes", reason="INVALID_KEY_LENGTH", hint="derive it with block_key()"
        )
    return checked
