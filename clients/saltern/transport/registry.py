"""Which registered buffer a piece of memory belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
        #: Those that are memory of a GPU: mostly none, and then nothing is spent on them.
        self._of_devices: weakref.WeakSet[RegisteredBuffer] = weakref.WeakSet()

    def add(self, buffer: RegisteredBuffer) -> None:
        self._buffers.add(buffer)
        if buffer.dmabuf is not None:
            self._of_devices.add(buffer)

    def locate(self, views: Sequence[memoryview | None], *, takes_dmabuf: bool) -> list[Place | None]:
        """For each view its shared buffer and offset in it, or None where it lies elsewhere."""
        usable = [
            buffer
            for buffer in self._open()
            if buffer.descriptor is not None or (takes_dmabuf and buffer.dmabuf is not None)
        ]
        return _locate_all(usable, views)

    def cpu_access(self, views: Sequence[memoryview | None]) -> AbstractContextManager[None]:
        """Around what the CPU does with memory of a caller's that the device behind a session does not move itself."""
        if not self._of_devices:
            return nullcontext()
        return _cpu_access([buffer for buffer in list(self._of_devices) if not buffer.closed], views)

    def locate_doubtful(self, views: Sequence[memoryview | None]) -> list[Place | None]:
        """For each view its buffer, if that is one which a late node may still write to."""
        return _locate_all([buffer for buffer in self._open() if buffer.is_in_doubt], views)

    def _open(self) -> list[RegisteredBuffer]:
        return [buffer for buffer in list(self._buffers) if not buffer.closed]


@contextmanager
def _cpu_access(devices: list[RegisteredBuffer], views: Sequence[memoryview | None]) -> Iterator[None]:
    touched = {place.buffer for place in _locate_all(devices, views) if place is not None}
    with ExitStack() as accesses:
        for buffer in touched:
            accesses.enter_context(buffer.cpu_access())
        yield


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
