"""The SSD tier behind real doors: what DRAM gives up is served again, across restarts, and gone when it was deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from dataplane.io.ssd import SsdState
from dataplane.settings import SsdSettings
from saltern.cache.v1 import cache_pb2, cache_pb2_grpc
from saltern.names import TenantId
from tests.dataplane.io.conftest import wait_until
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.wire_client import WireClient, block, connect_tcp, connect_unix, key

SIZE = 64 * 1024
COUNT = 100
TENANTS = {
    "acme": tenant_policy(limit_bytes=2 * MIB, ssd_limit_bytes=32 * MIB),
    "blue": tenant_policy(limit_bytes=2 * MIB, ssd_limit_bytes=32 * MIB),
}
ENTRIES = {key(n): block(n, SIZE - n) for n in range(COUNT)}


@pytest.fixture
def settings(tmp_path: Path) -> SsdSettings:
    return SsdSettings(tmp_path / "ssd", 64 * MIB, tmp_path)


@pytest.fixture
def node(settings: SsdSettings) -> Iterator[StaticNode]:
    with static_node(TENANTS, dram_bytes=8 * MIB, ssd=settings) as running:
        yield running
        wait_until(lambda: running.session_count() == 0)
        running.check_invariants()
        for books in running.usage().tenants.values():
            assert books.in_flight_bytes == books.held_bytes == 0


@pytest.fixture(params=[connect_tcp, connect_unix])
def client(node: StaticNode, request: pytest.FixtureRequest) -> Iterator[WireClient]:
    with request.param(node) as opened:
        opened.hello(node.token("acme", "chat"))
        yield opened


def fill(node: StaticNode, client: WireClient) -> None:
    """Put three times what DRAM holds; returns when everything is on one of the tiers."""
    for name, value in ENTRIES.items():
        assert client.put({name: value}).codes == b"\0"
    wait_until(lambda: client.lookup(*ENTRIES).prefix == COUNT)


def test_i6_what_dram_gives_up_is_found_and_served_from_ssd(node: StaticNode, client: WireClient) -> None:
    fill(node, client)
    for name, value in ENTRIES.items():
        assert client.get(name) == {name: value}
    usage = node.usage().tenants[TenantId("acme")]
    assert usage.ssd is not None and usage.ssd.counters.reads >= COUNT - 32
    assert usage.counters.get_hits == COUNT and usage.counters.get_misses == 0
    assert usage.used_bytes <= usage.limit_bytes and usage.ssd.used_bytes <= usage.ssd.limit_bytes


def test_i4_a_batch_larger_than_dram_brings_the_head_of_the_chain(node: StaticNode, client: WireClient) -> None:
    fill(node, client)
    found = client.get(*ENTRIES)
    assert all(found[name] == ENTRIES[name] for name in found)
    assert 25 <= len(found) <= 64
    usage = node.usage().tenants[TenantId("acme")]
    assert usage.counters.get_hits + usage.counters.get_misses == COUNT


def test_i2_another_tenant_finds_nothing_of_it(node: StaticNode, client: WireClient) -> None:
    fill(node, client)
    with connect_tcp(node) as other:
        other.hello(node.token("blue", "chat"))
        assert other.lookup(*ENTRIES).found == bytes(COUNT)
        assert other.get(*ENTRIES) == {}
        assert other.delete(*ENTRIES) == 0


def test_a_block_on_ssd_is_immutable_and_says_when_there_is_no_room(node: StaticNode, client: WireClient) -> None:
    fill(node, client)
    assert client.put({key(0): b"other"}).codes == bytes([6])
    assert client.get(key(0), max_size=10) == {}
    assert client.get(key(0)) == {key(0): ENTRIES[key(0)]}


def test_deleting_covers_both_tiers_and_lasts_over_a_restart(settings: SsdSettings) -> None:
    gone = [key(n) for n in range(0, COUNT, 3)]
    with static_node(TENANTS, dram_bytes=8 * MIB, ssd=settings) as node, connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        fill(node, client)
        assert client.delete(*gone) == len(gone)
        assert sum(client.lookup(*gone).found) == 0
        on_ssd = node.usage().tenants[TenantId("acme")].ssd
    with static_node(TENANTS, dram_bytes=8 * MIB, ssd=settings) as node, connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        assert sum(client.lookup(*gone).found) == 0
        found = {name: value for name in ENTRIES for name, value in client.get(name).items()}
        assert on_ssd is not None and len(found) >= on_ssd.entries - 1
        assert all(ENTRIES[name] == value for name, value in found.items()) and not found.keys() & set(gone)
        status = node.ssd_status()
        assert status is not None and status.state is SsdState.OK


def test_i12_a_deleted_tenant_leaves_no_file(settings: SsdSettings) -> None:
    with static_node(TENANTS, dram_bytes=8 * MIB, ssd=settings) as node:
        with connect_tcp(node) as client:
            client.hello(node.token("acme", "chat"))
            fill(node, client)
        assert (settings.folder / "acme").is_dir()
        node.apply({"blue": TENANTS["blue"]})
        wait_until(lambda: not (settings.folder / "acme").exists())
        node.apply(TENANTS)
        with connect_tcp(node) as client:
            client.hello(node.token("acme", "chat"))
            assert client.get(*ENTRIES) == {}
        node.check_invariants()


def test_grpc_reads_from_ssd_too(node: StaticNode) -> None:
    with connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        fill(node, client)
    metadata = (("authorization", f"Bearer {node.token('acme', 'chat')}"),)
    with grpc.insecure_channel(node.grpc_endpoint, options=[("grpc.max_receive_message_length", 16 * MIB)]) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        request = cache_pb2.GetBlocksRequest(namespace_id="chat", epoch=1, keys=[key(n) for n in range(10)])
        reply = stub.GetBlocks(request, metadata=metadata, timeout=20)
    assert {found.key: found.payload for found in reply.blocks} == {key(n): ENTRIES[key(n)] for n in range(10)}
