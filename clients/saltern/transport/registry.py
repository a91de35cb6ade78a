"""Which registered buffer a piece of memory belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from saltern.errors import UnavailableError
from saltern.transport.memory import RegisteredBuffer, address_of


class Place(NamedTuple):
    """Where a piece of memory lies in a registered buffer; ``offset`` in bytes."""

    buffer: RegisteredBuffer
    offset: int


class BufferRegistry:
    """The registered buffers of one client, found by address, so that any view of them is recognised."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakSet[RegisteredBuffer] = weakref.WeakSet()

    def add(self, buffer: RegisteredBuffer) -> None:
        self._buffers.add(buffer)

    def locate(self, views: Sequence[memoryview | None], *, takes_dmabuf: bool) -> list[Place | None]:
        """For each view its shared buffer and offset in it, or None where it lies elsewhere."""
        usable = [
            buffer
            for buffer in self._open()
            if buffer.descriptor is not None or (takes_dmabuf and buffer.dmabuf is not None)
        ]
        return _locate_all(usable, views)

    def locate_doubtful(self, views: Sequence[memoryview | None]) -> list[Place | None]:
        """For each view its buffer, if that is one which a late node may still write to."""
        return _locate_all([buffer for buffer in self._open() if buffer.is_in_doubt], views)

    def _open(self) -> list[RegisteredBuffer]:
        return [buffer for buffer in list(self._buffers) if not buffer.closed]


def _locate_all(buffers: list[RegisteredBuffer], views: Sequence[memoryview | None]) -> list[Place | None]:
    if not buffers:
        return [None] * len(views)
    return [_locate(buffers, view) if view is not None else None for view in views]


def _locate(buffers: list[RegisteredBuffer], view: memoryview) -> Place | None:
    address = address_of(view)
    if address:
        for buffer in buffers:
            offset = buffer.offset_of(address, view.nbytes)
            if offset is not None:
                return Place(buffer, offset)
    return None


def in_doubt_error() -> UnavailableError:
    """Why memory that a late node may still write to is not used (I7)."""
    return UnavailableError(
        "a node that missed its deadline may still write to this registered buffer",
        reason="MEMORY_IN_DOUBT",
        hint="it is used again as soon as the node has answered or gone; meanwhile take another buffer",
    )
