"""What the SSD store does on a device that fails, fills up or stops, and what it says about it."""

from __future__ import annotations

import errno

import pytest

from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES
from dataplane.core.usage import DropReason
from dataplane.io.ssd import SsdState
from dataplane.io.ssd_health import CALM_S, READ_ERRORS_MAX, RETRY_S
from dataplane.io.ssd_places import place_of
from saltern.names import TenantId
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_lives import DRAM, Start, fill, on_ssd, status, value_of
from tests.support.ssd_node import MIB, FaultyFiles, SsdNode, policy_of


def faults_of(node: SsdNode) -> FaultyFiles:
    assert isinstance(node.files, FaultyFiles)
    return node.files


def found(node: SsdNode, partition: Partition, numbers: range) -> list[int]:
    """Which entries a lookup promises."""
    answer = node.found(partition, [key_of(number) for number in numbers])
    return [number for number, is_found in zip(numbers, answer, strict=True) if is_found]


def test_i7_a_rotten_record_is_a_miss_and_the_tier_says_so(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    entry = node.tier.find(partition, key_of(2))
    assert entry is not None
    path = node.disk.path(place_of(entry.segment))
    with path.open("r+b") as file:
        file.seek((entry.block + 1) * BLOCK_BYTES + 77)
        file.write(b"!")
    assert node.get(partition, key_of(1), key_of(2), key_of(3)) == [value_of(1), None, value_of(3)]
    assert status(node) is SsdState.DEGRADED
    assert node.put(partition, key_of(2), value_of(2)) == ""
    assert node.tier.tenants[TenantId("a")].counters.read_failures == 1


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, "short"])
def test_a_failed_write_makes_the_tier_read_only_for_a_while(start: Start, fault: int | str) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    faults_of(node).write_faults.append(fault)
    fill(node, "a", range(10, 30))
    assert status(node) is SsdState.READ_ONLY
    assert ("full" in node.store.status.reason) == (fault == errno.ENOSPC)
    assert on_ssd(node, partition, range(30)) == list(range(5)), "reads go on"
    assert node.get(partition, key_of(0), key_of(29)) == [value_of(0), value_of(29)]
    node.pass_time(60)
    fill(node, "a", range(30, 50))
    assert status(node) is SsdState.OK
    assert len(on_ssd(node, partition, range(50))) > 20
    node = start()
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in on_ssd(node, partition, range(50)))


