"""Records in a store that anybody reaches: what is lost or changed there is a miss, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplane.core.segments import BLOCK_BYTES
from dataplane.io.engines import ByteEngine
from dataplane.io.engines.objects import OBJECT_MAX_BYTES, EngineCounts, ObjectEngine
from dataplane.io.ssd import SsdState
from saltern.keys import BlockKey
from saltern.names import TenantId
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.memory_objects import MemoryObjects
from tests.support.ssd_lives import DRAM, SIZE, Start, fill, lives, on_ssd, status, value_of
from tests.support.ssd_node import KIB, MIB, SsdNode, policy_of

#: DRAM holds this many of the entries; the others are in the store.
IN_DRAM = 5


@pytest.fixture
def store() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def start(tmp_path: Path, store: MemoryObjects) -> Iterator[Start]:
    with lives(tmp_path) as run:
        yield lambda *arguments, **options: run(*arguments, objects=store, **options)


def counts(node: SsdNode) -> EngineCounts:
    assert isinstance(node.disk, ObjectEngine)
    engine: ByteEngine = node.disk  # it stands behind the interface, as files do
    assert engine is node.disk
    return node.disk.counts


def name_of(node: SsdNode, tenant: str, number: int) -> str:
    """What the store calls an entry's record."""
    entry = node.tier.find(node.partition(tenant), key_of(number))
    assert entry is not None
    [cipher] = [c for place, c in node.disk.ciphers.items() if place.number == entry.segment.number]
    return cipher.object_name(entry.block)


# ---- what is kept


def test_i7_what_dram_gives_up_comes_back_from_the_store(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    assert on_ssd(node, partition, range(20)) == list(range(20 - IN_DRAM))
    assert len(store.objects) == 20 - IN_DRAM
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in range(20 - IN_DRAM))
    counted = counts(node)
    assert counted.reads >= 20 - IN_DRAM and counted.writes >= 20 - IN_DRAM and not counted.forged + counted.gone
    assert status(node) is SsdState.OK


def test_i7_the_store_gets_no_plain_byte_and_no_name(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = node.partition("a")
    entries = {BlockKey(os.urandom(32)): os.urandom(SIZE) for _ in range(20)}
    for key, value in entries.items():
        assert node.put(partition, key, value) == ""
        node.workers.drain()
    assert len(store.objects) == 20 - IN_DRAM
    everything = b"".join(name.encode() + data for name, data in store.objects.items())
    for key, value in entries.items():
        assert value[:16] not in everything and bytes(key) not in everything and key.hex().encode() not in everything
    assert b"uid-1" not in everything and all(secret not in everything for secret in node.disk.data_keys.values())


def test_the_ledger_has_no_record(start: Start, store: MemoryObjects) -> None:
    node = start()
    fill(node, "a", range(60))
    files = list(node.root.rglob("*.seg"))
    on_disk = sum(path.stat().st_blocks * 512 for path in files)
    assert store.used_bytes > 40 * SIZE and on_disk <= len(files) * 6 * BLOCK_BYTES


def test_an_entry_longer_than_an_object_is_several(start: Start, store: MemoryObjects) -> None:
    node = start(ssd_bytes=256 * MIB, dram_bytes=64 * MIB, staging_bytes=128 * MIB)
    quota = TierQuota(0, 256 * MIB)
    node.apply(policy_of(2, dict.fromkeys("ab", (TierQuota(0, 24 * MIB), quota)), block_bytes=32 * MIB))
    partition = node.partition("a")
    sizes = [OBJECT_MAX_BYTES - BLOCK_BYTES, OBJECT_MAX_BYTES, 2 * OBJECT_MAX_BYTES + 1, 3]
    values = [os.urandom(size) for size in sizes]
    for number, value in enumerate(values):
        assert node.put(partition, key_of(number), value) == ""
        node.workers.drain()
    for number in range(10, 13):
        assert node.put(partition, key_of(number), bytes(8 * MIB)) == ""
        node.workers.drain()
    assert on_ssd(node, partition, range(4)) == [0, 1, 2, 3]
    assert [node.get(partition, key_of(n)) for n in range(4)] == [[value] for value in values]
    there = len(store.objects)
    node.core.delete(partition, [key_of(2)])
    node.workers.drain()
    assert len(store.objects) == there - 3, "all of its objects go"


# ---- what others do to it


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
        lambda data: data[: len(data) // 2],
        lambda data: data + bytes(BLOCK_BYTES),
        lambda data: bytes(len(data)),
        lambda data: b"",
    ],
    ids=["head", "payload", "cut", "longer", "zeros", "empty"],
)
def test_i7_changed_bytes_are_a_miss(start: Start, store: MemoryObjects, spoil: Callable[[bytes], bytes]) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    name = name_of(node, "a", 2)
    store.objects[name] = spoil(store.objects[name])
    assert node.get(partition, key_of(1), key_of(2), key_of(3)) == [value_of(1), None, value_of(3)]
    assert counts(node).forged == 1 and counts(node).gone == 0
    assert status(node) is SsdState.DEGRADED, "somebody writes where nobody should"
    assert node.put(partition, key_of(2), value_of(2)) == "", "and the entry can be stored anew"
    assert node.get(partition, key_of(2)) == [value_of(2)]


