"""The default order: LRU where LRU fits, proven chains first to stay where it thrashes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.entry import Entry
from dataplane.core.eviction import EvictionOrder
from dataplane.core.extents import ArenaOffset
from dataplane.core.fifo import FifoOrder
from dataplane.core.ghosts import GhostTable
from dataplane.core.lru import LruOrder
from dataplane.core.partition import Partition
from dataplane.core.tenant_cache import PartitionIndex, TenantCache
from dataplane.core.two_queue import TwoQueueOrder
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId

PARTITION = Partition(TenantId("a"), NamespaceId("ns"), "u", 1)
INDEX = PartitionIndex(PARTITION, TenantCache(TenantId("a"), LruOrder()), 4096, True)


def key_of(number: int) -> BlockKey:
    mixed = number * 0x9E3779B97F4A7C15 % 2**64
    return BlockKey(mixed.to_bytes(8, "little") + number.to_bytes(24, "little"))


class Cache:
    """A cache of entries of one size over an order; use() is a get, followed by a put where it missed."""

    def __init__(self, order: EvictionOrder, capacity_entries: int) -> None:
        self.order = order
        self.capacity_entries = capacity_entries
        self.entries: dict[int, Entry] = {}
        self.now_ns = 0

    def use(self, number: int) -> bool:
        self.now_ns += 1_000_000  # each use is a batch of its own
        entry = self.entries.get(number)
        if entry is not None:
            entry.touched_ns = self.now_ns
            self.order.touch(entry)
            return True
        if len(self.entries) == self.capacity_entries:
            victim = next(iter(self.order))
            self.order.evict(victim)
            del self.entries[victim.offset]
        entry = Entry(key_of(number), INDEX, ArenaOffset(number), 1, 4096)
        entry.touched_ns = self.now_ns
        self.entries[number] = entry
        self.order.insert(entry)
        return False


commands = st.sampled_from(["insert", "touch", "refresh", "remove", "evict"])


@given(st.lists(st.tuples(commands, st.integers(0, 9)), max_size=120))
@settings(max_examples=100, deadline=None)
def test_every_entry_is_listed_exactly_once(script: list[tuple[str, int]]) -> None:
    order = TwoQueueOrder()
    held: dict[int, Entry] = {}
    for now_ns, (command, number) in enumerate(script):
        if command == "insert" and number not in held:
            held[number] = Entry(key_of(number), INDEX, ArenaOffset(0), 1, 4096)
            held[number].touched_ns = now_ns
            order.insert(held[number])
        elif command in ("remove", "evict") and number in held:
            (order.remove if command == "remove" else order.evict)(held.pop(number))
        elif command in ("touch", "refresh") and number in held:
            held[number].touched_ns = now_ns
            (order.touch if command == "touch" else order.refresh)(held[number])
        listed = list(order)
        assert len(listed) == len(held) and set(listed) == set(held.values())


@given(st.lists(st.integers(0, 15), max_size=200))
@settings(max_examples=100, deadline=None)
def test_without_ghost_hits_it_is_lru(uses: list[int]) -> None:
    ours, lru = Cache(TwoQueueOrder(), 16), Cache(LruOrder(), 16)
    for number in uses:
        assert ours.use(number) == lru.use(number)
    assert [e.key for e in ours.order] == [e.key for e in lru.order]


def test_hot_entries_survive_a_scan() -> None:
    rates = {}
    for name, order in (("ours", TwoQueueOrder()), ("lru", LruOrder())):
        cache = Cache(order, 100)
        hits = uses = 0
        for turn in range(400):
            for number in range(20):
                hits += cache.use(number)
                uses += 1
            for number in range(90):
                cache.use(1_000 + turn * 90 + number)
        rates[name] = hits / uses
    assert rates["lru"] < 0.01 < 0.9 < rates["ours"]


def test_a_refresh_is_not_a_use() -> None:
    order = TwoQueueOrder()
    first, second = (Entry(key_of(n), INDEX, ArenaOffset(0), 1, 4096) for n in (1, 2))
    for now_ns, entry in enumerate((first, second), 1):
        entry.touched_ns = now_ns
        order.insert(entry)
    first.touched_ns = 3
    order.refresh(first)
    assert list(order) == [second, first]
    assert not first.is_proven


def test_what_its_owner_deleted_was_not_evicted_too_early() -> None:
    order = TwoQueueOrder()
    for gone in (order.remove, order.evict):
        for now_ns in (1, 2):
            entry = Entry(key_of(1), INDEX, ArenaOffset(0), 1, 4096)
            entry.touched_ns = now_ns
            order.insert(entry)
            if now_ns == 1:
                gone(entry)
        assert entry.is_proven == (gone == order.evict)
        order.remove(entry)


def test_fifo_ignores_use() -> None:
    cache = Cache(FifoOrder(), 3)
    for number in (1, 2, 3, 1, 1, 4):
        cache.use(number)
    assert sorted(cache.entries) == [2, 3, 4]


def test_ghosts_are_found_while_young_and_only_once() -> None:
    ghosts = GhostTable(100)
    for number in range(200):
        ghosts.add(key_of(number))
    found = sum(ghosts.take(key_of(number), 200) for number in range(200))
    assert found >= 190, "few buckets overflow"
    assert not any(ghosts.take(key_of(number), 200) for number in range(200))
    ghosts.add(key_of(1))
    for number in range(300, 310):
        ghosts.add(key_of(number))
    assert not ghosts.take(key_of(1), 10)


def test_ghosts_take_at_most_64_bytes_an_entry() -> None:
    for entries in (100, 1_000, 5_000, 100_000):
        assert GhostTable(entries).size_bytes <= 64 * entries + 4_096
