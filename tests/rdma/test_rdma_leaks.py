"""Operations and reconnects leave nothing: no registered memory, queue pair, descriptor or Python object."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from saltern.credentials import NodeEndpoint
from saltern.rdma import Device
from saltern.rdma.resource_tree import Resource
from tests.rdma.attacker import RdmaClient, rdma_node
from tests.rdma.extent import by_extent
from tests.rdma.other_process import pattern
from tests.rdma.sides import pinned_kib, resources
from tests.support.clients import blocks, static_client
from tests.support.static_node import MIB, StaticNode
from tests.support.waiting import open_descriptors, wait_until
from tests.support.wire_client import block, key

OPERATIONS = by_extent(quick=150, usual=600, full=10_000)
RECONNECTS = by_extent(quick=6, usual=12, full=200)
#: Objects of the interpreter's own that come and go: caches, and the frames of other threads.
_PASSING_OBJECTS = 200


@pytest.fixture(scope="module")
def node() -> Iterator[StaticNode]:
    with rdma_node() as running:
        yield running


def holdings(device: str) -> dict[str, object]:
    """What the kernel and this process hold, node and clients together."""
    gc.collect()
    ours = [type(each) for each in gc.get_objects() if isinstance(each, Resource)]
    return {
        "kernel": resources(device),
        "pinned KiB": pinned_kib(),
        "descriptors": open_descriptors(),
        "resources": Counter(kind.__name__ for kind in ours),
    }


def counted(device: str, node: StaticNode) -> tuple[dict[str, object], Counter[str]]:
    """The same, and this process's objects by type."""
    wait_until(lambda: node.session_count() == 0)
    held = holdings(device)
    return held, Counter(type(each).__qualname__ for each in gc.get_objects())


def grown(before: Counter[str], after: Counter[str]) -> Counter[str]:
    """By how much types have become more."""
    return after - before


def test_nothing_is_left_of_operations_and_reconnects(node: StaticNode) -> None:
    device = Device.discover()[0].device
    token = node.token("acme", "chat")  # a node remembers those that it has verified

    def once() -> None:
        with RdmaClient(node, token=token) as client:
            for at in range(OPERATIONS // RECONNECTS // 2):
                assert client.put({key(at): block(at)}).codes in (b"\0", b"\6")
                assert client.get(key(at), 4096) == block(at)

    once()
    before, objects = counted(device, node)
    for _ in range(RECONNECTS):
        once()
    after, objects_after = counted(device, node)
    assert after == before
    more = grown(objects, objects_after)
    assert more.total() < _PASSING_OBJECTS, more.most_common(12)


def test_nothing_is_left_of_the_sdks_clients(node: StaticNode) -> None:
    """Registered buffers, staging buffers and sessions of clients that come and go; some leave without a word."""
    device = Device.discover()[0].device
    endpoint, token = NodeEndpoint("node-1", node.wire_endpoint), node.token("blue", "chat")
    entries = blocks(4, 3000)

    def once(number: int) -> None:
        with static_client(endpoint, token, transport="rdma", deadline_ms=120_000) as client:
            with client.allocate(MIB) as buffer:
                buffer.view[:] = pattern(number, 4096) * 256
                client.put_many([*entries, (entries[0][0], buffer[:100])])
                client.get_into([entries[0][0]], [buffer.view])
            assert len(client.get_many([name for name, _ in entries])) == 4
            assert client.transport == "rdma"

    once(0)
    before, objects = counted(device, node)
    for number in range(max(2, RECONNECTS // 6)):
        once(number)
    after, objects_after = counted(device, node)
    assert after == before
    more = grown(objects, objects_after)
    assert more.total() < _PASSING_OBJECTS, more.most_common(12)
