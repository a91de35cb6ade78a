"""What DRAM evicts on its way to SSD: what is taken, what is dropped and why, who waits for whom."""

from __future__ import annotations

from saltern.names import TenantId
from tests.support.cache_node import key_of
from tests.support.ssd_lives import RECORD, Start, fill, on_ssd, value_of
from tests.support.ssd_node import MIB


def test_what_dram_evicts_is_served_from_ssd(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    assert on_ssd(node, partition, range(20)) == list(range(15))
    for number in range(20):
        assert node.get(partition, key_of(number)) == [value_of(number)]
    usage = node.core.usage().tenants[TenantId("a")]
    assert usage.ssd is not None and usage.ssd.counters.demotions == 20
    assert usage.ssd.counters.reads >= 15


def test_an_entry_on_both_tiers_is_not_written_twice(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    for _ in range(3):
        for number in range(10):
            assert node.get(partition, key_of(number)) == [value_of(number)]
    assert node.tier.tenants[TenantId("a")].counters.demotions == 10


def test_a_write_budget_bounds_what_a_tenant_wears_off(start: Start) -> None:
    rate = 10 * RECORD
    node = start(limit=64 * MIB, ssd_bytes=128 * MIB, write_bytes_per_s=rate)
    partition = fill(node, "a", range(40))
    assert len(on_ssd(node, partition, range(40))) == 10
    assert node.tier.tenants[TenantId("a")].counters.demotions_dropped == 25
    node.pass_time(1)
    fill(node, "a", range(40, 60))
    assert len(on_ssd(node, partition, range(60))) == 20


def test_a_full_staging_memory_drops_and_counts(start: Start) -> None:
    node = start(staging_bytes=6 * RECORD)  # of which one tenant has half
    partition = node.partition("a")
    for number in range(20):
        node.put(partition, key_of(number), value_of(number))
    node.workers.drain()
    assert on_ssd(node, partition, range(20)) == [0, 1, 2]
    assert node.tier.tenants[TenantId("a")].counters.demotions_dropped == 12
    assert [node.get(partition, key_of(n))[0] for n in (2, 3)] == [value_of(2), None]


def test_i10_a_tenant_that_floods_leaves_room_for_another(start: Start) -> None:
    node = start(staging_bytes=20 * RECORD, ssd_bytes=8 * MIB)
    mine, theirs = node.partition("a"), node.partition("b")
    for number in range(5):
        node.put(theirs, key_of(number), value_of(number))
    for number in range(60):
        node.put(mine, key_of(number), value_of(number))
    for number in range(5, 10):
        node.put(theirs, key_of(number), value_of(number))
    node.workers.drain()
    assert on_ssd(node, theirs, range(5)) == list(range(5))
    assert len(on_ssd(node, mine, range(60))) == 10
    assert not node.store._staging._shares and not node.store._reader._tenant_reads
