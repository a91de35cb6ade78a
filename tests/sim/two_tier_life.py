"""How a process begins in a world of two tiers: what it finds on disk and in the arena, and what it makes of it."""

from __future__ import annotations

from collections import deque
from typing import Final

from dataplane.core.cache import CacheCore
from dataplane.core.eviction import Eviction
from dataplane.core.partition import Partition
from dataplane.core.snapshot import decode_snapshot
from dataplane.core.ssd_tier import SsdTier
from saltern.keys import BlockKey
from saltern.wire import checksum
from tests.sim.disk import Value
from tests.sim.two_tier_policy import Administration
from tests.sim.two_tier_values import NS, short

SOFT_MARK_PERCENT: Final = 80


class Life(Administration):
    """One process over the disk, from its recovery on."""

    def _boot(self, snapshot: bytes = b"") -> None:
        """A new process over the disk as it is; over the arena as well, if a ``snapshot`` of its index is left."""
        in_arena = self._current_in_dram() if snapshot else {}
        self.tier = SsdTier(self.ssd_bytes, segment_min_bytes=self.segment_min_bytes)
        self.core = CacheCore(
            self.dram_bytes, eviction=Eviction.LRU, ssd=self.tier, soft_mark_percent=SOFT_MARK_PERCENT
        )
        self.core.on_evict(self._demote)
        self.core.on_relocate(self.arena.relocate)
        self.queue = deque()
        self.readings = []
        self.writings = []
        self.pins = []
        self.losses = set()
        self.above = {}
        self.over = set()
        self.not_durable = set()
        self.unremoved = []
        self.unread = []
        self._recover()
        self.push()
        if snapshot:
            self._adopt(snapshot, in_arena)

    def _current_in_dram(self) -> dict[tuple[Partition, BlockKey], Value]:
        """What a snapshot must hold: entries that nobody holds."""
        return {place: self.truth.current[place] for place, entry in self.in_dram().items() if not entry.pins}

    def _adopt(self, snapshot: bytes, in_arena: dict[tuple[Partition, BlockKey], Value]) -> None:
        """What the policy still names is there again, as far as there is room; the rest is gone (I4, I12)."""
        named = {place: value for place, value in in_arena.items() if self.is_open(place[0])}
        on_ssd = self.truth.current
        older = [place[1] for place, value in named.items() if on_ssd.get(place, value) != value]
        assert not older, f"I12: replaced records are back: {', '.join(map(short, older))}"
        self.truth.current = on_ssd | named
        adopted = self.core.adopt(
            decode_snapshot(snapshot), lambda offset, size: checksum(self.arena.view(offset, size)), self.now_ns
        )
        self.collect()
        told = (adopted.entries + adopted.evicted_entries, adopted.purged_entries)
        assert told == (len(named), len(in_arena) - len(named)), f"I8: adopted {told}"
        there = self.in_dram().keys()
        assert there <= named.keys() and len(there) == adopted.entries, "I7: adopted something else"
        self.done["entries adopted after a restart"] += adopted.entries

    def _recover(self) -> None:
        """What :mod:`dataplane.io.ssd_recovery` does, from the model's files."""
        self.disk.tidy()
        found = {
            number: self.tier.adopt_partition(folder.tenant, number, folder.uid, folder.epoch)
            for number, folder in sorted(self.disk.folders.items())
            if folder.has_key
        }
        for number, file in sorted(self.disk.files.items()):
            rows, dead = self.disk.contents(file)
            partition = found[file.folder.number]
            self.tier.adopt_segment(partition, number, file.end_block, rows, dead, is_sealed=file.footer is not None)
        self._compare_with_disk()
        assert self.sealed <= self.truth.current.keys(), "I7: a clean stop lost something"
        self.sealed = set()
        self.tier.adopt_end()
        self.collect()

    def _compare_with_disk(self) -> None:
        """The index is what the files say, the last record of a key winning; nothing deleted for good is back."""
        expected: dict[tuple[Partition, BlockKey], Value] = {}
        for _, file in sorted(self.disk.files.items()):
            rows, dead = self.disk.contents(file)
            for key in dead:
                expected.pop((file.folder.partition, key), None)
            for key, block, _ in rows:
                record = file.at(block)
                assert record is not None, "I8: a footer names a record that was never written"
                expected[file.folder.partition, key] = record.value
        there = {
            (Partition(owner.tenant, NS, books.storage_uid, books.epoch), key)
            for owner in self.tier.tenants.values()
            for books in owner.partitions.values()
            for key in books.entries
        }
        assert there == expected.keys(), (
            f"I7: recovery lost {expected.keys() - there}, made up {there - expected.keys()}"
        )
        for (partition, key), value in expected.items():
            # In a partition that is to go anyway tombstones go before records: the first policy closes it.
            is_back = self.is_open(partition) and value.number in self.truth.dead
            assert not is_back, f"I12: {short(key)} of {partition.tenant} is back after a restart"
        self.truth.current = expected
        self.truth.graves.clear()  # what was deleted without a tombstone is back, or gone for good
        self.done["entries recovered"] += len(expected)
