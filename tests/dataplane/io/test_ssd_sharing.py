"""A peer's entry on its way from SSD, and what becomes of its owner meanwhile (I2, I4, I5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataplane.core.admission import open_partition
from dataplane.core.lease import Lease
from dataplane.core.partition import Partition
from saltern.names import NamespaceId, TenantId
from tenants.policy import GroupPeer, GroupPolicy, NodePolicy, TenantState
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_node import KIB, MIB, SsdNode, policy_of

NS = NamespaceId("ns")
A, B = TenantId("a"), TenantId("b")
COUNT = 24


def shared(
    version: int, members: str = "ab", *, epoch: int = 7, suspended: str = "", tenants: str = "ab"
) -> NodePolicy:
    quotas = (TierQuota(0, 256 * KIB), TierQuota(0, 8 * MIB))
    plain = policy_of(version, dict.fromkeys(tenants, quotas))
    rules = {}
    for tenant, policy in plain.tenants.items():
        peers = tuple(GroupPeer(TenantId(one), NS, "uid-1") for one in members if one != tenant)
        groups = {"g": GroupPolicy((epoch,), peers)} if tenant in members else {}
        rules[tenant] = replace(
            policy,
            state=TenantState.SUSPENDED if tenant in suspended else TenantState.ACTIVE,
            namespaces={NS: replace(policy.namespaces[NS], groups=groups)},
        )
    return NodePolicy(version, rules)


def partition_of(node: SsdNode, tenant: TenantId, epoch: int = 7) -> Partition:
    return open_partition(
        node.core.policy,
        claims_tenant=tenant,
        claims_namespace=NS,
        requested_namespace=NS,
        epoch=epoch,
        group_uid="g",
    )


def value_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * (8 * KIB)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SsdNode]:
    """``a`` has 24 entries of 32 KiB: 8 in DRAM, the others on SSD. ``b`` has none."""
    node = SsdNode(tmp_path, dram_bytes=1 * MIB, ssd_bytes=32 * MIB).recover()
    node.apply(shared(1))
    for number in range(COUNT):
        assert node.put(partition_of(node, A), key_of(number), value_of(number)) == ""
        node.workers.drain()
    yield node
    node.workers.drain()
    node.check()
    for usage in node.core.usage().tenants.values():
        assert usage.held_bytes == usage.in_flight_bytes == 0
    node.stop()


def test_i4_what_comes_from_a_peers_ssd_is_the_readers_to_pay(node: SsdNode) -> None:
    before = node.core.usage().tenants[A]
    reader = partition_of(node, B)
    assert node.get(reader, *map(key_of, range(4))) == [value_of(number) for number in range(4)]
    usage = node.core.usage().tenants
    assert usage[B].used_bytes == 4 * 32 * KIB
    assert usage[A].used_bytes == before.used_bytes and usage[A].counters == before.counters
    assert usage[A].ssd is not None and before.ssd is not None
    assert usage[A].ssd.counters.reads == before.ssd.counters.reads
    assert usage[B].ssd is not None and usage[B].ssd.counters.reads == 4


def test_i5_a_peers_interest_makes_nothing_hot_for_its_owner(node: SsdNode) -> None:
    node.get(partition_of(node, B), *map(key_of, range(4)))
    books = node.tier.index(partition_of(node, A))
    assert books is not None and not any(books.entries[key_of(number)].is_hot for number in range(4))
    node.get(partition_of(node, A), key_of(5))
    assert books.entries[key_of(5)].is_hot


ENDS: dict[str, Callable[[SsdNode], Any]] = {
    "its owner deletes it": lambda node: node.core.delete(partition_of(node, A), [key_of(0)]),
    "its owner is suspended": lambda node: node.apply(shared(2, suspended="a")),
    "its owner is deleted": lambda node: node.apply(shared(2, "b", epoch=8, tenants="b")),
    "its owner leaves": lambda node: node.apply(shared(2, "b", epoch=8)),
    "the reader leaves": lambda node: node.apply(shared(2, "a", epoch=8)),
    "the reader is suspended": lambda node: node.apply(shared(2, suspended="b")),
    "the lease runs out": lambda node: node.core.renew(Lease(node.now_ns), node.tick()),
}


@pytest.mark.parametrize("end", ENDS)
def test_i2_what_is_no_longer_shared_when_it_arrives_is_not_served(node: SsdNode, end: str) -> None:
    reader = partition_of(node, B)
    pins = node.core.get_start(reader, [key_of(0)], node.tick(), counts_misses=False)
    fetch = node.store.fetch(reader, [key_of(0)], pins, None)
    assert fetch is not None and not fetch.is_done

    ENDS[end](node)
    node.workers.drain()

    assert fetch.is_done and pins == [None]
    fetch.close()
    node.core.get_end(pins)
    usage = node.core.usage().tenants.get(B)
    assert usage is None or usage.used_bytes == 0