def test_i2_records_that_change_places_are_misses(start: Start, store: MemoryObjects) -> None:
    """Also between tenants that store the same bytes under the same key in namespaces of the same name."""
    node = start()
    mine, others = fill(node, "a", range(10)), fill(node, "b", range(10))
    a0, a1, b0 = name_of(node, "a", 0), name_of(node, "a", 1), name_of(node, "b", 0)
    assert store.objects[a0] != store.objects[b0]
    store.objects[a0], store.objects[a1], store.objects[b0] = (store.objects[n] for n in (a1, b0, a0))
    assert node.get(mine, key_of(0)) == [None] and node.get(mine, key_of(1)) == [None]
    assert node.get(others, key_of(0)) == [None]
    assert node.get(mine, key_of(2)) == [value_of(2)] and counts(node).forged == 3


def test_i12_a_record_from_before_its_entry_was_deleted_is_of_no_use(start: Start, store: MemoryObjects) -> None:
    """Whoever kept a copy puts it back under its name: nobody asks for it, and a new entry has another place."""
    node = start()
    partition = fill(node, "a", range(10))
    kept = dict(store.objects)
    node.core.delete(partition, [key_of(n) for n in range(5)])
    node.workers.drain()
    store.objects.update(kept)
    assert node.get(partition, *map(key_of, range(5))) == [None] * 5
    new = bytes(SIZE)
    assert node.put(partition, key_of(0), new) == ""
    for number in range(20, 26):
        assert node.put(partition, key_of(number), value_of(number)) == ""
        node.workers.drain()
    for name in store.objects:
        if store.objects[name] != kept.get(name) and name not in kept:
            store.objects[name] = kept[next(iter(kept))]
    assert node.get(partition, key_of(0)) in ([None], [new])


