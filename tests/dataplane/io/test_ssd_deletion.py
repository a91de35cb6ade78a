"""What was deleted on SSD stays deleted and is unreadable (I12)."""

from __future__ import annotations

import pytest

from saltern.names import TenantId
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_lives import DRAM, Start, fill, on_ssd, value_of
from tests.support.ssd_node import KIB, MIB, Crash, FaultyFiles, policy_of


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
    queue = node.store._writer._queue
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
