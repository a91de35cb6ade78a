"""The SSD store step by step: what is written, kept, reclaimed, destroyed, and what it says about its device."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES
from dataplane.io.ssd import SsdState
from dataplane.io.ssd_files import Files
from saltern.errors import FailedPreconditionError
from saltern.names import TenantId
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_node import KIB, MIB, Crash, FaultyFiles, SsdNode, policy_of

SIZE = 12 * KIB
RECORD = SIZE + BLOCK_BYTES
DRAM = TierQuota(0, 64 * KIB)
Start = Callable[..., SsdNode]


def value_of(number: int) -> bytes:
    return (number.to_bytes(4, "big") * (SIZE // 4 + 1))[:SIZE]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a node with tenants a and b; starting another one first kills the one before."""
    nodes: list[SsdNode] = []

    def run(limit: int = MIB, *, reserved: int = 0, policy: bool = True, **options: object) -> SsdNode:
        if nodes:
            nodes.pop().release()
        options = {"dram_bytes": 128 * KIB, "ssd_bytes": 4 * MIB, **options}
        node = SsdNode(tmp_path, **options).recover()  # type: ignore[arg-type]
        nodes.append(node)
        if policy:
            node.apply(policy_of(1, dict.fromkeys("ab", (DRAM, TierQuota(reserved, limit)))))
        return node

    yield run
    if nodes:
        nodes[-1].check()
        nodes[-1].release()


def fill(node: SsdNode, tenant: str, numbers: range) -> Partition:
    partition = node.partition(tenant)
    for number in numbers:
        assert node.put(partition, key_of(number), value_of(number)) == ""
        node.workers.drain()
        node.check()
    return partition


def on_ssd(node: SsdNode, partition: Partition, numbers: range) -> list[int]:
    return [number for number in numbers if node.tier.find(partition, key_of(number)) is not None]


def status(node: SsdNode) -> SsdState:
    return node.store.status.state


# ---- coming and going


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


def test_a_write_budget_bounds_what_a_tenant_wears_off(start: Start) -> None:
    rate = 10 * RECORD
    node = start(limit=64 * MIB, ssd_bytes=128 * MIB, write_bytes_per_s=rate)
    node.tier.tenants[TenantId("a")].bucket.burst = rate
    partition = fill(node, "a", range(40))
    assert len(on_ssd(node, partition, range(40))) == 10
    assert node.tier.tenants[TenantId("a")].counters.demotions_dropped == 25
    node.now_ns += 1_000_000_000
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
    assert not node.store._staged_bytes and not node.store._tenant_reads


# ---- deletion


def test_i12_a_deleted_tenant_leaves_no_file_and_no_key(start: Start) -> None:
    node = start()
    fill(node, "a", range(20))
    fill(node, "b", range(20))
    stolen = {path: path.read_bytes() for path in (node.root / "a").rglob("*.seg")}
    data_keys = [key for folder, key in node.disk.data_keys.items() if folder.tenant == "a"]
    assert stolen and data_keys
    node.apply(policy_of(2, {"b": (DRAM, TierQuota(0, MIB))}))
    assert TenantId("a") not in node.core.usage().tenants or node.used_bytes("a")
    node.workers.drain()
    assert not (node.root / "a").exists()
    assert TenantId("a") not in node.tier.tenants
    everything = b"".join(path.read_bytes() for path in node.root.parent.rglob("*") if path.is_file())
    assert not any(key in everything for key in data_keys)
    assert not any(value_of(number) in raw for raw in stolen.values() for number in range(20))
    assert node.get(node.partition("b"), key_of(0)) == [value_of(0)]


def test_i12_an_interrupted_deletion_is_finished_at_the_next_start(start: Start) -> None:
    for died_after in range(1, 6):
        node = start()
        fill(node, "a", range(20))
        node.apply(policy_of(2, {}))
        assert isinstance(node.files, FaultyFiles)
        node.files.crash_in = died_after
        with pytest.raises(Crash):
            node.workers.drain()
        node = start(policy=False)
        node.apply(policy_of(1, {}))
        node.workers.drain()
        assert not (node.root / "a").exists(), died_after


def test_i12_of_two_folders_of_a_partition_the_older_was_about_to_go(start: Start) -> None:
    node = start()
    fill(node, "a", range(20))
    quotas = {"a": (DRAM, TierQuota(0, MIB))}
    node.apply(policy_of(2, {}))
    node.apply(policy_of(3, quotas))
    partition = node.partition("a")
    for number in range(20, 40):
        node.put(partition, key_of(number), value_of(number))
    queue = node.store._queue
    while queue or node.workers.jobs or node.workers.calls:  # everything but the destruction is done
        kept = [item for item in queue if type(item).__name__ in ("DestroyKey", "DropSegment")]
        for item in kept:
            queue.remove(item)
        if not node.workers.step():
            break
    node = start(policy=False)
    node.apply(policy_of(1, quotas))
    node.workers.drain()
    assert not any(node.found(partition, [key_of(n) for n in range(20)]))
    assert len(list((node.root / "a").iterdir())) == 1


