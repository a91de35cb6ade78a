"""The snapshot of DRAM as bytes: round trips, hostile bytes, the frozen format, what a changed policy leaves of it."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.cache import CacheCore
from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.snapshot import (
    BLOCK_ENTRIES,
    ENTRY_BYTES,
    FORMAT_VERSION,
    ArenaIdentity,
    BadSnapshotError,
    Snapshot,
    decode_snapshot,
)
from dataplane.core.usage import EvictionCause
from saltern.names import TenantId
from tenants.policy import NodePolicy
from tests.support.cache_node import Node, key_of, make_policy, node_of

G = GRANULE_BYTES
CAPACITY = 32
ARENA = ArenaIdentity("node-1", "boot-1", "0" * 32, 42, CAPACITY * G)
V1 = Path(__file__).parents[2] / "vectors" / "dram_snapshot_v1.bin"
QUOTAS = {"a": (4, 16), "b": (0, 16)}


def intact(node: Node) -> dict[int, int]:
    """Checksum of what lies at each offset, as the node's own entries say."""
    pool = node.core._pool
    return {
        entry.offset: entry.checksum
        for owner in pool.tenants.values()
        for index in owner.partitions.values()
        for entry in index.entries.values()
    }


def some_node(eviction: Eviction = DEFAULT_EVICTION) -> Node:
    """Two tenants with entries of several sizes, some read since, some deleted in between."""
    node = node_of(CAPACITY, QUOTAS, eviction)
    for number in range(6):
        assert node.put("a", number, granules=1 + number % 2) is None
        assert node.put("b", number, granules=1) is None
    node.core.delete(node.partition("a"), [key_of(2)])
    node.core.get_end(node.core.get_start(node.partition("a"), [key_of(0), key_of(3)], node.tick()))
    return node


def encode(node: Node) -> bytes:
    return b"".join(node.core.snapshot(ARENA))


def restart(node: Node, policy: NodePolicy | None = None, eviction: Eviction = DEFAULT_EVICTION) -> Node:
    """A new core that adopts what ``node`` holds."""
    sums = intact(node)
    after = Node(CAPACITY, policy or node.core.policy, eviction)
    after.core.adopt(decode_snapshot(encode(node)), lambda offset, _: sums[offset], after.tick())
    after.core.check_invariants()
    return after


def order(node: Node, tenant: str) -> list[int]:
    return [int.from_bytes(entry.key, "big") for entry in node.core._pool.tenants[TenantId(tenant)].order]


# ---- round trip


def test_a_new_core_holds_the_same_entries_at_the_same_places_in_the_same_order() -> None:
    before = some_node()
    after = restart(before)
    assert encode(after) == encode(before)
    for tenant in QUOTAS:
        assert order(after, tenant) == order(before, tenant)
        partition = after.partition(tenant)
        keys = [key_of(number) for number in range(6)]
        old, new = before.core.get_start(partition, keys, 10**9), after.core.get_start(partition, keys, 10**9)
        assert [pin and (pin.offset, pin.size_bytes, pin.checksum) for pin in new] == [
            pin and (pin.offset, pin.size_bytes, pin.checksum) for pin in old
        ]
        after.core.get_end(new)


def test_i8_usage_is_counted_from_the_entries_and_counters_begin_at_zero() -> None:
    before = some_node()
    after = restart(before)
    old, new = before.core.usage(), after.core.usage()
    assert (new.free_bytes, new.largest_free_bytes) == (old.free_bytes, old.largest_free_bytes)
    for tenant, usage in new.tenants.items():
        was = old.tenants[tenant]
        assert (usage.used_bytes, usage.resident_bytes, usage.entries) == (
            was.used_bytes,
            was.resident_bytes,
            was.entries,
        )
        assert usage.counters.puts_stored == 0 < was.counters.puts_stored


def test_entries_that_are_held_when_it_is_written_are_left_out() -> None:
    node = some_node()
    node.core.get_start(node.partition("a"), [key_of(1)], node.tick())
    node.started("b", 77)
    after = restart(node)
    assert after.there("a", range(6)) == [0, 3, 4, 5]
    assert after.there("b", range(100)) == [0, 1, 2, 3, 4, 5]
    assert after.put("a", 1) is None


def test_ages_do_not_tie_and_puts_go_on_as_ever() -> None:
    after = restart(some_node())
    for number in range(100, 140):
        assert after.put("a", number) is None and after.put("b", number, granules=2) is None
    assert after.used("a") <= 16 and after.used("b") <= 16


@pytest.mark.parametrize("written", list(Eviction))
@pytest.mark.parametrize("read", list(Eviction))
def test_another_eviction_order_takes_the_entries_by_their_last_use(written: Eviction, read: Eviction) -> None:
    before = some_node(written)
    after = restart(before, eviction=read)
    assert after.there("a", range(6)) == before.there("a", range(6))
    if read is not written and read is not Eviction.TWO_QUEUE:
        touched = [entry.touched_ns for entry in after.core._pool.tenants[TenantId("a")].order]
        assert touched == sorted(touched)


