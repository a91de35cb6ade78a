"""Memory of a GPU as a registered buffer: a dma-buf, which the RDMA device reads and writes without this host's memory.

The exporter must let the CPU map it as well: sums of entries are taken here, as for any other memory. The descriptor is
the caller's; what is registered keeps the memory, not the descriptor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.rdma import Access, Device, DeviceChoice, ProtectionDomain, Region
from saltern.transport.memory import RegisteredBuffer
from saltern.transport.opening import RDMA_DEVICE_VARIABLE, Transport
from saltern.wire import REGION_MAX_BYTES

#: Linux include/uapi/linux/dma-buf.h: struct dma_buf_sync is one u64 of flags.
_DMA_BUF_IOCTL_SYNC: Final = 0x40086200
_SYNC: Final = struct.Struct("=Q")
_SYNC_READ_WRITE, _SYNC_END = 3, 4


class DmabufBuffer(RegisteredBuffer):
    """A dma-buf that is mapped here; made by :func:`open_dmabuf`."""

    __slots__ = ("_dmabuf",)

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Raises FailedPreconditionError (DMABUF_NOT_MAPPABLE)."""
        self._dmabuf = os.dup(descriptor)
        try:
            self._adopt(mmap.mmap(self._dmabuf, size_bytes), None)
        except (OSError, ValueError) as error:
            os.close(self._dmabuf)
            raise FailedPreconditionError(
                f"the dma-buf cannot be mapped for the CPU: {error}",
                reason="DMABUF_NOT_MAPPABLE",
                hint="sums of entries are taken through a mapping: copy through memory of allocate() instead",
            ) from error

    @property
    def dmabuf(self) -> int | None:
        return self._dmabuf

    def cpu_access(self) -> AbstractContextManager[None]:
        return self._synchronised()

    @contextmanager
    def _synchronised(self) -> Iterator[None]:
        fcntl.ioctl(self._dmabuf, _DMA_BUF_IOCTL_SYNC, _SYNC.pack(_SYNC_READ_WRITE))
        try:
            yield
        finally:
            fcntl.ioctl(self._dmabuf, _DMA_BUF_IOCTL_SYNC, _SYNC.pack(_SYNC_READ_WRITE | _SYNC_END))

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._dmabuf)


def open_dmabuf(descriptor: int, size_bytes: int, transport: Transport) -> DmabufBuffer:
    """The first ``size_bytes`` of a dma-buf, once the RDMA device of this host has shown that it takes them.

    Args:
        transport: what the client was told to use.

    Raises:
        InvalidArgumentError: INVALID_SIZE.
        FailedPreconditionError: DMABUF_NEEDS_RDMA; RDMA_DMABUF_NOT_OFFERED by the binding or the device;
            DMABUF_NOT_MAPPABLE; or what else ``RDMA_*`` is missing here.
    """
    if not 1 <= size_bytes <= REGION_MAX_BYTES:
        raise InvalidArgumentError(
            f"cannot register {size_bytes} bytes: outside 1..{REGION_MAX_BYTES}", reason="INVALID_SIZE"
        )
    named = os.environ.get(RDMA_DEVICE_VARIABLE, "")
    if transport in (Transport.SHM, Transport.TCP) or named == "off":
        raise FailedPreconditionError(
            "memory of a GPU travels over RDMA, and this client uses none",
            reason="DMABUF_NEEDS_RDMA",
            hint="open the client with transport='auto' or 'rdma', or copy through memory of allocate()",
        )
    with Device(DeviceChoice.parse(named)) as device, ProtectionDomain(device) as domain:
        Region.from_dmabuf(domain, descriptor, size_bytes, Access.REMOTE).close()
    return DmabufBuffer(descriptor, size_bytes)