def test_i12_a_rotated_epoch_is_unreadable_and_the_new_one_is_not(start: Start) -> None:
    node = start()
    fill(node, "a", range(20))
    quota = {"a": (DRAM, TierQuota(0, MIB))}
    node.apply(policy_of(2, quota, epochs=(1, 2)))
    new = node.partition("a", 2)
    for number in range(20):
        node.put(new, key_of(number), value_of(number + 500))
    node.workers.drain()
    assert node.get(node.partition("a", 1), key_of(0)) == [value_of(0)]
    node.apply(policy_of(3, quota, epochs=(2,)))
    node.workers.drain()
    assert [folder.epoch for folder in node.disk.data_keys if folder.tenant == "a"] == [2]
    assert len(list((node.root / "a").iterdir())) == 1
    assert node.get(new, key_of(0)) == [value_of(500)]


def test_a_deleted_entry_does_not_come_back(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    assert node.core.delete(partition, [key_of(n) for n in (0, 3, 19)]) == 3
    node.workers.drain()
    node = start()
    assert on_ssd(node, partition, range(20)) == [n for n in range(15) if n not in (0, 3)]


def test_a_tombstone_outlives_what_it_buries(start: Start) -> None:
    node = start(limit=400 * KIB)
    partition = fill(node, "a", range(10))
    node.core.delete(partition, [key_of(n) for n in range(0, 10, 2)])
    for number in range(100, 150):
        fill(node, "a", range(number, number + 1))
        again = [n for n in range(0, 10, 2) if node.tier.find(partition, key_of(n))]
        assert not again
        if number % 10 == 0:
            node = start(limit=400 * KIB)
            assert not [n for n in range(0, 10, 2) if node.tier.find(partition, key_of(n))]


# ---- faults


def test_i7_a_rotten_record_is_a_miss_and_the_tier_says_so(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    entry = node.tier.find(partition, key_of(2))
    assert entry is not None
    path = node.disk.path(node.store._place(entry.segment))
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
    assert isinstance(node.files, FaultyFiles)
    node.files.write_faults.append(fault)
    fill(node, "a", range(10, 30))
    assert status(node) is SsdState.READ_ONLY
    assert ("full" in node.store.status.reason) == (fault == errno.ENOSPC)
    assert on_ssd(node, partition, range(30)) == list(range(5)), "reads go on"
    assert node.get(partition, key_of(0), key_of(29)) == [value_of(0), value_of(29)]
    node.now_ns += 60_000_000_000
    fill(node, "a", range(30, 50))
    assert status(node) is SsdState.OK
    assert len(on_ssd(node, partition, range(50))) > 20
    node = start()
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in on_ssd(node, partition, range(50)))


def test_i12_a_delete_that_cannot_be_recorded_costs_the_segment(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    assert isinstance(node.files, FaultyFiles)
    node.files.write_faults.append(errno.ENOSPC)
    node.core.delete(partition, [key_of(0)])
    node.workers.drain()
    assert on_ssd(node, partition, range(10)) == [3, 4]
    node = start()
    assert on_ssd(node, partition, range(10)) == [3, 4]


def test_a_segment_of_another_version_is_left_alone_and_told(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(30))
    path = sorted((node.root / "a").rglob("*.seg"))[0]
    raw = bytearray(path.read_bytes())
    raw[8:10] = (9).to_bytes(2, "little")
    path.write_bytes(raw)
    node = start()
    assert status(node) is SsdState.DEGRADED and "version 9" in node.store.status.reason
    assert node.tier.unusable_bytes == len(raw)
    assert path.read_bytes() == raw
    left = on_ssd(node, partition, range(30))
    assert 0 < len(left) < 25 and all(node.get(partition, key_of(n)) == [value_of(n)] for n in left)


def test_foreign_and_missing_files_are_told_and_harm_nobody(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(30))
    fill(node, "b", range(30))
    paths = sorted((node.root / "a").rglob("*.seg"))
    paths[0].unlink()
    (node.root / "lost+found").mkdir()
    (node.root / "a" / "notes.txt").write_text("mine")
    (paths[1].parent / "core.1234").write_bytes(b"x" * 5000)
    paths[1].with_name("ffffffffffffffff.seg").symlink_to("/etc/passwd")
    node = start()
    assert status(node) is SsdState.DEGRADED
    assert (node.root / "a" / "notes.txt").read_text() == "mine"
    left = on_ssd(node, partition, range(30))
    assert left and all(node.get(partition, key_of(n)) == [value_of(n)] for n in left)
    assert node.get(node.partition("b"), key_of(0)) == [value_of(0)]
    node.workers.drain()
    fill(node, "a", range(100, 130))
    assert status(node) is SsdState.DEGRADED


def test_a_segment_in_another_tenants_folder_is_not_read(start: Start) -> None:
    node = start()
    fill(node, "a", range(20))
    fill(node, "b", range(100, 120))
    mine, theirs = (sorted((node.root / name).rglob("*.seg"))[0] for name in "ab")
    shutil.copy(mine, theirs.with_name(mine.name))
    node = start()
    assert not any(node.found(node.partition("b"), [key_of(n) for n in range(20)]))
    assert node.get(node.partition("b"), key_of(100)) == [value_of(100)]


def test_another_nodes_key_opens_nothing(start: Start, tmp_path: Path) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    (tmp_path / "ssd-node-key").write_bytes(os.urandom(32))
    node = start()
    assert status(node) is SsdState.DEGRADED and "key" in node.store.status.reason
    assert on_ssd(node, partition, range(20)) == []
    assert node.tier.unusable_bytes >= node.file_bytes("a") > 0
    assert fill(node, "a", range(20)) and on_ssd(node, partition, range(20)), "new ones are taken"


def test_a_folder_in_use_or_unusable_is_refused_at_start(start: Start, tmp_path: Path) -> None:
    start()
    with pytest.raises(FailedPreconditionError) as refused:
        SsdNode(tmp_path, dram_bytes=64 * KIB, ssd_bytes=MIB)
    assert refused.value.reason == "SSD_DIR_IN_USE"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ssd").write_text("a file")
    with pytest.raises(FailedPreconditionError) as refused:
        SsdNode(tmp_path / "other", dram_bytes=64 * KIB, ssd_bytes=MIB)
    assert refused.value.reason == "SSD_DIR_UNUSABLE"


def test_i10_a_device_that_hangs_is_a_miss(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    pins = node.core.get_start(partition, [key_of(0)], node.tick(), counts_misses=False)
    fetch = node.store.fetch(partition, [key_of(0)], pins, None)
    assert fetch is not None and not fetch.is_done
    woken: list[bool] = []
    fetch.on_done(lambda: woken.append(True))
    node.workers.timers.pop()()
    assert fetch.is_done and woken == [True] and pins == [None]
    node.workers.drain()
    assert pins == [None] and woken == [True]
    assert node.get(partition, key_of(0)) == [value_of(0)]


def test_a_get_that_ends_early_leaves_nothing_held(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    pins = node.core.get_start(partition, [key_of(0), key_of(1)], node.tick(), counts_misses=False)
    fetch = node.store.fetch(partition, [key_of(0), key_of(1)], pins, None)
    assert fetch is not None
    fetch.close()
    node.core.get_end(pins)
    node.workers.drain()
    assert node.core.usage().tenants[TenantId("a")].held_bytes == 0
    assert node.get(partition, key_of(0)) == [value_of(0)]


def test_two_gets_share_one_read(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    waiting = []
    for _ in range(3):
        pins = node.core.get_start(partition, [key_of(0)], node.tick(), counts_misses=False)
        waiting.append((pins, node.store.fetch(partition, [key_of(0)], pins, None)))
    assert len(node.workers.jobs) == 1
    node.workers.drain()
    for pins, fetch in waiting:
        assert fetch is not None and fetch.is_done and pins[0] is not None
        node.core.get_end(pins)
    assert node.core.usage().tenants[TenantId("a")].held_bytes == 0


def test_i12_a_key_deleted_while_it_is_read_is_not_served(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    pins = node.core.get_start(partition, [key_of(0)], node.tick(), counts_misses=False)
    fetch = node.store.fetch(partition, [key_of(0)], pins, None)
    assert node.core.delete(partition, [key_of(0)]) == 1
    node.workers.drain()
    assert fetch is not None and fetch.is_done and pins == [None]
    assert not any(node.found(partition, [key_of(0)]))


# ---- crashes


def test_i8_a_clean_stop_leaves_footers_and_the_same_books(start: Start) -> None:
    node = start(files=Files())
    partition = fill(node, "a", range(40))
    before = on_ssd(node, partition, range(40))
    node.store.close(lambda: None)
    node.workers.drain()
    used_bytes = node.used_bytes("a")
    node = start(files=Files())
    assert on_ssd(node, partition, range(40)) == before
    assert node.used_bytes("a") == used_bytes == node.file_bytes("a")
    assert not node.workers.jobs and status(node) is SsdState.OK
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in before)


def test_i7_a_torn_record_is_a_miss_and_its_bytes_are_given_back(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(9))
    path = sorted((node.root / "a").rglob("*.seg"))[-1]
    whole = path.read_bytes()
    on_path = [n for n in on_ssd(node, partition, range(9)) if n >= 3]
    assert on_path == [3], "the open segment has one record; a second one is cut off below"
    for cut in (1, 4095, 4096, SIZE, RECORD - 1, RECORD):
        path.write_bytes(whole[: len(whole) - cut])
        node = start()
        assert on_ssd(node, partition, range(9)) == [0, 1, 2]
        node.workers.drain()
        assert node.file_bytes("a") == node.used_bytes("a")
        assert not path.exists()


def test_a_rotten_footer_costs_nothing_but_time(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(40))
    node.store.close(lambda: None)
    node.workers.drain()
    before = on_ssd(node, partition, range(40))
    for path in (node.root / "a").rglob("*.seg"):
        with path.open("r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(b"?")
            file.seek(-4096, os.SEEK_END)
            file.write(b"?")
    node = start()
    assert on_ssd(node, partition, range(40)) == before
