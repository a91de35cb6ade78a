"""A node over a real Mooncake store: what comes back, what others on that network can do, what happens without it."""

from __future__ import annotations

import base64
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataplane.io.engines.objects import EngineCounts
from dataplane.io.ssd import SsdState
from dataplane.settings import SsdSettings
from saltern.names import TenantId
from tests.support.mooncake_cluster import Cluster
from tests.support.scraping import Scrape
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, block, connect_tcp, key

SIZE = 64 * 1024
COUNT = 100
ENTRIES = {key(n): block(n, SIZE - n) for n in range(COUNT)}
TENANTS = {name: tenant_policy(limit_bytes=2 * MIB, ssd_limit_bytes=32 * MIB) for name in ("acme", "blue")}
#: What DRAM has room for; the others are in the store.
IN_DRAM = 32


@pytest.fixture
def settings(cluster: Cluster, tmp_path: Path) -> SsdSettings:
    return SsdSettings(tmp_path / "ledger", 64 * MIB, tmp_path, mooncake=cluster.settings)


@contextmanager
def running(settings: SsdSettings) -> Iterator[tuple[StaticNode, WireClient]]:
    with (
        static_node(TENANTS, dram_bytes=8 * MIB, ssd=settings, metrics_tenants_max=10) as node,
        connect_tcp(node) as client,
    ):
        client.hello(node.token("acme", "chat"))
        yield node, client
        node.check_invariants()


@pytest.fixture
def node_and_client(settings: SsdSettings) -> Iterator[tuple[StaticNode, WireClient]]:
    with running(settings) as both:
        yield both


def fill(client: WireClient) -> None:
    """Put three times what DRAM holds; returns when everything is in one of the tiers."""
    for name, value in ENTRIES.items():
        assert client.put({name: value}).codes in (b"\0", b"\x06")
    wait_until(lambda: client.lookup(*ENTRIES).prefix == COUNT, 60)


def found(client: WireClient) -> dict[bytes, bytes]:
    """What gets give, one key at a time; every value is the one that was put (I7)."""
    there = {name: value for name in ENTRIES for name, value in client.get(name).items()}
    assert all(ENTRIES[name] == value for name, value in there.items()), "wrong bytes"
    return there


def counts(node: StaticNode) -> EngineCounts:
    engine = node._node._engine
    assert engine is not None
    return engine.counts


def state(node: StaticNode) -> SsdState:
    status = node.ssd_status()
    assert status is not None
    return status.state


def test_i7_what_dram_gives_up_comes_back(node_and_client: tuple[StaticNode, WireClient]) -> None:
    node, client = node_and_client
    fill(client)
    assert found(client) == ENTRIES
    assert counts(node).reads >= COUNT - IN_DRAM and counts(node).forged == counts(node).gone == 0
    page = Scrape(node.metrics_endpoint)
    assert page.value("engine_connected", engine="mooncake") == 1
    assert (page.value("engine_reads_total", outcome="hit") or 0) >= COUNT - IN_DRAM
    assert (page.value("engine_written_bytes_total") or 0) >= (COUNT - IN_DRAM) * SIZE


def test_i2_a_neighbour_finds_nothing_and_what_it_stores_is_another_thing(
    node_and_client: tuple[StaticNode, WireClient],
) -> None:
    node, client = node_and_client
    fill(client)
    with connect_tcp(node) as other:
        other.hello(node.token("blue", "chat"))
        assert other.lookup(*ENTRIES).found == bytes(COUNT) and other.get(*ENTRIES) == {}
        own = {name: bytes(reversed(value)) for name, value in ENTRIES.items()}
        for name, value in own.items():
            assert other.put({name: value}).codes == b"\0"
        wait_until(lambda: other.lookup(*own).prefix == COUNT, 60)
        assert all(other.get(name) == {name: value} for name, value in own.items())
    assert found(client) == ENTRIES


