"""Entries over RDMA: byte-exact at every size, in batches, for sessions and tenants side by side; a client in a process
of its own; nothing left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from saltern import wire
from tests.rdma.attacker import RdmaClient, rdma_node
from tests.rdma.other_process import OtherProcess, store_and_read
from tests.rdma.sides import resources
from tests.support.clients import node_client
from tests.support.static_node import MIB, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import block, key


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.close()


def test_every_size_from_a_byte_to_64_mib_comes_back_byte_for_byte_from_another_process(other: OtherProcess) -> None:
    with rdma_node() as node:
        other.begin("sizes", node)
        assert other.answer() == "rdma"
        wait_until(lambda: node.session_count() == 0)
        node.check_invariants()


def test_batches_of_up_to_1000_blocks_side_by_side_for_two_tenants() -> None:
    with rdma_node() as node, ExitStack() as stack:
        clients = [
            stack.enter_context(node_client(node, tenant=tenant, transport="rdma"))
            for tenant in ("acme", "blue", "acme")
        ]
        faults: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for count in (1, 129, 1000) if number == 0 else (2, 300):
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
        node.check_invariants()


def test_i1_a_tenant_finds_nothing_of_another_under_the_same_key() -> None:
    with rdma_node() as node, RdmaClient(node) as acme, RdmaClient(node, "blue") as blue:
        assert acme.put({key(1): block(1)}).codes == b"\0"
        assert blue.get(key(1), 4096) is None
        assert blue.put({key(1): block(2)}).codes == b"\0"
        assert (acme.get(key(1), 4096), blue.get(key(1), 4096)) == (block(1), block(2))


def test_a_batch_larger_than_the_tenant_makes_room_for_itself() -> None:
    """As over the other transports: later entries of a batch evict earlier ones, also within one chain."""
    with (
        rdma_node(64 * MIB, {"acme": tenant_policy(limit_bytes=MIB)}) as node,
        RdmaClient(node, size_bytes=4 * MIB) as client,
    ):
        entries = {key(at): block(at, 256 * 1024) for at in range(16)}
        assert client.put(entries).codes == bytes(16)
        assert client.get(key(15), 256 * 1024) == entries[key(15)]
        node.check_invariants()


def test_the_same_key_twice_in_a_batch_is_there_the_second_time() -> None:
    with rdma_node() as node, RdmaClient(node) as client:
        client.memory[:8192] = block(1) * 2
        reply = _put_twice(client)
        assert reply == bytes([0, 6])
        assert client.get(key(1), 4096) == block(1)


def _put_twice(client: RdmaClient) -> bytes:
    sums = wire.join_sums([wire.checksum(block(1))] * 2)
    client.wire.send(wire.Opcode.PUT, wire.Put(key(1) * 2, [4096, 4096], sums, 0, [0, 4096]))
    return client.wire.answer(wire.PutReply)[0].codes


def test_i7_a_sum_that_does_not_match_publishes_nothing() -> None:
    with rdma_node() as node, RdmaClient(node) as client:
        client.memory[:4096] = block(2)
        assert client.put({key(1): block(1)}, offsets=[0]).codes == bytes([15])
        assert client.get(key(1), 4096) is None
        assert node.usage().tenants["acme"].in_flight_bytes == 0  # type: ignore[index]


def test_auto_takes_rdma_and_falls_back_where_the_node_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with rdma_node() as node, node_client(node, transport="auto") as client:
        store_and_read(client, 1, [4096], registered=False)
        assert client.transport == "rdma"
        monkeypatch.setenv("SALTERN_RDMA_DEVICE", "off")
        with node_client(node, transport="auto") as without:
            store_and_read(without, 2, [4096], registered=False)
            assert without.transport == "shm"
    monkeypatch.delenv("SALTERN_RDMA_DEVICE")
    with static_node() as plain, node_client(plain, transport="auto") as client:
        store_and_read(client, 3, [4096], registered=False)
        assert client.transport == "shm"


def test_nothing_is_left_of_operations_and_reconnects() -> None:
    operations = int(os.environ.get("SALTERN_RDMA_LEAK_OPERATIONS", "400"))
    reconnects = int(os.environ.get("SALTERN_RDMA_LEAK_RECONNECTS", "12"))
    with rdma_node() as node:
        device = node.call(lambda: node._node._state.fabric.device.name)  # type: ignore[union-attr]

        def once() -> None:
            with RdmaClient(node) as client:
                for at in range(operations // reconnects):
                    assert client.put({key(at): block(at)}).codes in (b"\0", b"\6")
                    assert client.get(key(at), 4096) == block(at)
            wait_until(lambda: node.session_count() == 0)

        once()
        before = resources(device), len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(reconnects):
            once()
        assert (resources(device), len(list(Path("/proc/self/fd").iterdir()))) == before
        assert node.call(lambda: len(node._node._state.fabric)) == 0  # type: ignore[arg-type]
