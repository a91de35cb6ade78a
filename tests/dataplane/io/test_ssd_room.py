"""Limits, reservations and reclaim on SSD, counted in bytes of files (I4, I5)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from saltern.names import TenantId
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_lives import DRAM, Start, fill, on_ssd, value_of
from tests.support.ssd_node import KIB, MIB, FaultyFiles, policy_of


def test_i4_dead_bytes_count_and_the_limit_holds_on_disk(start: Start) -> None:
    node = start(limit=400 * KIB)
    partition = node.partition("a")
    for number in range(200):
        assert node.put(partition, key_of(number), value_of(number)) == ""
        if number % 3 == 0:
            node.core.delete(partition, [key_of(max(number - 6, 0))])
        node.workers.step()
        node.check()
        assert node.file_bytes("a") <= node.used_bytes("a") <= 400 * KIB
    node.workers.drain()
    node.check_files()
    assert node.tier.tenants[TenantId("a")].counters.evictions > 50


class Held(FaultyFiles):
    """A folder out of which no file can be removed."""

    def unlink(self, path: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_i4_what_could_not_be_removed_yet_counts_and_nothing_is_written_past_the_limit(start: Start) -> None:
    node = start(limit=400 * KIB, files=Held())
    partition = node.partition("a")
    for number in range(100):
        assert node.put(partition, key_of(number), value_of(number)) == ""
        node.workers.drain()
        node.check()
        assert node.file_bytes("a") <= node.used_bytes("a") <= 400 * KIB
    owner = node.tier.tenants[TenantId("a")]
    assert owner.leaving_bytes > 0 and node.used_bytes("a") > 300 * KIB, "full of what is to go"
    assert node.tier.is_writable


def test_a_reclaim_goes_from_the_oldest_and_keeps_what_is_hot(start: Start) -> None:
    node = start(limit=MIB)
    partition = fill(node, "a", range(40))
    assert node.get(partition, key_of(0)) == [value_of(0)]
    fill(node, "a", range(40, 90))
    assert node.tier.tenants[TenantId("a")].counters.relocations == 1
    left = on_ssd(node, partition, range(90))
    assert left[0] == 0 and left[1] > 20, "the hot one stayed, its neighbours went"
    assert left[1:] == list(range(left[1], 85))
    assert node.get(partition, key_of(0)) == [value_of(0)]


def test_i5_a_tenant_within_its_reservation_loses_no_segment_to_others(start: Start) -> None:
    node = start(limit=2 * MIB, reserved=512 * KIB, ssd_bytes=MIB)
    mine = fill(node, "a", range(25))
    before = on_ssd(node, mine, range(25))
    assert node.used_bytes("a") <= 512 * KIB and len(before) == 20
    fill(node, "b", range(200))
    assert on_ssd(node, mine, range(25)) == before
    assert node.tier.tenants[TenantId("b")].counters.evictions > 0


def test_i5_a_lent_reservation_is_taken_back(start: Start) -> None:
    node = start(limit=2 * MIB, reserved=512 * KIB, ssd_bytes=MIB)
    fill(node, "b", range(200))
    assert node.used_bytes("b") > 512 * KIB
    fill(node, "a", range(40))
    assert node.used_bytes("a") > 400 * KIB
    assert node.used_bytes("b") <= 600 * KIB


def test_i4_a_lower_limit_converges_at_once(start: Start) -> None:
    node = start(limit=MIB)
    partition = fill(node, "a", range(60))
    node.apply(policy_of(2, {"a": (DRAM, TierQuota(0, 256 * KIB))}))
    assert node.used_bytes("a") - node.tier.tenants[TenantId("a")].leaving_bytes <= 256 * KIB
    node.workers.drain()
    assert node.file_bytes("a") <= node.used_bytes("a") <= 256 * KIB
    left = on_ssd(node, partition, range(60))
    assert left == list(range(left[0], 55)), "the newest stay"