def test_i2_i7_a_stranger_reads_ciphertext_and_what_it_writes_or_removes_is_a_miss(
    cluster: Cluster, node_and_client: tuple[StaticNode, WireClient]
) -> None:
    """With Mooncake's own client, from another process: everything that it can do to objects by name."""
    node, client = node_and_client
    fill(client)
    names = cluster.names()
    assert len(names) >= COUNT - IN_DRAM
    stolen = {name: base64.b64decode(cluster.ask("read", name)) for name in names}
    everything = b"".join(name.encode() + data for name, data in stolen.items())
    assert len(everything) > (COUNT - IN_DRAM) * SIZE
    for number in range(1, COUNT):  # of number 0 everything is zeros, as padding is
        assert ENTRIES[key(number)][:64] not in everything
    assert b"acme" not in everything and b"uid-1" not in everything
    kinds = [names[start::4] for start in range(4)]
    for name in kinds[0]:
        assert cluster.ask("remove", name) == 0
    for name in kinds[1]:
        assert cluster.ask("overwrite", name, base64.b64encode(bytes(len(stolen[name]))).decode()) == 0
    swapped = kinds[2]
    for name, other in zip(swapped, [*swapped[1:], swapped[0]], strict=True):
        assert cluster.ask("overwrite", name, base64.b64encode(stolen[other]).decode()) == 0
    there = found(client)
    assert len(there) >= len(kinds[3])
    counted = counts(node)
    assert counted.gone >= len(kinds[0]) - 2 and counted.forged >= len(kinds[1]) + len(swapped) - 4
    assert "ok" not in (state(node).value,), "somebody writes where nobody should: said in health and metrics"
    with connect_tcp(node) as neighbour:  # who feels nothing of it
        neighbour.hello(node.token("blue", "chat"))
        assert neighbour.put({key(1): b"value"}).codes == b"\0" and neighbour.get(key(1)) == {key(1): b"value"}


def test_i7_one_sided_writes_into_the_store_s_memory_are_misses(
    cluster: Cluster, node_and_client: tuple[StaticNode, WireClient]
) -> None:
    """Past every name and the master: bytes by address, as Mooncake's transfer engine gives them to whoever asks."""
    node, client = node_and_client
    fill(client)
    places = list(cluster.places(cluster.names()).values())
    endpoint = places[0][0]
    hit = [at + 4096 + 100 for where, at, _ in places if where == endpoint]
    assert cluster.one_sided(endpoint, hit) == [0] * len(hit)
    there = found(client)
    assert len(there) < COUNT and counts(node).forged >= COUNT - IN_DRAM - 4


def test_i12_what_is_deleted_leaves_the_store(cluster: Cluster, node_and_client: tuple[StaticNode, WireClient]) -> None:
    node, client = node_and_client
    fill(client)
    before = len(cluster.names())
    gone = [key(number) for number in range(10)]
    assert client.delete(*gone) == 10
    wait_until(lambda: len(cluster.names()) <= before - 10 + 2, 30)
    with connect_tcp(node) as other:
        other.hello(node.token("blue", "chat"))
        for name, value in ENTRIES.items():
            other.put({name: value})
        wait_until(lambda: other.lookup(*ENTRIES).prefix == COUNT, 60)
    node.apply({"blue": TENANTS["blue"]})
    wait_until(lambda: len(cluster.names()) <= COUNT - 20, 30)
    node.apply({})
    wait_until(lambda: cluster.names() == [], 30)


