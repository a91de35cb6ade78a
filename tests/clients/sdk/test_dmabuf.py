"""Memory of a GPU as a client's buffer, as far as it goes without a GPU and a NIC: refused with a reason; where a
session takes another transport it moves through the CPU's mapping. What a device says is in tests/rdma."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.results import Hit
from saltern.transport.dmabuf import DmabufBuffer
from saltern.transport.registry import BufferRegistry
from tests.support.clients import block, node_client
from tests.support.static_node import static_node
from tests.support.waiting import open_descriptors

SIZE_BYTES = 8192


@pytest.fixture
def exported() -> Iterator[int]:
    """What an exporter's mapping is to the CPU: shared memory behind a descriptor."""
    descriptor = os.memfd_create("exported")
    os.ftruncate(descriptor, SIZE_BYTES)
    yield descriptor
    os.close(descriptor)


def test_it_is_refused_where_there_is_no_rdma(exported: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saltern.rdma.sysfs.read_ports", lambda **_: ())
    with static_node() as node:
        for transport, reason in (
            ("auto", "RDMA_NO_DEVICE"),
            ("shm", "DMABUF_NEEDS_RDMA"),
            ("tcp", "DMABUF_NEEDS_RDMA"),
        ):
            with node_client(node, transport) as client, pytest.raises(FailedPreconditionError) as caught:
                client.register_dmabuf(exported, SIZE_BYTES)
            assert caught.value.reason == reason and caught.value.hint
        with node_client(node) as client, pytest.raises(InvalidArgumentError):
            client.register_dmabuf(exported, 0)


def test_what_the_cpu_cannot_map_is_refused_and_nothing_stays_open() -> None:
    read_end, write_end = os.pipe()
    before = open_descriptors()
    with pytest.raises(FailedPreconditionError) as caught:
        DmabufBuffer(read_end, SIZE_BYTES)
    assert caught.value.reason == "DMABUF_NOT_MAPPABLE"
    assert open_descriptors() == before
    os.close(read_end)
    os.close(write_end)


def test_only_sessions_that_can_register_it_are_told_where_it_lies(exported: int) -> None:
    registry = BufferRegistry()
    with DmabufBuffer(exported, SIZE_BYTES) as buffer:
        registry.add(buffer)
        assert registry.locate([buffer[100:200]], takes_dmabuf=False) == [None]
        assert registry.locate([buffer[100:200]], takes_dmabuf=True) == [(buffer, 100)]


class _Bracketed(DmabufBuffer):
    """Counts what the CPU was let in for, and whether it was let out again."""

    __slots__ = ("begun", "ended")

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        super().__init__(descriptor, size_bytes)
        self.begun = self.ended = 0

    @contextmanager
    def _synchronised(self) -> Iterator[None]:  # shared memory knows no DMA_BUF_IOCTL_SYNC
        self.begun += 1
        try:
            yield
        finally:
            self.ended += 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_another_transport_moves_it_through_the_mapping(exported: int, transport: str) -> None:
    name, value = block(1, 4096)
    with static_node() as node, node_client(node, transport) as client, _Bracketed(exported, SIZE_BYTES) as buffer:
        client._router.registry.add(buffer)
        buffer[:4096][:] = value
        assert client.put_many([(name, buffer[:4096])])
        assert buffer.begun == buffer.ended == 1, "the CPU reads what a device may hold in its caches"
        (found,) = client.get_into([name], [buffer[4096:]])
        assert isinstance(found, Hit) and bytes(buffer[4096:]) == value
        assert buffer.begun == buffer.ended == 2, "the device must see what the CPU wrote"
        client.get_many([name])
        assert buffer.begun == 2, "memory of this host needs none"
    assert os.pread(exported, 4096, 4096) == value
