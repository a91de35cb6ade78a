"""Registered memory: sealed, recognised by address, given back; nothing is left over after sessions or a fork."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from saltern.client import Client
from saltern.errors import InvalidArgumentError
from saltern.results import Hit, Pong, Stored
from saltern.transport.memory import Drain, RegisteredBuffer, address_of
from saltern.transport.registry import BufferRegistry
from saltern.transport.session import Session
from saltern.transport.slots import split_frames
from saltern.wire import KEYS_MAX, REGION_MAX_BYTES
from tests.support.clients import blocks, endpoint_of, node_client, static_client
from tests.support.static_node import static_node

_F_GET_SEALS = 1034


def test_i3_shared_memory_can_neither_shrink_nor_grow() -> None:
    with RegisteredBuffer(10_000, shared=True) as buffer:
        assert buffer.descriptor is not None
        assert fcntl.fcntl(buffer.descriptor, _F_GET_SEALS) & 0x6 == 0x6
        for size_bytes in (0, 9_999, 20_000):
            with pytest.raises(PermissionError):
                os.ftruncate(buffer.descriptor, size_bytes)
        assert not os.get_inheritable(buffer.descriptor)


def test_private_memory_has_no_descriptor() -> None:
    with RegisteredBuffer(10, shared=False) as buffer:
        assert buffer.descriptor is None
        buffer[2:4][:] = b"ab"
        assert bytes(buffer.view) == b"\0\0ab" + bytes(6)
        assert len(buffer) == 10


@pytest.mark.parametrize("size_bytes", [0, -1, REGION_MAX_BYTES + 1])
def test_sizes_out_of_range_are_refused(size_bytes: int) -> None:
    with pytest.raises(InvalidArgumentError):
        RegisteredBuffer(size_bytes, shared=True)


def test_views_are_found_by_address_whatever_they_were_made_from() -> None:
    registry = BufferRegistry()
    with RegisteredBuffer(8192, shared=True) as one, RegisteredBuffer(8192, shared=True) as two:
        registry.add(one)
        registry.add(two)
        outside, read_only = memoryview(bytearray(10)), memoryview(b"abc")
        inside = memoryview(one[100:180].cast("Q")[1:].cast("B"))
        places = registry.locate([inside, two[8191:], outside, read_only, None, one.view], takes_dmabuf=False)
        assert places == [(one, 108), (two, 8191), None, None, None, (one, 0)]
        del inside


def test_a_closed_buffer_is_found_no_more_and_its_views_stay_good() -> None:
    registry = BufferRegistry()
    buffer = RegisteredBuffer(4096, shared=True)
    registry.add(buffer)
    view = buffer[:10]
    buffer.close()
    buffer.close()
    view[:] = b"0123456789"
    assert registry.locate([view], takes_dmabuf=False) == [None]
    assert address_of(view)
    assert "closed" in repr(buffer)


def test_a_buffer_that_nobody_holds_goes_away() -> None:
    with static_node() as node, node_client(node, "shm") as client:
        [(key, data)] = blocks(1, 1000)
        client.put_many([(key, data)])
        before = open_descriptors()
        for _ in range(40):
            buffer = client.allocate(4096)
            assert isinstance(client.get_into([key], [buffer.view])[0], Hit)
        del buffer
        gc.collect()
        assert open_descriptors() <= before + 2


def test_i7_a_drain_lets_go_of_its_socket_also_when_it_goes_as_part_of_a_cycle() -> None:
    here, there = socket.socketpair()
    with there:
        cycle: list[object] = [here]
        cycle += [Drain(here), cycle]
        del cycle, here
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            gc.collect()
        assert there.recv(1) == b""


def test_i8_nothing_is_left_after_200_sessions() -> None:
    with static_node() as node:
        [(key, data)] = blocks(1, 10_000)

        def session(transport: str) -> None:
            with node_client(node, transport) as client:
                client.put_many([(key, data)])
                [result] = client.get_many([key])
                assert isinstance(result, Hit)

        for transport in ("tcp", "shm"):
            session(transport)
        wait_for_sessions_to_end(node.session_count)
        descriptors, memory_bytes = open_descriptors(), mapped_bytes()
        for _ in range(100):
            session("tcp")
            session("shm")
        wait_for_sessions_to_end(node.session_count)
        assert open_descriptors() <= descriptors + 2
        # 100 forgotten staging regions would be 1.7 GB.
        assert mapped_bytes() < memory_bytes + 256 * 1024 * 1024


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def wait_for_sessions_to_end(count: Callable[[], int]) -> None:
    for _ in range(100_000):
        if count() == 0:
            return
    raise AssertionError("sessions stay open")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_forked_child_opens_its_own_sessions(transport: str) -> None:
    """As an inference server's worker does. The parent's session goes on undisturbed."""
    items = blocks(4, 10_000)
    keys = [key for key, _ in items]
    with static_node() as node:
        client = static_client(endpoint_of(node), node.token("acme", "chat"), transport=transport)
        buffer = client.allocate(1 << 20)
        assert client.put_many(items) == [Stored()] * 4
        sessions = idle_sessions(client)
        assert len(sessions) == 1
        child = os.fork()
        if child == 0:
            good = False
            try:
                signal.alarm(60)
                results = client.get_many(keys)
                good = [r.payload for r in results if isinstance(r, Hit)] == [data for _, data in items]
                good = good and isinstance(client.get_into(keys[:1], [buffer.view])[0], Hit)
                client.close()
            finally:
                os._exit(0 if good else 1)
        for _ in range(50):
            assert all(isinstance(result, Hit) for result in client.get_many(keys))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert buffer[:10_000] == items[0][1], "the child read into memory that both share"
        assert idle_sessions(client) == sessions, "the parent's session was not cut by the child"
        assert isinstance(client.ping(), Pong)
        client.close()
        node.check_invariants()


def idle_sessions(client: Client) -> list[Session]:
    [node] = client._router._nodes.values()
    return list(node.current._idle)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([100], [(0, 1)]),
        ([4, 4, 4], [(0, 2), (2, 3)]),
        ([1, 100, 1, 1], [(0, 1), (1, 2), (2, 4)]),
        ([1] * 7, [(0, 4), (4, 7)]),
    ],
)
def test_batches_are_cut_by_bytes_and_by_keys(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    cuts = [(cut.start, cut.stop) for cut in split_frames(sizes, frame_bytes=10, keys_max=4)]
    assert cuts == expected


def test_frames_respect_the_protocol_by_default() -> None:
    cuts = list(split_frames([1] * 10_000, frame_bytes=1 << 30))
    assert [cut.stop - cut.start for cut in cuts] == [KEYS_MAX, KEYS_MAX, 10_000 - 2 * KEYS_MAX]