def test_more_entries_than_one_block_holds() -> None:
    count = BLOCK_ENTRIES + 10
    policy = make_policy(1, {"a": (0, count)})
    core = CacheCore(count * G)
    core.apply_policy(policy, 0)
    node = Node.__new__(Node)
    node.core, node.now_ns = core, 0
    partition = node.partition("a")
    for number in range(count):
        ticket = core.put_start(partition, key_of(number), 1 + number % G, number)
        assert core.put_commit(ticket, number, number) is None  # type: ignore[arg-type]
    arena = ArenaIdentity("n", "b", "g", 1, count * G)
    data = b"".join(core.snapshot(arena))
    after = CacheCore(count * G)
    after.apply_policy(policy, 0)
    assert after.adopt(decode_snapshot(data), lambda _, __: 0, 0).entries == count
    assert b"".join(after.snapshot(arena)) == data


# ---- what a new policy leaves


def test_i12_what_the_policy_no_longer_names_is_not_taken_over() -> None:
    node = some_node()
    gone = restart(node, make_policy(2, {"b": (0, 16)}))
    assert gone.core.usage().tenants.keys() == {"b"} and gone.core.usage().free_bytes == (CAPACITY - 6) * G
    recreated = restart(node, make_policy(2, {"a": (4, 16)}, uid="uid-2"))
    assert recreated.used("a") == 0
    rotated = restart(node, make_policy(2, {"a": (4, 16)}, epochs=(2, 3)))
    assert rotated.used("a") == 0
    grace = restart(node, make_policy(2, {"a": (4, 16)}, epochs=(1, 2)))
    assert grace.there("a", range(6), epoch=1) == [0, 1, 3, 4, 5]
    assert grace.there("a", range(6), epoch=2) == []
    assert grace.put("a", 9, epoch=1) is not None, "an old epoch is only read"


def test_a_suspended_tenant_keeps_its_entries_but_they_are_closed() -> None:
    after = restart(some_node(), make_policy(2, QUOTAS, suspended=("a",)))
    assert after.used("a") == 8
    after.apply(make_policy(3, QUOTAS))
    assert after.there("a", range(6)) == [0, 1, 3, 4, 5]


def test_i4_a_limit_lowered_meanwhile_holds_at_once() -> None:
    before = some_node()
    coldest_first = order(before, "a")
    after = restart(before, make_policy(2, {"a": (0, 3), "b": (0, 16)}))
    assert after.used("a") <= 3
    assert order(after, "a") == coldest_first[-len(order(after, "a")) :]
    assert after.core.usage().tenants[TenantId("a")].counters.evictions_by_cause[EvictionCause.QUOTA] > 0


def test_i7_bytes_that_changed_are_found_at_the_first_read_and_never_after() -> None:
    node = some_node()
    sums = intact(node)
    after = Node(CAPACITY, node.core.policy)
    looked: list[int] = []

    def digest(offset: int, size_bytes: int) -> int:
        looked.append(offset)
        return sums[offset] ^ (sums[offset] == 3)  # the checksum of a test entry is its key number

    after.core.adopt(decode_snapshot(encode(node)), digest, after.tick())
    assert not looked, "nothing is verified before it is read"
    partition = after.partition("a")
    for _ in range(2):
        pins = after.core.get_start(partition, [key_of(0), key_of(3), key_of(4)], after.tick())
        assert [pin is not None for pin in pins] == [True, False, True]
        after.core.get_end(pins)
        after.core.check_invariants()
    assert len(looked) == 3
    assert after.put("a", 3, granules=2) is None


def test_i7_bytes_that_changed_are_not_demoted() -> None:
    node = some_node()
    sums = intact(node)
    demoted: list[int] = []
    after = Node(CAPACITY, node.core.policy)
    after.core.on_evict(lambda entry: demoted.append(int.from_bytes(entry.key, "big")))
    coldest, second = order(node, "b")[:2]
    after.core.adopt(
        decode_snapshot(encode(node)), lambda offset, _: sums[offset] + (sums[offset] == coldest), after.tick()
    )
    after.apply(make_policy(2, {"a": (4, 16), "b": (0, 4)}))
    assert demoted == [second]


def test_a_core_that_holds_something_takes_no_snapshot() -> None:
    node = some_node()
    snapshot = decode_snapshot(encode(node))
    with pytest.raises(BadSnapshotError, match="in use"):
        node.core.adopt(snapshot, lambda _, __: 0, node.tick())


# ---- hostile bytes


def test_every_truncation_is_thrown_away() -> None:
    data = encode(some_node())
    for length in range(len(data)):
        with pytest.raises(BadSnapshotError):
            decode_snapshot(data[:length])


