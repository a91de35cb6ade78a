"""Memory that a node on the same host can read and write: sealed memfds, mapped once.

A node accepts a region only if it can never shrink (F_SEAL_SHRINK), since truncating it would crash the node (I3,
proto/WIRE.md REGISTER).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import socket
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from saltern.errors import InvalidArgumentError
from saltern.wire import REGION_MAX_BYTES

# Linux: include/uapi/linux/fcntl.h; Python 3.11 has no names for them on every build.
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK, _F_SEAL_GROW = 0x2, 0x4


class Drain:
    """A unix socket that a client is done with, whose peer may still be writing to the client's memory.

    Takes over the socket, already shut down for reading and never for writing: only then is a hang-up the peer's.
    """

    __slots__ = ("__weakref__", "_poll")

    def __init__(self, drained: socket.socket) -> None:
        self._poll = select.poll()
        self._poll.register(drained, 0)  # POLLHUP is always reported
        # Not ``__del__``: of objects that go as a cycle the socket could be the first, and complain.
        weakref.finalize(self, drained.close).atexit = False

    @property
    def has_ended(self) -> bool:
        """Whether the peer has closed its end, and with it everything that it had of ours."""
        return bool(self._poll.poll(0))


class RegisteredBuffer:
    """Memory of a client that transports move entries to and from without a copy of their own.

    Slicing gives memoryviews to pass to ``put_many`` and ``get_into``::

        buffer = client.allocate(64 << 20)
        client.put_many([(key, buffer[:size])])

    After a timed-out ``get_into`` over shared memory a frozen node might still write when it wakes up; until it has let
    go, the client answers a miss for this buffer rather than let it write over newer bytes (see ``is_in_doubt``).

    Attributes:
        size_bytes: its length.
        view: all of it, as a writable memoryview.
    """

    __slots__ = ("__weakref__", "_address", "_descriptor", "_doubts", "_map", "size_bytes", "view")

    def __init__(self, size_bytes: int, *, shared: bool) -> None:
        """Map ``size_bytes`` of zeros; ``shared`` makes it a sealed memfd, otherwise it is private memory."""
        if not 1 <= size_bytes <= REGION_MAX_BYTES:
            raise InvalidArgumentError(
                f"cannot allocate {size_bytes} bytes: outside 1..{REGION_MAX_BYTES}", reason="INVALID_SIZE"
            )
        if not shared:
            self._adopt(mmap.mmap(-1, size_bytes), None)
            return
        descriptor = os.memfd_create("saltern", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size_bytes)
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._adopt(mmap.mmap(descriptor, size_bytes), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def _adopt(self, mapped: mmap.mmap, descriptor: int | None) -> None:
        """Take over a mapping, and its memfd where it is shared."""
        self.size_bytes = len(mapped)
        self._descriptor = descriptor
        self._doubts: list[Drain] = []
        self._map = mapped
        self.view = memoryview(mapped)
        self._address = address_of(self.view)

    def __len__(self) -> int:
        return self.size_bytes

    def __getitem__(self, part: slice) -> memoryview:
        return self.view[part]

    def __repr__(self) -> str:
        kind = "closed" if self.closed else "shared" if self._descriptor is not None else "private"
        return f"RegisteredBuffer({self.size_bytes} bytes, {kind})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_map", None) is not None:
            self.close()

    @property
    def closed(self) -> bool:
        return self._address == 0

    @property
    def descriptor(self) -> int | None:
        """The memfd, or None for private memory."""
        return self._descriptor

    @property
    def dmabuf(self) -> int | None:
        """The dma-buf that this is the memory of; None for memory of this host."""
        return None

    def cpu_access(self) -> AbstractContextManager[None]:
        """Within it the CPU sees what a device has written here, and the other way round."""
        return contextlib.nullcontext()

    def offset_of(self, address: int, size_bytes: int) -> int | None:
        """Where memory at ``address`` lies in this buffer, or None if it is not wholly inside."""
        offset = address - self._address
        inside = self._address and offset >= 0 and offset + size_bytes <= self.size_bytes
        return offset if inside else None

    def doubt(self, drain: Drain) -> None:
        """Hold the buffer back until the peer of ``drain``, which may still write to it, has let go."""
        self._doubts.append(drain)

    @property
    def is_in_doubt(self) -> bool:
        """Whether a node that missed a deadline may still write here."""
        for drain in list(self._doubts):  # other threads may add to it meanwhile
            if drain.has_ended:
                with contextlib.suppress(ValueError):
                    self._doubts.remove(drain)
        return bool(self._doubts)

    def close(self) -> None:
        """Give the memory back; views that are still alive keep the mapping until they go."""
        if self.closed:
            return
        self._address = 0
        self._doubts.clear()
        self.view.release()
        with contextlib.suppress(BufferError):  # a caller's view is alive: the mapping goes with the last one
            self._map.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def address_of(view: memoryview) -> int:
    """The address of a writable, contiguous view; 0 for a read-only one (which cannot lie in a registered buffer)."""
    if view.readonly or not view.nbytes:
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