def test_i12_a_delete_that_cannot_be_recorded_costs_the_segment(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    faults_of(node).write_faults.append(errno.ENOSPC)
    node.core.delete(partition, [key_of(0)])
    node.workers.drain()
    assert on_ssd(node, partition, range(10)) == [3, 4]
    node = start()
    assert on_ssd(node, partition, range(10)) == [3, 4]


# ---- a device that cannot be read


def test_a_read_error_that_goes_away_costs_one_entry_and_is_forgotten_after_a_while(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    faults_of(node).read_faults.append(errno.EIO)
    assert node.get(partition, key_of(0)) == [None]
    node.workers.drain()
    assert found(node, partition, range(20)) == list(range(1, 20)), "I10: what could not be read is not promised"
    assert status(node) is SsdState.DEGRADED and node.store.status.read_errors == 1
    since_s = node.store.status.since_unix_s
    assert node.get(partition, *map(key_of, range(1, 4))) == [value_of(n) for n in range(1, 4)]
    assert node.put(partition, key_of(0), value_of(0)) == "" and node.get(partition, key_of(0)) == [value_of(0)]
    assert node.store.status.since_unix_s == since_s
    node.pass_time(int(CALM_S))
    assert status(node) is SsdState.OK and node.store.status.since_unix_s > since_s
    assert node.store.status.read_errors == 1, "counters keep it"


def test_a_bad_place_on_the_device_costs_the_record_that_lies_there(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    numbers = [n for n in range(15) if placed(node, partition, n) == placed(node, partition, 4)]
    at = 1
    faults_of(node).read_faults.extend([errno.EIO] + [None] * at + [errno.EIO])
    values = node.get(partition, *map(key_of, numbers))
    assert values == [None if n == numbers[at] else value_of(n) for n in numbers] and len(numbers) > 2
    assert node.store.status.read_errors == 1


def placed(node: SsdNode, partition: Partition, number: int) -> int:
    entry = node.tier.find(partition, key_of(number))
    assert entry is not None
    return entry.segment.number


def test_i10_a_device_that_is_gone_is_not_promised_and_comes_back(start: Start) -> None:
    node = start(limit=2 * MIB)
    partition = fill(node, "a", range(60))
    for number in range(READ_ERRORS_MAX):
        faults_of(node).read_faults.append(errno.EIO)
        assert node.get(partition, key_of(number)) == [None]
    assert status(node) is SsdState.OFF and "cannot be read" in node.store.status.reason
    assert found(node, partition, range(60)) == list(range(56, 60)), "what DRAM has"
    assert node.store.fetch(partition, [key_of(20)], [None], None) is None, "nothing to wait for"
    assert node.put(partition, key_of(20), value_of(920)) == "", "a client may put what cannot be served"
    assert node.get(partition, key_of(20)) == [value_of(920)]
    since_s = node.store.status.since_unix_s

    node.pass_time(int(RETRY_S))
    faults_of(node).read_faults.append(errno.EIO)
    assert node.get(partition, key_of(21)) == [None], "tried again, and still gone"
    assert not node.tier.is_readable
    assert (status(node), node.store.status.since_unix_s) == (SsdState.OFF, since_s), "no flapping"

    node.pass_time(int(RETRY_S))
    assert node.get(partition, key_of(22)) == [value_of(22)]
    assert status(node) is SsdState.DEGRADED
    assert found(node, partition, range(60)) == [n for n in range(60) if n not in (*range(READ_ERRORS_MAX), 21)]
    fill(node, "a", range(60, 80))
    assert node.get(partition, key_of(20)) == [value_of(920)], "what was put last"


def test_i10_a_device_that_does_not_answer_is_not_promised_until_it_does(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    pins = node.core.get_start(partition, [key_of(0)], node.tick(), counts_misses=False)
    fetch = node.store.fetch(partition, [key_of(0)], pins, None)
    assert fetch is not None and node.store.status.reads_in_progress == 1
    node.pass_time(3)
    assert fetch.is_done and pins == [None]
    assert status(node) is SsdState.OFF and found(node, partition, range(20)) == list(range(16, 20))
    node.workers.drain()
    assert status(node) is SsdState.OK and len(found(node, partition, range(20))) == 20
    assert node.store.status.reads_in_progress == 0


def test_a_tier_whose_folder_cannot_be_read_is_off_and_dram_goes_on(start: Start) -> None:
    class Unreadable(FaultyFiles):
        def probe(self, folder: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

    node = start()
    fill(node, "a", range(20))
    node = start(files=Unreadable())
    partition = node.partition("a")
    for number in range(10):
        assert node.put(partition, key_of(number), value_of(number)) == ""
    node.workers.drain()
    node.core.check_invariants()
    assert status(node) is SsdState.OFF
    assert found(node, partition, range(10)) == list(range(5, 10)) and node.get(partition, key_of(0)) == [None]
    assert node.tier.tenants[TenantId("a")].counters.dropped_by_reason == {DropReason.NOT_WRITABLE: 5}
    node.pass_time(int(RETRY_S))
    assert status(node) is SsdState.OFF and not node.tier.is_writable
    node = start()
    assert len(on_ssd(node, partition, range(20))) == 15, "nothing was touched"


# ---- a device that does not keep what it is given


def test_a_device_full_that_clears_is_told_once(start: Start) -> None:
    node = start()
    fill(node, "a", range(10))
    files = faults_of(node)
    files.write_faults.append(errno.ENOSPC)
    fill(node, "a", range(10, 20))
    told = node.store.status
    assert (told.state, told.reason, told.write_errors) == (SsdState.READ_ONLY, "the device is full", 1)
    dropped = node.tier.tenants[TenantId("a")].counters.dropped_by_reason
    assert dropped[DropReason.WRITE_FAILED] == 1 and dropped[DropReason.NOT_WRITABLE] == 9
    node.pass_time(int(RETRY_S))
    files.write_faults.append(errno.ENOSPC)
    fill(node, "a", range(20, 30))
    assert node.store.status.since_unix_s == told.since_unix_s and status(node) is SsdState.READ_ONLY, "no flapping"
    node.pass_time(int(RETRY_S))
    partition = fill(node, "a", range(30, 40))
    assert status(node) is SsdState.OK and on_ssd(node, partition, range(25, 35)) == list(range(25, 35))


def test_i12_records_of_a_failed_write_are_cut_off_though_they_are_whole(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(6))
    for number in (6, 7):
        node.put(partition, key_of(number), value_of(number))
    faults_of(node).write_faults.append("short")  # two records in one go, of which the first arrives
    node.workers.drain()
    assert status(node) is SsdState.READ_ONLY and on_ssd(node, partition, range(8)) == [0]
    assert node.core.delete(partition, [key_of(1)]) == 0
    node = start()
    assert on_ssd(node, partition, range(8)) == [0], "a deleted entry came back"


def test_a_segment_that_could_not_be_made_durable_is_lost_and_not_asked_again(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(6))
    files = faults_of(node)
    files.sync_faults.append(errno.EIO)
    node.tier.seal_all()
    node.workers.drain()
    assert on_ssd(node, partition, range(6)) == [] and found(node, partition, range(6)) == list(range(1, 6))
    counters = node.tier.tenants[TenantId("a")].counters
    assert counters.lost == 1 and node.store.status.write_errors == 1
    assert status(node) is SsdState.READ_ONLY
    assert len(files.syncs) == len(set(files.syncs)) == 1, "a second fsync would succeed without the bytes"
    assert node.file_bytes("a") == node.used_bytes("a") == 0
    node.pass_time(int(RETRY_S))
    fill(node, "a", range(6, 20))
    assert status(node) is SsdState.OK and len(on_ssd(node, partition, range(20))) > 5


def test_i12_tombstones_outlive_a_segment_that_could_not_be_made_durable(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    node.tier.seal_all()
    node.workers.drain()
    node.core.delete(partition, [key_of(0), key_of(2)])
    fill(node, "a", range(10, 12))
    faults_of(node).sync_faults.append(errno.EIO)
    node.tier.seal_all()
    node.workers.drain()
    assert node.tier.tenants[TenantId("a")].counters.lost == 2
    assert on_ssd(node, partition, range(12)) == [1, 3, 4]
    # What is lost to us is still in the file, which has to stay for its tombstones: deleting must reach it there.
    node.pass_time(int(RETRY_S))
    node.core.delete(partition, [key_of(6)])
    node.workers.drain()
    node = start()
    left = on_ssd(node, partition, range(12))
    assert not {0, 2, 6} & set(left) and {1, 3, 4} <= set(left)


def test_i12_where_no_tombstone_can_be_written_older_segments_go_with_the_one_that_guards_them(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    node.tier.seal_all()
    node.workers.drain()
    node.core.delete(partition, [key_of(0), key_of(2)])
    fill(node, "a", range(10, 12))
    faults_of(node).sync_faults.append(errno.EIO)
    node.tier.seal_all()
    node.workers.drain()
    assert not node.tier.is_writable and node.core.delete(partition, [key_of(5)]) == 0
    node.workers.drain()
    node = start()
    assert on_ssd(node, partition, range(12)) == [], "0 and 2 would be back without the newer one, 5 with it"


def test_i12_the_key_is_destroyed_though_the_device_failed_at_first(start: Start) -> None:
    node = start()
    fill(node, "a", range(20))
    faults_of(node).write_faults.append(errno.EIO)
    node.apply(policy_of(2, {"b": (DRAM, TierQuota(0, MIB))}))
    node.workers.drain()
    assert (node.root / "a").exists()
    node.pass_time(int(RETRY_S))
    node.workers.drain()
    assert not (node.root / "a").exists()