def test_i10_vanished_records_are_misses_and_no_fault(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    for number in range(0, 15, 2):
        del store.objects[name_of(node, "a", number)]
    values = [node.get(partition, key_of(number))[0] for number in range(15)]
    assert values == [None if number % 2 == 0 else value_of(number) for number in range(15)]
    assert counts(node).gone == 8 and counts(node).forged == 0 and status(node) is SsdState.OK
    assert sum(node.found(partition, [key_of(n) for n in range(0, 15, 2)])) == 0, "not promised a second time"
    assert node.tier.tenants[TenantId("a")].counters.read_failures == 8


def test_i7_names_that_somebody_took_first_are_misses(start: Start, store: MemoryObjects) -> None:
    """A store keeps who came first; what is then read is not what was sealed."""
    node = start()
    partition = fill(node, "a", range(10))
    cipher = node.disk.ciphers[max(node.disk.ciphers, key=lambda place: place.number)]
    for block in range(1, 400):
        store.objects.setdefault(cipher.object_name(block), bytes(SIZE + BLOCK_BYTES))
    fill(node, "a", range(10, 20))
    values = [node.get(partition, key_of(number))[0] for number in range(15)]
    assert all(value in (None, value_of(number)) for number, value in enumerate(values))
    assert values[:3] == [value_of(number) for number in range(3)] and counts(node).forged == values.count(None) > 0


# ---- limits and deletion


def test_i4_what_a_tenant_has_in_the_store_stays_below_its_limit(start: Start, store: MemoryObjects) -> None:
    limit = 600 * KIB
    node = start(limit)
    fill(node, "a", range(150))
    assert node.used_bytes("a") <= limit and store.used_bytes <= limit
    assert counts(node).removed > 0
    node.apply(policy_of(2, {"a": (DRAM, TierQuota(0, 200 * KIB)), "b": (DRAM, TierQuota(0, MIB))}))
    node.workers.drain()
    assert store.used_bytes <= 200 * KIB


def test_i5_a_reservation_holds_in_the_store(start: Start, store: MemoryObjects) -> None:
    node = start(MIB, reserved=512 * KIB, ssd_bytes=MIB)
    kept = fill(node, "a", range(25))
    fill(node, "b", range(200))
    assert on_ssd(node, kept, range(20)) == list(range(20))
    assert all(node.get(kept, key_of(n)) == [value_of(n)] for n in range(20)), "and not only in the books"
    assert store.used_bytes <= MIB


def test_i12_a_deleted_entry_leaves_the_store(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    names = [name_of(node, "a", number) for number in range(4)]
    node.core.delete(partition, [key_of(number) for number in range(4)])
    node.workers.drain()
    assert not store.objects.keys() & set(names)
    node = start()
    assert node.get(node.partition("a"), *map(key_of, range(4))) == [None] * 4


@pytest.mark.parametrize("by", ["tenant", "namespace", "epoch"])
def test_i12_a_deleted_tenant_namespace_or_epoch_leaves_nothing(start: Start, store: MemoryObjects, by: str) -> None:
    node = start()
    fill(node, "a", range(20))
    fill(node, "b", range(20))
    of_b = {name_of(node, "b", number) for number in range(15)}
    quota = (DRAM, TierQuota(0, MIB))
    node.apply(policy_of(2, {"b": quota}) if by == "tenant" else policy_of(2, {"b": quota, "a": quota}))
    if by != "tenant":
        changed = policy_of(3, {"a": quota}, uid="uid-2" if by == "namespace" else "uid-1", epochs=(2,))
        both = policy_of(3, {"b": quota})
        both.tenants[TenantId("a")] = changed.tenants[TenantId("a")]  # type: ignore[index]  # a test's own dict
        node.apply(both)
    node.workers.drain()
    assert store.objects.keys() == of_b
    assert not (node.root / "a").exists() and len(node.disk.data_keys) == 1


# ---- a store that cannot be reached


def test_i10_without_the_store_dram_goes_on_and_what_is_below_is_a_miss(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    store.is_reachable = False
    assert node.get(partition, key_of(0), key_of(19)) == [None, value_of(19)]
    assert counts(node).unreachable == 1
    fill(node, "a", range(20, 40))
    assert status(node) is SsdState.READ_ONLY and "reached" in node.store.status.reason
    assert node.get(partition, key_of(39)) == [value_of(39)]
    store.is_reachable = True
    node.store.try_again()
    fill(node, "a", range(40, 60))
    assert status(node) in (SsdState.OK, SsdState.DEGRADED)
    assert len(on_ssd(node, partition, range(40, 60))) > 10
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in on_ssd(node, partition, range(1, 60)))


def test_i10_a_store_that_stays_away_is_not_promised(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    store.is_reachable = False
    for number in range(8):
        assert node.get(partition, key_of(number)) == [None]
    assert status(node) is SsdState.OFF
    assert sum(node.found(partition, [key_of(number) for number in range(15)])) == 0
    store.is_reachable = True
    node.store.try_again()
    assert node.get(partition, key_of(10)) == [value_of(10)] and status(node) is not SsdState.OFF


def test_one_holder_that_fails_costs_what_it_holds(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    store.failing.add(name_of(node, "a", 1))
    assert node.get(partition, *map(key_of, range(3))) == [value_of(0), None, value_of(2)]
    assert counts(node).unreachable == 1 and node.store.status.read_errors == 1


def test_i4_a_full_store_costs_the_entry_and_leaves_nothing_uncharged(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    store.room_bytes = store.used_bytes + SIZE
    fill(node, "a", range(10, 20))
    assert status(node) is SsdState.READ_ONLY and "full" in node.store.status.reason
    assert store.used_bytes <= node.used_bytes("a")
    store.room_bytes = 1 << 40
    node.pass_time(60)
    fill(node, "a", range(20, 30))
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in on_ssd(node, partition, range(30)))


def test_i8_what_could_not_be_removed_stays_charged_until_it_is(start: Start, store: MemoryObjects) -> None:
    node = start()
    fill(node, "a", range(20))
    quota = (DRAM, TierQuota(0, MIB))
    store.is_reachable = False
    node.apply(policy_of(2, {"b": quota}))
    node.workers.drain()
    assert not node.disk.data_keys, "I12: the key goes whatever the store does"
    assert node.used_bytes("a") >= store.used_bytes > 0 and counts(node).removals_failed > 0
    store.is_reachable = True
    node.store.try_again()
    node.workers.drain()
    assert node.used_bytes("a") == store.used_bytes == 0


# ---- restarts


def test_a_clean_restart_finds_everything(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(30))
    kept = on_ssd(node, partition, range(30))
    node.store.close(lambda: None)
    node.workers.drain()
    node = start()
    partition = node.partition("a")
    assert on_ssd(node, partition, range(30)) == kept
    assert all(node.get(partition, key_of(number)) == [value_of(number)] for number in kept)
    node.core.delete(partition, [key_of(kept[0])])
    quota = (DRAM, TierQuota(0, MIB))
    node.apply(policy_of(2, {"b": quota}))
    node.workers.drain()
    assert store.objects == {}, "what an earlier life wrote is removed too"


def test_i8_a_crash_loses_what_no_footer_lists_and_removes_it(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(30))
    there = on_ssd(node, partition, range(30))
    sealed = {number for number in there if is_sealed(node, number)}
    assert 0 < len(sealed) < len(there)
    node = start()
    node.workers.drain()
    partition = node.partition("a")
    assert set(on_ssd(node, partition, range(30))) == sealed
    assert all(node.get(partition, key_of(number)) == [value_of(number)] for number in sealed)
    assert store.used_bytes <= node.used_bytes("a")
    assert len(store.objects) == len(sealed)


def is_sealed(node: SsdNode, number: int) -> bool:
    entry = node.tier.find(node.partition("a"), key_of(number))
    return entry is not None and entry.segment.state.value == "sealed"


def test_i12_a_crash_brings_nothing_back_that_was_deleted(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(30))
    kept = dict(store.objects)
    gone = [number for number in on_ssd(node, partition, range(30)) if is_sealed(node, number)][:3]
    node.core.delete(partition, [key_of(number) for number in gone])
    node.workers.drain()
    store.objects.update(kept)  # somebody brings them back
    node = start()
    node.workers.drain()
    assert on_ssd(node, node.partition("a"), range(30)) and gone
    assert node.get(node.partition("a"), *map(key_of, gone)) == [None] * len(gone)


def test_i12_a_crash_in_the_middle_of_a_deletion_is_finished_when_the_store_is_there(
    start: Start, store: MemoryObjects
) -> None:
    node = start()
    fill(node, "a", range(20))
    store.is_reachable = False
    node.apply(policy_of(2, {"b": (DRAM, TierQuota(0, MIB))}))
    node.workers.drain()
    assert store.objects and (node.root / "a").exists()
    node = start(policy=False)
    node.workers.drain()
    assert store.objects and (node.root / "a").exists(), "left for a start that reaches the store"
    assert status(node) is SsdState.READ_ONLY
    store.is_reachable = True
    node = start()
    node.workers.drain()
    assert store.objects == {} and not (node.root / "a").exists()


def test_i8_a_store_that_lost_everything_is_an_empty_cache(start: Start, store: MemoryObjects) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    store.objects.clear()
    assert [node.get(partition, key_of(number))[0] for number in range(15)] == [None] * 15
    fill(node, "a", range(100, 140))
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in on_ssd(node, partition, range(100, 140)))
    assert status(node) is SsdState.OK
