"""Operations and reconnects leave nothing: no registered memory, queue pair, descriptor or Python object."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from saltern.credentials import NodeEndpoint
from saltern.rdma import Device
from saltern.rdma.resource_tree import Resource
from tenants.tokens import LIFETIME_MAX_S
from tests.rdma.attacker import RdmaClient, rdma_node
from tests.rdma.extent import by_extent
from tests.rdma.other_process import pattern
from tests.rdma.sides import pinned_kib, resources
from tests.support.clients import blocks, static_client
from tests.support.static_node import MIB, StaticNode
from tests.support.waiting import open_descriptors, wait_until
from tests.support.wire_client import block, key

OPERATIONS = by_extent(quick=150, usual=300, full=10_000)
RECONNECTS = by_extent(quick=6, usual=10, full=200)
#: Of the interpreter's and of this count itself, whatever it counts: fewer than one for each reconnect of a quick run.
_PASSING_OBJECTS = 5
_SETTLE_S = 15


@pytest.fixture(scope="module")
def node() -> Iterator[StaticNode]:
    with rdma_node() as running:
        yield running


def holdings(device: str) -> dict[str, object]:
    """What the kernel and this process hold, node and clients together."""
    return {
        "kernel": resources(device),
        "pinned KiB": pinned_kib(),
        "descriptors": open_descriptors(),
        # By its bases: issubclass would remember each type that it is asked about, in objects of its own.
        "resources": Counter({kind: count for kind, count in objects().items() if Resource in kind.__mro__}),
    }


def objects() -> Counter[type]:
    """This process's objects by type, the node's and the clients' together."""
    gc.collect()
    return Counter(map(type, gc.get_objects()))


def token_of(node: StaticNode, tenant: str) -> str:
    """One for the whole of a test: a node remembers each that it has verified, up to a number of them."""
    return node.token(tenant, "chat", expires_at_s=int(time.time()) + LIFETIME_MAX_S - 1)


class Tally:
    """What there is before something is done many times over, to be held against what there is afterwards."""

    def __init__(self, device: str, node: StaticNode) -> None:
        self._device, self._node = device, node
        wait_until(lambda: node.session_count() == 0)
        self._held, self._objects = holdings(device), objects()

    def check(self) -> None:
        """Nothing has become more. An object that is only on its way out has a while for that."""
        wait_until(lambda: self._node.session_count() == 0)
        assert holdings(self._device) == self._held
        ended_by_s = time.monotonic() + _SETTLE_S
        while (more := objects() - self._objects).total() > _PASSING_OBJECTS:
            assert time.monotonic() < ended_by_s, more.most_common(12)


def test_nothing_is_left_of_operations_and_reconnects(node: StaticNode) -> None:
    device = Device.discover()[0].device
    token = token_of(node, "acme")

    def once() -> None:
        with RdmaClient(node, token=token) as client:
            for at in range(OPERATIONS // RECONNECTS // 2):
                assert client.put({key(at): block(at)}).codes in (b"\0", b"\6")
                assert client.get(key(at), 4096) == block(at)

    once()
    tally = Tally(device, node)
    for _ in range(RECONNECTS):
        once()
    tally.check()


def test_nothing_is_left_of_the_sdks_clients(node: StaticNode) -> None:
    """Registered buffers, staging buffers and sessions of clients that come and go; some leave without a word."""
    device = Device.discover()[0].device
    endpoint, token = NodeEndpoint("node-1", node.wire_endpoint), token_of(node, "blue")
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
    tally = Tally(device, node)
    for number in range(max(_PASSING_OBJECTS + 1, RECONNECTS // 6)):
        once(number)
    tally.check()