def test_i4_the_store_never_has_more_of_a_tenant_than_its_limit(
    cluster: Cluster, node_and_client: tuple[StaticNode, WireClient]
) -> None:
    """Under load from several sessions; objects are counted where they are, and only this tenant has any."""
    node, _ = node_and_client
    limit = 8 * MIB
    node.apply({"acme": tenant_policy(limit_bytes=2 * MIB, ssd_limit_bytes=limit), "blue": TENANTS["blue"]})
    over: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            held = len(cluster.names()) * (SIZE + 4096)
            usage = node.usage().tenants[TenantId("acme")]
            assert usage.ssd is not None
            if held > limit or usage.ssd.used_bytes > limit:
                over.append(held)

    def load(offset: int) -> None:
        with connect_tcp(node) as client:
            client.hello(node.token("acme", "chat"))
            for number in range(offset, offset + 150):
                client.put({key(number): block(number, SIZE)})
                for name, value in client.get(key(max(offset, number - 40))).items():
                    assert value == block(max(offset, number - 40), SIZE) and name

    watching = threading.Thread(target=watch)
    watching.start()
    threads = [threading.Thread(target=load, args=(1000 * worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watching.join()
    assert over == []
    assert counts(node).writes > 100 and counts(node).removed > 0


# ---- without it


def test_i10_a_killed_master_costs_hits_and_it_goes_on_when_it_is_back(
    cluster: Cluster, node_and_client: tuple[StaticNode, WireClient]
) -> None:
    node, client = node_and_client
    fill(client)
    cluster.kill_master()
    wait_until(lambda: Scrape(node.metrics_endpoint).value("engine_connected", engine="mooncake") == 0, 30)
    for number in range(200, 260):
        assert client.put({key(number): block(number, SIZE)}).codes == b"\0", "DRAM takes what comes"
        assert client.get(key(number)) == {key(number): block(number, SIZE)}
    assert found(client).keys() <= ENTRIES.keys()
    wait_until(lambda: state(node) is not SsdState.OK, 30)
    cluster.return_master()
    wait_until(lambda: Scrape(node.metrics_endpoint).value("engine_connected", engine="mooncake") == 1, 60)

    def is_kept_again() -> bool:
        writes = counts(node).writes
        for number in range(300, 380):
            client.put({key(number): block(number, SIZE)})
        return counts(node).writes > writes

    wait_until(is_kept_again, 90)
    assert found(client).keys() <= ENTRIES.keys()


def test_i10_a_killed_storage_process_costs_what_it_held(
    cluster: Cluster, node_and_client: tuple[StaticNode, WireClient]
) -> None:
    node, client = node_and_client
    fill(client)
    cluster.kill_storage()
    there = found(client)
    assert IN_DRAM - 4 <= len(there) < COUNT
    for number in range(200, 240):
        assert client.put({key(number): block(number, SIZE)}).codes == b"\0"
    cluster.return_storage()

    def comes_back() -> bool:
        for number in range(300, 380):
            client.put({key(number): block(number, SIZE)})
        reads = counts(node).reads
        for number in range(300, 340):
            assert client.get(key(number)) in ({}, {key(number): block(number, SIZE)})
        return counts(node).reads > reads

    wait_until(comes_back, 90)


def test_i10_a_killed_client_process_is_replaced(node_and_client: tuple[StaticNode, WireClient]) -> None:
    node, client = node_and_client
    fill(client)
    engine = node._node._engine
    assert engine is not None
    child = engine._store._child  # type: ignore[attr-defined]  # the test's victim
    os.kill(child._process.pid, signal.SIGKILL)
    assert found(client).keys() <= ENTRIES.keys()
    wait_until(lambda: engine._store._child not in (None, child) and engine.is_connected, 60)  # type: ignore[attr-defined]

    def reads_again() -> bool:
        reads = counts(node).reads
        found(client)
        return counts(node).reads > reads

    wait_until(reads_again, 90)


def test_i10_a_node_starts_and_serves_without_a_store(cluster: Cluster, settings: SsdSettings) -> None:
    cluster.kill_master()
    with running(settings) as (node, client):
        assert client.put({key(1): b"value"}).codes == b"\0" and client.get(key(1)) == {key(1): b"value"}
        status = node.ssd_status()
        assert status is not None and status.state is SsdState.READ_ONLY and "Mooncake" in status.reason
        cluster.return_master()

        def is_used() -> bool:
            for name, value in ENTRIES.items():
                client.put({name: value})
            found(client)
            return counts(node).reads > 0

        wait_until(is_used, 90)


# ---- restarts


def test_a_restarted_node_finds_again_what_the_store_still_has(cluster: Cluster, settings: SsdSettings) -> None:
    with running(settings) as (node, client):
        fill(client)
        usage = node.usage().tenants[TenantId("acme")].ssd
        assert usage is not None
    with running(settings) as (node, client):
        there = found(client)
        assert len(there) >= usage.entries - 1 and counts(node).reads >= usage.entries - 1
        node.apply({})
        wait_until(lambda: cluster.names() == [], 30)


def test_i12_a_restarted_node_does_not_find_what_was_deleted_even_if_it_is_put_back(
    cluster: Cluster, settings: SsdSettings
) -> None:
    gone = [key(number) for number in range(10)]
    with running(settings) as (_, client):
        fill(client)
        kept = {name: cluster.ask("read", name) for name in cluster.names()}
        assert client.delete(*gone) == 10
    for name, data in kept.items():
        cluster.ask("overwrite", name, data)
    with running(settings) as (_, client):
        assert client.get(*gone) == {} and sum(client.lookup(*gone).found) == 0
        assert found(client).keys() <= ENTRIES.keys() - set(gone)
