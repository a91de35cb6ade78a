"""Entries over RDMA: byte-exact at every size, in batches, for sessions and tenants side by side; a client in a process
of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from saltern import wire
from tests.rdma.attacker import RdmaClient, rdma_node, sdk_client
from tests.rdma.extent import by_extent
from tests.rdma.other_process import OtherProcess, store_and_read
from tests.support.static_node import MIB, StaticNode, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import block, key

TENANTS = {
    "acme": tenant_policy(limit_bytes=80 * MIB, block_bytes=64 * MIB),
    "blue": tenant_policy(limit_bytes=32 * MIB, block_bytes=MIB),
    "green": tenant_policy(limit_bytes=32 * MIB, block_bytes=MIB),
    "small": tenant_policy(limit_bytes=MIB),
}


@pytest.fixture(scope="module")
def other() -> Iterator[OtherProcess]:
    """Before the node, which a fork would copy."""
    process = OtherProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def shared_node(other: OtherProcess) -> Iterator[StaticNode]:
    with rdma_node(160 * MIB, TENANTS) as node:
        yield node


@pytest.fixture
def node(shared_node: StaticNode) -> Iterator[StaticNode]:
    """An empty one."""
    yield shared_node
    wait_until(lambda: shared_node.session_count() == 0)
    shared_node.check_invariants()
    shared_node.apply({})
    shared_node.apply(TENANTS)


def test_every_size_from_a_byte_to_64_mib_comes_back_byte_for_byte_from_another_process(
    other: OtherProcess, node: StaticNode
) -> None:
    other.begin("sizes", node)
    assert other.answer() == "rdma"


def test_batches_of_up_to_1000_blocks_side_by_side_for_two_tenants(node: StaticNode) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(sdk_client(node, tenant=tenant)) for tenant in ("blue", "green", "blue")]
        faults: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for count in by_extent(quick=(1000,), usual=(1, 129, 1000)) if number == 0 else (2, 300):
                    sizes = [1 + 37 * (at % 64) for at in range(count)]
                    store_and_read(clients[number], number, sizes, registered=number == 0)
            except BaseException as fault:
                faults.append(fault)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults, faults
        assert {client.transport for client in clients} == {"rdma"}


def test_i1_a_tenant_finds_nothing_of_another_under_the_same_key(node: StaticNode) -> None:
    with RdmaClient(node) as acme, RdmaClient(node, "blue") as blue:
        assert acme.put({key(1): block(1)}).codes == b"\0"
        assert blue.get(key(1), 4096) is None
        assert blue.put({key(1): block(2)}).codes == b"\0"
        assert (acme.get(key(1), 4096), blue.get(key(1), 4096)) == (block(1), block(2))


def test_a_batch_larger_than_the_tenant_makes_room_for_itself(node: StaticNode) -> None:
    """As over the other transports: later entries of a batch evict earlier ones, also within one chain."""
    with RdmaClient(node, "small", size_bytes=4 * MIB) as client:
        entries = {key(at): block(at, 256 * 1024) for at in range(16)}
        assert client.put(entries).codes == bytes(16)
        assert client.get(key(15), 256 * 1024) == entries[key(15)]


def test_the_same_key_twice_in_a_batch_is_there_the_second_time(node: StaticNode) -> None:
    with RdmaClient(node) as client:
        client.memory[:8192] = block(1) * 2
        assert _put_twice(client) == bytes([0, 6])
        assert client.get(key(1), 4096) == block(1)


def _put_twice(client: RdmaClient) -> bytes:
    sums = wire.join_sums([wire.checksum(block(1))] * 2)
    client.wire.send(wire.Opcode.PUT, wire.Put(key(1) * 2, [4096, 4096], sums, 0, [0, 4096]))
    return client.wire.answer(wire.PutReply)[0].codes


def test_i7_a_sum_that_does_not_match_publishes_nothing(node: StaticNode) -> None:
    with RdmaClient(node) as client:
        client.memory[:4096] = block(2)
        assert client.put({key(1): block(1)}, offsets=[0]).codes == bytes([15])
        assert client.get(key(1), 4096) is None
