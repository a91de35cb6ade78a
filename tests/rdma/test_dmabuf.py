"""Memory of a GPU: a device that takes no dma-buf refuses it in so many words, and the client goes on without.

In the guest a graphics driver without a card (vgem) exports a true dma-buf. Soft-RoCE takes none, so what is shown is
the refusal, and that its memory moves through the CPU's mapping; that a device takes one was never run.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saltern.errors import FailedPreconditionError
from saltern.rdma import Device, ProtectionDomain, Region
from saltern.rdma.sysfs import is_software
from saltern.results import Hit
from saltern.transport.dmabuf import DmabufBuffer
from tests.rdma.attacker import rdma_node, sdk_client
from tests.support.clients import block

SIZE_BYTES = 8192
_IS_SOFTWARE = any(is_software(port.device) for port in Device.discover())
_IN_GUEST = os.environ.get("SALTERN_RDMA_VM") == "1"
_CARD = Path("/dev/dri/card0")
#: Of <drm/drm.h> and <drm/drm_mode.h>: an image of so many rows, columns and bits each; its handle as a descriptor.
_CREATE_DUMB, _DUMB = 0xC02064B2, struct.Struct("=IIIIIIQ")
_HANDLE_TO_DESCRIPTOR, _PRIME = 0xC00C642D, struct.Struct("=IIi")


@contextmanager
def exported_by(exporter: str) -> Iterator[int]:
    """Descriptor of ``SIZE_BYTES`` of memory: plain shared memory, or a graphics driver's."""
    descriptor = _export() if exporter == "vgem" else os.memfd_create("not of a GPU")
    try:
        if exporter != "vgem":
            os.ftruncate(descriptor, SIZE_BYTES)
        yield descriptor
    finally:
        os.close(descriptor)


def _export() -> int:
    card = os.open(_CARD, os.O_RDWR | os.O_CLOEXEC)
    try:
        image = fcntl.ioctl(card, _CREATE_DUMB, _DUMB.pack(1, SIZE_BYTES // 4, 32, 0, 0, 0, 0))
        handle, size_bytes = _DUMB.unpack(image)[4], _DUMB.unpack(image)[6]
        assert size_bytes == SIZE_BYTES
        asked = _PRIME.pack(handle, os.O_RDWR | os.O_CLOEXEC, -1)
        return int(_PRIME.unpack(fcntl.ioctl(card, _HANDLE_TO_DESCRIPTOR, asked))[2])
    finally:
        os.close(card)


@pytest.mark.skipif(not _IS_SOFTWARE, reason="this device may take it")
@pytest.mark.parametrize("exporter", ["vgem", "shared memory"] if _IN_GUEST else ["shared memory"])
def test_a_device_that_takes_no_dmabuf_says_so_and_nothing_stays_registered(exporter: str) -> None:
    entry = block(1, 4096)
    with exported_by(exporter) as descriptor:
        with rdma_node() as node, sdk_client(node) as client:
            assert client.put_many([entry])
            with pytest.raises(FailedPreconditionError) as caught:
                client.register_dmabuf(descriptor, SIZE_BYTES)
            assert caught.value.reason == "RDMA_DMABUF_NOT_OFFERED"
            assert "copy through it" in caught.value.hint
            assert client.transport == "rdma" and client.exists([entry[0]]) == [True]
        with Device() as device, ProtectionDomain(device) as domain, pytest.raises(FailedPreconditionError):
            Region.from_dmabuf(domain, descriptor, SIZE_BYTES)


@pytest.mark.skipif(not _IN_GUEST, reason="needs a driver that exports memory")
@pytest.mark.parametrize("transport", ["rdma", "tcp"])
def test_memory_of_another_driver_moves_through_its_mapping(transport: str) -> None:
    """Of a true dma-buf: as foreign memory, which is staged, and with the driver told when the CPU looks."""
    name, value = block(2, 4096)
    with exported_by("vgem") as descriptor, DmabufBuffer(descriptor, SIZE_BYTES) as buffer:
        with buffer.cpu_access():
            buffer[:4096][:] = value
        with rdma_node() as node, sdk_client(node, transport) as client:
            assert client.put_many([(name, buffer[:4096])])
            (found,) = client.get_into([name], [buffer[4096:]])
            assert isinstance(found, Hit) and client.transport == transport
        with buffer.cpu_access():
            assert bytes(buffer[4096:]) == value