def test_every_flipped_bit_is_noticed() -> None:
    data = encode(some_node())
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadSnapshotError):
            decode_snapshot(bytes(flipped))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(data: bytes) -> None:
    for candidate in (data, b"SALTSNAP" + data, b"SALTSNAP\x01\x00\x00\x00" + data):
        with pytest.raises(BadSnapshotError):
            decode_snapshot(candidate)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_damage_below_a_right_checksum_leaves_the_core_empty_or_consistent(seed: int, changes: int) -> None:
    """Nobody but a fault of ours could write that; still it must not cost more than the cache."""
    generator = random.Random(seed)
    damaged = bytearray(encode(some_node())[:-16])
    for _ in range(changes):
        damaged[generator.randrange(12, len(damaged))] = generator.choice([0, 1, 2, 7, 31, 32, 255])
    data = bytes(damaged) + xxhash.xxh3_128_digest(bytes(damaged))
    node = node_of(CAPACITY, QUOTAS)
    try:
        node.core.adopt(decode_snapshot(data), lambda _, __: 0, node.tick())
    except BadSnapshotError:
        assert node.core.usage().free_bytes == CAPACITY * G
    node.core.check_invariants()
    assert node.put("a", 1000) is None


def repacked(change: str) -> bytes:
    """A snapshot in which one thing is wrong and the checksum is right."""
    data = encode(some_node())
    head_bytes = struct.unpack_from("<I", data, 12)[0]
    head = msgspec.msgpack.decode(data[24 : 24 + head_bytes])
    rows = bytearray(data[24 + head_bytes : -16])
    count = head["tenants"][0][3]
    if change == "overlap":
        rows[32 * count : 32 * count + 4] = rows[32 * count + 4 : 32 * count + 8]
    elif change == "outside":
        rows[32 * count : 32 * count + 4] = struct.pack("<I", 2**32 - 1)
    elif change == "empty entry":
        rows[36 * count : 36 * count + 4] = bytes(4)
    elif change == "same key":
        rows[0:32] = rows[32:64]
    elif change == "same age":
        rows[48 * count : 48 * count + 8] = rows[48 * count + 8 : 48 * count + 16]
    elif change == "no partition":
        rows[56 * count : 56 * count + 4] = struct.pack("<I", 1)
    elif change == "tenant twice":
        head["tenants"][1][0] = head["tenants"][0][0]
    elif change == "partition twice":
        head["tenants"][0][1] *= 2
    else:
        assert change == "entries"
        head["tenants"][0][3] -= 1
    packed = msgspec.msgpack.encode(head)
    body = struct.pack("<8sHHIQ", b"SALTSNAP", 1, 0, len(packed), len(rows)) + packed + rows
    return body + xxhash.xxh3_128_digest(body)


@pytest.mark.parametrize(
    "change",
    ["overlap", "outside", "empty entry", "same key", "same age", "no partition", "tenant twice", "partition twice",
     "entries"],
)  # fmt: skip
def test_a_snapshot_that_contradicts_itself_changes_nothing(change: str) -> None:
    node = node_of(CAPACITY, QUOTAS)
    with pytest.raises(BadSnapshotError):
        node.core.adopt(decode_snapshot(repacked(change)), lambda _, __: 0, node.tick())
    assert node.core.usage().free_bytes == CAPACITY * G
    node.core.check_invariants()
    node.fill("a", range(16))


# ---- the format


def test_an_entry_takes_61_bytes() -> None:
    node = node_of(CAPACITY, QUOTAS)
    node.fill("a", range(1))
    one = len(encode(node))
    node.fill("a", range(1, 9))
    assert len(encode(node)) - one == 8 * ENTRY_BYTES == 8 * 61


def test_a_version_that_has_no_reader_is_thrown_away() -> None:
    data = encode(some_node())
    for version in (0, FORMAT_VERSION + 1, 65535):
        body = data[:8] + struct.pack("<H", version) + data[10:-16]
        with pytest.raises(BadSnapshotError, match=f"format version {version}"):
            decode_snapshot(body + xxhash.xxh3_128_digest(body))


def test_every_later_program_reads_what_version_1_has_written() -> None:
    """The file was written once, by the program of version 1; never write it anew."""
    snapshot: Snapshot = decode_snapshot(V1.read_bytes())
    assert snapshot.arena == ARENA
    after = node_of(CAPACITY, QUOTAS)
    expected = some_node()
    sums = intact(expected)
    adopted = after.core.adopt(snapshot, lambda offset, _: sums[offset], after.tick())
    assert (adopted.entries, adopted.size_bytes) == (11, 14 * G)
    for tenant in QUOTAS:
        assert order(after, tenant) == order(expected, tenant)
        assert after.there(tenant, range(6)) == expected.there(tenant, range(6))
    assert intact(after) == sums
