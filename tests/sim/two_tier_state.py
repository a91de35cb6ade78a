"""The state of a world of two tiers, and how the others look at it."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from random import Random
from typing import Final

from dataplane.core.cache import CacheCore
from dataplane.core.entry import Entry, Pin
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES, SegmentNumber
from dataplane.core.ssd_books import DropSegment, SegmentState, SsdPartition
from dataplane.core.ssd_tier import SsdTier
from dataplane.io.arena import Arena
from saltern.keys import BlockKey
from saltern.names import TenantId
from tests.sim.disk import ModelDisk
from tests.sim.two_tier_values import NS, Job, Reading, Rules, Truth, Writing
from tests.support.cache_node import key_of

TRANSCRIPT_LINES: Final = 60
#: In one of so many worlds namespaces have limits of their own.
WORLDS_PER_LIMITED: Final = 6
LIMITED_WORLD: Final = 4
#: Commands by how often they come in an average world; each seed multiplies them.
COMMANDS: Final = {
    "put": 40.0,
    "begin_put": 6.0,
    "finish_put": 8.0,
    "get": 20.0,
    "release": 10.0,
    "delete": 4.0,
    "work": 60.0,
    "read": 30.0,
    "drain": 0.5,
    "rot": 0.5,
    "change_faults": 1.0,
    "retry_writing": 1.0,
    "retry_removals": 0.5,
    "change_quota": 0.8,
    "rotate_epoch": 0.3,
    "retire_epoch": 0.3,
    "recreate_namespace": 0.3,
    "delete_or_create_tenant": 0.4,
    "kill": 0.7,
    "lose_power": 0.2,
    "stop_cleanly": 0.1,
    "restart_warm": 0.6,
    "trim": 2.0,
}
_ALWAYS: Final = ("put", "work", "read")


class TwoTierState:
    """A node over the lives of its process; the disk outlives it.

    Attributes:
        queue: what the writing thread has to do, in order.
        readings: what reading threads have to do, in any order.
        losses: SSD entries that this command may take: deleted, or closed with their partition.
        rotten: numbers of values whose bytes in the arena have rotted.
        unremoved: removals of files that failed.
        unread: entries of which a read failed; clients delete or replace them more often than others.
        sealed: what lay in sealed segments at a clean stop.
        over, not_durable: segments of this life in which a write failed, and of which a sync did.
        transcript, done: see :class:`tests.sim.world.World`.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(f"two tiers {seed}")
        self.transcript: deque[str] = deque(maxlen=TRANSCRIPT_LINES)
        self.done: Counter[str] = Counter()
        self._digest = hashlib.blake2b(digest_size=16)
        self.steps = self.now_ns = self.version = self.uids = self.numbers = 0
        self.dram_bytes = rng.choice([8, 12, 20]) * GRANULE_BYTES
        self.ssd_bytes = rng.choice([40, 80, 160]) * BLOCK_BYTES
        self.keys = [key_of(number) for number in range(rng.choice([12, 24, 60]))]
        self.sizes_bytes = rng.sample([1, 4000, 4096, 4097, 8192, 12_000], 3)
        self.segment_min_bytes = rng.choice([4, 8, 12]) * BLOCK_BYTES
        self.weights = weights_of(rng)
        self.disk = ModelDisk(rng, self.done, self.ssd_bytes)
        self.arena = Arena(self.dram_bytes)
        self.rules: dict[TenantId, Rules] = {}
        self.names = [TenantId(f"t{number}") for number in range(rng.randint(2, 4))]
        # Its own source of chance: the other worlds are what they were before there were limits of namespaces.
        self.limits_rng = Random(f"limits {seed}") if seed % WORLDS_PER_LIMITED == LIMITED_WORLD else None
        self.truth = Truth()
        self.unlawful: list[str] = []
        self.above: dict[tuple[TenantId, str], int] = {}
        self.losses: set[tuple[Partition, BlockKey]] = set()
        self.rotten: set[int] = set()
        self.sealed: set[tuple[Partition, BlockKey]] = set()
        self.tier: SsdTier
        self.core: CacheCore
        self.queue: deque[Job]
        self.readings: list[Reading]
        self.writings: list[Writing]
        self.pins: list[Pin]
        self.over: set[SegmentNumber]
        self.not_durable: set[SegmentNumber]
        self.unremoved: list[DropSegment]
        self.unread: list[tuple[Partition, BlockKey]]

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def say(self, line: str) -> None:
        self.transcript.append(f"{self.steps:>6}  {line}")
        self._digest.update(line.encode())

    def is_open(self, partition: Partition) -> bool:
        rules = self.rules.get(partition.tenant)
        return rules is not None and rules.uid == partition.namespace_uid and partition.epoch in rules.epochs

    def in_dram(self) -> dict[tuple[Partition, BlockKey], Entry]:
        return {
            (partition, key): entry
            for owner in self.core._pool.tenants.values()
            for partition, index in owner.partitions.items()
            for key, entry in index.entries.items()
        }

    def on_either(self, partition: Partition, key: BlockKey) -> bool:
        return bool(self.core.lookup(partition, [key])[1][0])

    def check_files(self) -> None:
        """With nothing under way: exactly the files that the books name, none longer than charged (I8)."""
        named = {segment.number: segment for owner in self.tier.tenants.values() for segment in owner.segments.values()}
        for number, file in self.disk.files.items():
            assert number in named, "I8: an orphan file"
            assert file.size_bytes <= named[number].charged_bytes, "I4: a file is longer than charged"
        waiting = [one for one in named.values() if one.state is SegmentState.DROPPING]
        assert not waiting, "I8: a file waits to be removed and nobody removes it"

    def _on_disk(self) -> set[tuple[Partition, BlockKey]]:
        """Entries whose records are on disk, whole: they outlive the process."""
        return {
            (Partition(owner.tenant, NS, books.storage_uid, books.epoch), key)
            for owner in self.tier.tenants.values()
            for books in owner.partitions.values()
            for key, entry in books.entries.items()
            if (record := self.disk.files[entry.segment.number].at(entry.block)) is not None and record.is_good
        }

    @staticmethod
    def _partition_of(books: SsdPartition) -> Partition:
        return Partition(books.owner.tenant, NS, books.storage_uid, books.epoch)

    def _any_partition(self) -> Partition:
        """One of the policy's, mostly; else one that it does not open."""
        tenant = self.rng.choice(self.names)
        rules = self.rules.get(tenant)
        if rules is None or self.rng.random() < 0.03:
            return Partition(tenant, NS, "u-gone", 1)
        epoch = rules.epochs[-1] if self.rng.random() < 0.8 else self.rng.choice(rules.epochs)
        return Partition(tenant, NS, rules.uid, epoch)


def weights_of(rng: Random) -> list[float]:
    """How often each of COMMANDS comes in a world."""
    return [
        weight * rng.choice([0.5, 1, 2] if name in _ALWAYS else [0, 0.5, 1, 3]) for name, weight in COMMANDS.items()
    ]
