"""What DRAM evicts on its way to SSD: what is taken, what is dropped and why, who waits for whom."""

from __future__ import annotations

from dataplane.core.segments import BLOCK_BYTES
from dataplane.core.usage import DropReason
from saltern.names import TenantId
from tenants.quota import RateLimits, TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_lives import DRAM, RECORD, Start, fill, on_ssd, value_of
from tests.support.ssd_node import MIB, policy_of


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
    counters = node.tier.tenants[TenantId("a")].counters
    assert counters.dropped_by_reason == {DropReason.WRITE_BUDGET: 25}
    assert counters.written_bytes == 10 * RECORD
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
    assert node.tier.tenants[TenantId("a")].counters.dropped_by_reason == {DropReason.NO_STAGING: 12}
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


def test_the_policy_sets_the_write_budget_and_the_node_where_it_does_not(start: Start) -> None:
    quotas = {"a": (DRAM, TierQuota(0, 64 * MIB))}
    node = start(ssd_bytes=128 * MIB, write_bytes_per_s=4 * RECORD, policy=False)

    def written_in_a_second(version: int, rate: int, first: int) -> int:
        node.apply(policy_of(version, quotas, rates=RateLimits(ssd_write_bytes_per_s=rate)))
        usage = node.core.usage().tenants[TenantId("a")].ssd
        assert usage is not None and usage.write_bytes_per_s == (rate or 4 * RECORD)
        node.pass_time(1)
        fill(node, "a", range(first, first + 30))
        return (node.tier.tenants[TenantId("a")].counters.written_bytes - usage.counters.written_bytes) // RECORD

    assert written_in_a_second(1, 0, 0) == 4, "the node's"
    assert written_in_a_second(2, 9 * RECORD, 100) == 9, "the tenant's, from the next policy on"
    assert written_in_a_second(3, 2 * RECORD, 200) == 2, "a lower one holds at once"
    assert written_in_a_second(4, 0, 300) == 4


def test_a_clock_that_goes_backwards_refills_no_write_budget(start: Start) -> None:
    node = start(limit=64 * MIB, ssd_bytes=128 * MIB, write_bytes_per_s=4 * RECORD)
    node.pass_time(100)
    fill(node, "a", range(20))
    node.now_ns -= 50_000_000_000
    partition = fill(node, "a", range(20, 40))
    node.now_ns += 50_000_000_000
    fill(node, "a", range(40, 60))
    assert len(on_ssd(node, partition, range(60))) == 4
    node.pass_time(1)
    fill(node, "a", range(60, 80))
    assert len(on_ssd(node, partition, range(80))) == 8


def test_an_entry_that_can_never_fit_is_dropped_for_want_of_room(start: Start) -> None:
    node = start(limit=RECORD + BLOCK_BYTES)  # room for the record, and not for head and footer beside it
    fill(node, "a", range(10))
    counters = node.tier.tenants[TenantId("a")].counters
    assert counters.dropped_by_reason == {DropReason.NO_ROOM: 5} and counters.written_bytes == 0


def test_status_tells_what_is_on_its_way(start: Start) -> None:
    node = start()
    partition = node.partition("a")
    for number in range(8):
        node.put(partition, key_of(number), value_of(number))
    told = node.store.status
    assert (told.staged_bytes, told.queued_writes) == (3 * RECORD, 3)
    node.workers.drain()
    told = node.store.status
    assert (told.staged_bytes, told.queued_writes, told.reads_in_progress) == (0, 0, 0)
    assert told.used_bytes == node.used_bytes("a") and told.capacity_bytes == 4 * MIB
