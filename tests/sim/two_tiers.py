"""A node with an SSD tier: the real core and tier over an arena and a model of the disk that fails, tears and crashes.

:mod:`tests.sim.world` looks at DRAM through batches, byte by byte of every transfer; this looks at what joins the two
tiers: demotion, promotion, reclaim, tombstones, seals, policies, kill -9, loss of power, and recovery from what was
durable. Every command is followed by :func:`tests.sim.two_tier_checks.check`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeAlias

from dataplane.core.cache import CacheCore
from dataplane.core.entry import Entry, Pin, Promotion, PutRefused, PutTicket
from dataplane.core.eviction import Eviction
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES, SegmentNumber
from dataplane.core.snapshot import ArenaIdentity, decode_snapshot
from dataplane.core.ssd_books import (
    Append,
    Bury,
    DestroyKey,
    DropSegment,
    Relocate,
    Seal,
    SegmentState,
    SsdAction,
    SsdPartition,
    SsdRead,
)
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.usage import DropReason, EvictionCause
from dataplane.io.arena import Arena
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from saltern.wire import checksum
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tests.sim.disk import DiskError, ModelDisk, NotDurableError, Value
from tests.support.cache_node import key_of

TRANSCRIPT_LINES: Final = 60
SOFT_MARK_PERCENT: Final = 80
#: In one of so many worlds namespaces have limits of their own.
WORLDS_PER_LIMITED: Final = 6
LIMITED_WORLD: Final = 4
_NS: Final = NamespaceId("ns")
_BY_A_CLEAN_STOP: Final = SegmentNumber(0)
_ARENA: Final = ArenaIdentity("node-1", "boot", "generation", 1, 0)
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


@dataclass(eq=False, slots=True)
class Rules:
    """One tenant's policy."""

    dram: TierQuota
    ssd: TierQuota
    uid: str
    epochs: tuple[int, ...] = (1,)
    namespace_limits: dict[Tier, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Staged:
    """A record on its way to the disk."""

    append: Append
    value: Value
    relocate: Relocate | None = None


@dataclass(eq=False, slots=True)
class Reading:
    """A read on its way: for a get (``promotion``), or to write an entry anew (``relocate``)."""

    read: SsdRead
    promotion: Promotion | None = None
    relocate: Relocate | None = None


@dataclass(eq=False, slots=True)
class Writing:
    """A put whose bytes have not all come."""

    ticket: PutTicket
    value: Value


@dataclass(slots=True)
class Truth:
    """What must be found if it is found at all.

    Attributes:
        current: the value that a key has now; absent once it was deleted.
        dead: numbers of values that were deleted or replaced and whose tombstone is on disk, by the file it lies in.
        graves: numbers that a delete or a put has outdated, until a tombstone for the key is written.
    """

    current: dict[tuple[Partition, BlockKey], Value] = field(default_factory=dict)
    dead: dict[int, SegmentNumber] = field(default_factory=dict)
    graves: dict[tuple[Partition, BlockKey], set[int]] = field(default_factory=dict)


Job: TypeAlias = Staged | SsdAction
_KINDS: Final[dict[type, str]] = {
    Staged: "write a record",
    Bury: "write a tombstone",
    Seal: "seal a segment",
    DropSegment: "remove a segment",
    DestroyKey: "destroy a key",
}


class TwoTierWorld:
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
        self.weights = [
            weight * rng.choice([0.5, 1, 2] if name in _ALWAYS else [0, 0.5, 1, 3]) for name, weight in COMMANDS.items()
        ]
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
        for tenant in self.names:
            self.rules[tenant] = self._draw_rules()
        self.rotten: set[int] = set()
        self.sealed: set[tuple[Partition, BlockKey]] = set()
        self._boot()

    # ---- a life

    def _boot(self, snapshot: bytes = b"") -> None:
        """A new process over the disk as it is; over the arena as well, if a ``snapshot`` of its index is left."""
        in_arena = self._current_in_dram() if snapshot else {}
        self.tier = SsdTier(self.ssd_bytes, segment_min_bytes=self.segment_min_bytes)
        self.core = CacheCore(
            self.dram_bytes, eviction=Eviction.LRU, ssd=self.tier, soft_mark_percent=SOFT_MARK_PERCENT
        )
        self.core.on_evict(self._demote)
        self.core.on_relocate(self.arena.relocate)
        self.queue: deque[Job] = deque()
        self.readings: list[Reading] = []
        self.writings: list[Writing] = []
        self.pins: list[Pin] = []
        self.losses = set()
        self.above = {}
        self.over: set[SegmentNumber] = set()
        self.not_durable: set[SegmentNumber] = set()
        self.unremoved: list[DropSegment] = []
        self.unread: list[tuple[Partition, BlockKey]] = []
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
        assert not older, f"I12: replaced records are back: {', '.join(map(_short, older))}"
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
            (Partition(owner.tenant, _NS, books.storage_uid, books.epoch), key)
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
            assert not is_back, f"I12: {_short(key)} of {partition.tenant} is back after a restart"
        self.truth.current = expected
        self.truth.graves.clear()  # what was deleted without a tombstone is back, or gone for good
        self.done["entries recovered"] += len(expected)

    def step(self) -> None:
        self.steps += 1
        self.now_ns += 1000
        self.losses = set()
        while True:
            command = self.rng.choices(tuple(COMMANDS), self.weights)[0]
            if getattr(self, command)():
                self.done[command] += 1
                return

    def finish(self) -> None:
        """Everything ends and every tenant is deleted: nothing may be left, on either tier (I8, I12)."""
        self.disk.fault_share = {}
        self.disk.device_bytes = self.ssd_bytes
        self.retry_removals()
        self.drain()
        self._end_transfers()
        self.drain()
        assert not self.queue and not self.readings
        self.check_files()
        self.rules.clear()
        self.push()
        self.drain()
        assert not self.core.usage().tenants, "I8: somebody is left in the books"
        assert not self.disk.files, "I8: an orphan file"
        assert not any(folder.has_key for folder in self.disk.folders.values()), "I12: a key was not destroyed"

    def close(self) -> None:
        self.arena.close()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def say(self, line: str) -> None:
        self.transcript.append(f"{self.steps:>6}  {line}")
        self._digest.update(line.encode())

    # ---- clients

    def put(self) -> bool:
        """A put from beginning to end."""
        writing = self._start_put()
        if writing is not None:
            self._commit(writing)
        return True

    def begin_put(self) -> bool:
        writing = self._start_put() if len(self.writings) < 4 else None
        if writing is not None:
            self.writings.append(writing)
        return writing is not None

    def finish_put(self) -> bool:
        if not self.writings:
            return False
        writing = self.writings.pop(self.rng.randrange(len(self.writings)))
        if self.rng.random() < 0.15:
            self.core.put_abort(writing.ticket)
            self.say(f"a client dies while it puts {_short(writing.value.key)}")
            self.done["died while putting"] += 1
        else:
            self._commit(writing)
        return True

    def _start_put(self) -> Writing | None:
        partition, key = self._any_partition(), self.rng.choice(self.keys)
        if self.unread and self.rng.random() < 0.2:
            partition, key = self.unread.pop()
        self.numbers += 1
        size_bytes = self.rng.choice(self.sizes_bytes)
        value = Value(self.numbers, partition, key, _payload(partition, key, self.numbers, size_bytes))
        before = self.in_dram()
        outcome = self.core.put_start(partition, key, size_bytes, self.now_ns)
        told = f"{partition.tenant}@{partition.epoch} puts {_short(key)} of {size_bytes} B (#{value.number})"
        if isinstance(outcome, PutRefused):
            assert self.in_dram() == before, "I6: a put that was refused evicted something"
            self.say(f"{told}: {outcome.error.reason}")
            self.done[f"refused as {outcome.error.reason}"] += 1
            return None
        assert not self.on_either(partition, key), "I6: a put over an entry that is there was admitted"
        self.say(f"{told}: admitted at {outcome.offset}")
        self.arena.view(outcome.offset, size_bytes)[:] = value.payload
        replaced = self.truth.current.get((partition, key))
        if replaced is not None and self.tier.is_writable:  # lost from both tiers, and perhaps still on disk
            self.truth.graves.setdefault((partition, key), set()).add(replaced.number)
        return Writing(outcome, value)

    def _commit(self, writing: Writing) -> None:
        value = writing.value
        refused = self.core.put_commit(writing.ticket, checksum(value.payload), self.now_ns)
        if refused is None:
            self.truth.current[value.partition, value.key] = value
            self.done["stored"] += 1
        self.say(f"#{value.number} is {'stored' if refused is None else refused.error.reason}")

    def get(self) -> bool:
        """Read some keys: what is in DRAM now, what is on SSD once its read has been done."""
        partition = self._any_partition()
        wanted = list(dict.fromkeys(self.rng.choices(self.keys, k=self.rng.randint(1, 4))))
        pins = self.core.get_start(partition, wanted, self.now_ns, counts_misses=False)
        begun = 0
        for key, pin in zip(wanted, pins, strict=True):
            if pin is not None:
                self._verify(partition, key, pin)
                self.pins.append(pin)
                continue
            promotion = self.core.promote_start(partition, key, self.now_ns)
            if promotion is not None:
                self.readings.append(Reading(promotion.read, promotion=promotion))
                begun += 1
        self.say(
            f"{partition.tenant} gets {len(wanted)} keys: {len(wanted) - pins.count(None)} in DRAM, {begun} on SSD"
        )
        return True

    def release(self) -> bool:
        """A reader ends."""
        if not self.pins:
            return False
        self.core.get_end([self.pins.pop(self.rng.randrange(len(self.pins)))])
        return True

    def delete(self) -> bool:
        """Any key; more often one that is on SSD, or on its way from there."""
        partition, key = self._any_partition(), self.rng.choice(self.keys)
        reading = [one.promotion.ticket.entry for one in self.readings if one.promotion is not None]
        on_ssd = sorted(self._on_disk(), key=_in_order)
        if self.unread and self.rng.random() < 0.5:
            partition, key = self.unread.pop()
        elif reading and self.rng.random() < 0.5:
            entry = self.rng.choice(reading)
            partition, key = entry.index.partition, entry.key
        elif on_ssd and self.rng.random() < 0.7:
            partition, key = self.rng.choice(on_ssd)
        value = self.truth.current.get((partition, key))
        deleted = self.core.delete(partition, [key])
        self.collect()
        self.losses.add((partition, key))
        assert not self.on_either(partition, key), "I12: deleted and still found"
        if self.is_open(partition) and value is not None:
            del self.truth.current[partition, key]
            self.truth.graves.setdefault((partition, key), set()).add(value.number)
        self.say(f"{partition.tenant} deletes {_short(key)}: {deleted} there")
        return True

    def _verify(self, partition: Partition, key: BlockKey, pin: Pin) -> None:
        value = self.truth.current.get((partition, key))
        assert value is not None, f"I2, I12: {_short(key)} of {partition.tenant} is served and is not there"
        assert bytes(self.arena.view(pin.offset, pin.size_bytes)) == value.payload, "I7: other bytes than were put"
        assert pin.checksum == checksum(value.payload), "I7: another sum"

    # ---- what the shell does

    def _demote(self, entry: Entry) -> None:
        """As :meth:`dataplane.io.ssd.SsdStore.demote`."""
        partition, key = entry.index.partition, entry.key
        if not self.tier.wants(partition, key):
            return
        if self.rng.random() < 0.05:
            self.tier.drop(partition, DropReason.NO_STAGING)
            self.done["no staging memory"] += 1
            return
        staying = self._staying()
        append = self.tier.append_start(partition, key, entry.size_bytes, self.now_ns)
        self._judge_who_gave_way(partition.tenant, staying)
        self.collect()
        if append is not None:
            self._judge_place(append)
            value = self.truth.current[partition, key]
            assert bytes(self.arena.view(entry.offset, entry.size_bytes)) == value.payload, "I7: demoted other bytes"
            self.queue.append(Staged(append, value))

    def _judge_place(self, append: Append) -> None:
        """A block is sealed once: its number is a nonce, and after a failed write nobody knows what it holds."""
        if append.segment.number in self.over:
            self.unlawful.append(f"I7: a record was admitted to segment {append.segment.number} after a failed write")

    def _staying(self) -> dict[TenantId, int]:
        return {tenant: owner.used_bytes - owner.leaving_bytes for tenant, owner in self.tier.tenants.items()}

    def _judge_who_gave_way(self, requester: TenantId, before: dict[TenantId, int]) -> None:
        """I5 on SSD: who is at or below its reservation loses nothing because of others."""
        after = self._staying()
        is_entitled = after[requester] <= self.tier.tenants[requester].quota.reserved_bytes
        for tenant, left_bytes in after.items():
            reserved_bytes = self.tier.tenants[tenant].quota.reserved_bytes
            if tenant == requester or left_bytes >= before[tenant]:
                continue
            self.done["segments taken from others"] += 1
            if before[tenant] <= reserved_bytes:
                self.unlawful.append(f"I5: {tenant} lost a segment at or below its reservation")
            elif left_bytes < reserved_bytes and not is_entitled:
                self.unlawful.append(f"I5: {tenant} was taken below its reservation by a borrower")

    def collect(self) -> None:
        """Queue what the tier asks for; entries to be written anew are read first."""
        while self.tier.actions:
            action = self.tier.actions.popleft()
            if not isinstance(action, Relocate):
                self.queue.append(action)
            elif action.entry.is_alive:
                self.readings.append(Reading(self.tier.read_start(action.entry, relocates=True), relocate=action))
            else:
                self.tier.relocate_end(action)

    def work(self) -> bool:
        """The writing thread does its next piece of work."""
        self.collect()
        if not self.queue:
            return False
        job = self.queue.popleft()
        fault: DiskError | None = None
        try:
            self._do(job)
        except DiskError as error:
            fault = error
        if fault is not None and isinstance(job, Staged | Bury):
            self.over.add((job.append if isinstance(job, Staged) else job).segment.number)
        if isinstance(fault, NotDurableError) and isinstance(job, Seal):
            self.not_durable.add(job.segment.number)
        self._answer(job, fault)
        self.collect()
        self.done[f"{'failed to do' if fault else 'did'}: {_KINDS[type(job)]}"] += 1
        self.say(f"{_told(job)}{': failed' if fault else ''}")
        if fault is not None and self.rng.random() < 0.5:
            self.tier.is_writable = False  # as the shell does, for a while
        return True

    def _do(self, job: Job) -> None:
        match job:
            case Staged():
                self.disk.write_record(job.append, job.value)
            case Bury():
                self.disk.write_grave(job)
                partition = self._partition_of(job.segment.partition)
                for key in job.keys:
                    for number in self.truth.graves.pop((partition, key), ()):
                        self.truth.dead[number] = job.segment.number
            case Seal():
                self.disk.seal(job)
            case DropSegment():
                self.disk.drop(job)
            case DestroyKey():
                self.disk.destroy_key(job.partition)

    def _answer(self, job: Job, fault: DiskError | None) -> None:
        tier, written = self.tier, fault is None
        match job:
            case Staged():
                tier.append_end(job.append, written=written)
                if job.relocate is not None:
                    tier.relocate_end(job.relocate)
            case Bury():
                tier.bury_end(job, written=written)
            case Seal():
                tier.seal_end(job, written=written, lost=isinstance(fault, NotDurableError))
            case DropSegment():
                tier.drop_end(job, removed=written)
                self.unremoved += [] if written else [job]
            case DestroyKey():
                if not written:
                    self.queue.append(job)

    def read(self) -> bool:
        """A reading thread brings what it was asked for, or does not."""
        if not self.readings:
            return False
        reading = self.readings.pop(self.rng.randrange(len(self.readings)))
        entry = reading.read.entry
        value: Value | None = None
        try:
            value = self.disk.read(entry.segment.number, entry.block, entry.key)
        except DiskError:
            self.done["read failed"] += 1
            self.unread += [(self._partition_of(entry.segment.partition), entry.key)]
        if reading.promotion is not None:
            self._arrive(reading.promotion, value)
        elif reading.relocate is not None:
            self._relocate(reading, value)
        self.collect()
        return True

    def _arrive(self, promotion: Promotion, value: Value | None) -> None:
        ticket = promotion.ticket
        index = ticket.entry.index
        if value is not None:
            assert value.partition == index.partition, "I2: another partition's record"
            self.arena.view(ticket.offset, ticket.size_bytes)[:] = value.payload
        digest = checksum(value.payload) if value is not None else None
        is_served = self.core.promote_end(promotion, digest, self.now_ns)
        self.say(f"{_short(ticket.entry.key)} of {index.partition.tenant} comes from SSD: {is_served}")
        if is_served:
            self.done["promoted"] += 1
            counters = index.owner.counters
            held_back = counters.hits_held_back
            pin = self.core.promote_pin(index.partition, ticket.entry.key, self.now_ns)
            if pin is None:
                assert counters.hits_held_back > held_back, "I6: promoted and not readable"
                self.done["held back from a borrower"] += 1
                return
            self._verify(index.partition, ticket.entry.key, pin)
            self.pins.append(pin)

    def _relocate(self, reading: Reading, value: Value | None) -> None:
        assert reading.relocate is not None
        is_good = self.tier.read_end(reading.read, intact=value is not None)
        append = self.tier.relocate_append(reading.relocate, self.now_ns) if is_good else None
        self.collect()
        if append is None or value is None:
            self.tier.relocate_end(reading.relocate)
        else:
            self._judge_place(append)
            self.done["written anew"] += 1
            self.queue.append(Staged(append, value, reading.relocate))

    def drain(self) -> bool:
        """Everything that is under way comes to its end."""
        for _ in range(10_000):
            if not (self.read() or self.work()):
                return True
        raise AssertionError("the tier never comes to rest")

    # ---- the disk and the process

    def rot(self) -> bool:
        self.say("a record rots")
        return self.disk.rot()

    def change_faults(self) -> bool:
        """A good disk, or one that fails now and then, in its own ways; or one that is nearly full."""
        kinds = ("write", "torn", "sync", "unlink", "read")
        is_good = self.rng.random() < 0.4
        self.disk.fault_share = {} if is_good else {kind: self.rng.choice([0, 0.05, 0.3, 0.3]) for kind in kinds}
        self.disk.device_bytes = self.ssd_bytes if is_good or self.rng.random() < 0.6 else self.ssd_bytes // 3
        self.say(f"from now on the disk fails by {self.disk.fault_share}, {self.disk.device_bytes} bytes")
        return True

    def retry_writing(self) -> bool:
        if self.tier.is_writable:
            return False
        self.tier.is_writable = True
        return True

    def retry_removals(self) -> bool:
        """As the shell does after a while, and at a clean stop."""
        again, self.unremoved = self.unremoved, []
        for drop in again:
            self.tier.drop_again(drop)
        self.collect()
        return bool(again)

    def kill(self) -> bool:
        """kill -9: what was written is there, and perhaps half of what was being written."""
        promised = self._on_disk()
        if self.queue and self.rng.random() < 0.5:
            self.disk.fault_share, kept = {"torn": 1.0}, self.disk.fault_share
            try:
                self._do(self.queue[0])
            except DiskError:
                self.done["killed in mid-write"] += 1
            self.disk.fault_share = kept
        self.say("the process is killed")
        self._boot()
        lost = {place for place in promised - self.truth.current.keys() if self.is_open(place[0])}
        assert not lost, f"I7: {lost} was on disk, and is lost"
        return True

    def lose_power(self) -> bool:
        """Only what was sealed is sure to be there; a tombstone that was not may be gone too."""
        sealed = {number for number, file in self.disk.files.items() if file.footer is not None} | {_BY_A_CLEAN_STOP}
        self.truth.dead = {value: file for value, file in self.truth.dead.items() if file in sealed}
        self.disk.lose_power()
        self.say("the power fails")
        self._boot()
        return True

    def stop_cleanly(self) -> bool:
        """Everything ends and is sealed; DRAM is lost."""
        self._stop()
        self._boot()
        return True

    def restart_warm(self) -> bool:
        """A clean stop that leaves DRAM and its index; meanwhile bits may rot, and the policy change."""
        self._stop()
        snapshot = b"".join(self.core.snapshot(_ARENA))
        places = self.in_dram()
        if places and self.rng.random() < 0.3:
            place, entry = self.rng.choice(list(places.items()))
            self.arena.view(entry.offset, 1)[0] ^= 1
            self.rotten.add(self.truth.current[place].number)
            self.done["bits rotten while stopped"] += 1
        rules = self.rules.get(self.rng.choice(self.names))
        if rules is not None and self.rng.random() < 0.5:
            drawn = self.rng.choice([TierQuota(0, 0), TierQuota(0, self.dram_bytes // 4), rules.dram])
            rules.dram, rules.epochs = drawn, (*rules.epochs, rules.epochs[-1] + 1)[-2:]
        self._boot(snapshot)
        return True

    def trim(self) -> bool:
        """The background takes tenants back to their soft marks: own coldest, by bytes, never a reservation."""
        before, usage = self.in_dram(), self.core.usage()
        budget_bytes = self.rng.choice([1, 3, 40]) * GRANULE_BYTES
        evicted_bytes = self.core.trim(self.now_ns, budget_bytes)
        lost = [entry for place, entry in before.items() if place not in self.in_dram()]
        assert evicted_bytes == sum(entry.extent_bytes for entry in lost), "I8: trimmed and told otherwise"
        assert evicted_bytes <= budget_bytes or len(lost) == 1, "trimmed by more than it was to be"
        after = self.core.usage()
        for tenant in {entry.index.partition.tenant for entry in lost}:
            then, now = usage.tenants[tenant], after.tenants[tenant]
            assert then.used_bytes > then.limit_bytes * SOFT_MARK_PERCENT // 100, f"{tenant} was below its soft mark"
            assert now.used_bytes >= min(now.reserved_bytes, then.used_bytes), (
                f"I5: {tenant} was trimmed of what it has reserved"
            )
        causes = [books.counters.evictions_by_cause.get(EvictionCause.SOFT_MARK, 0) for books in after.tenants.values()]
        was = [books.counters.evictions_by_cause.get(EvictionCause.SOFT_MARK, 0) for books in usage.tenants.values()]
        assert sum(causes) - sum(was) == len(lost), "I8: trimmed for another cause"
        self.done["trimmed"] += len(lost)
        self.say(f"trim: {len(lost)} entries go")
        return True

    def _stop(self) -> None:
        self.disk.fault_share = {}
        self.disk.device_bytes = self.ssd_bytes
        self.retry_removals()
        self.drain()
        self._end_transfers()
        open_before = {
            books.open_segment.number
            for owner in self.tier.tenants.values()
            for books in owner.partitions.values()
            if books.open_segment is not None
        }
        self.tier.seal_all()
        self.collect()
        self.drain()
        sealed = {
            (Partition(owner.tenant, _NS, books.storage_uid, books.epoch), key)
            for owner in self.tier.tenants.values()
            for books in owner.partitions.values()
            for key, entry in books.entries.items()
            if self.disk.files[entry.segment.number].footer is not None
        }
        unsealed = {number for number in open_before & self.disk.files.keys() if self.disk.files[number].footer is None}
        assert not unsealed, f"I7: segments {unsealed} are not sealed after a clean stop"
        self._deletes_are_durable()
        self.say("a clean stop")
        self.sealed = sealed

    def _deletes_are_durable(self) -> None:
        """After a clean stop no value may come back that was deleted or replaced."""
        for numbers in self.truth.graves.values():
            self.truth.dead.update(dict.fromkeys(numbers, _BY_A_CLEAN_STOP))
        self.truth.graves.clear()

    def _end_transfers(self) -> None:
        for writing in self.writings:
            self.core.put_abort(writing.ticket)
        self.core.get_end(self.pins)
        self.writings, self.pins = [], []

    # ---- the policy

    def push(self) -> None:
        """Apply the rules as they are."""
        self.version += 1
        tenants = {
            tenant: TenantPolicy(
                TenantState.ACTIVE,
                {Tier.DRAM: rules.dram, Tier.SSD: rules.ssd},
                {_NS: NamespacePolicy(rules.uid, 16_384, rules.epochs, tier_limits=dict(rules.namespace_limits))},
            )
            for tenant, rules in self.rules.items()
        }
        self.core.apply_policy(NodePolicy(self.version, tenants), self.now_ns)
        self.collect()
        for partition, key in list(self.truth.current):
            if not self.is_open(partition):
                del self.truth.current[partition, key]
                self.losses.add((partition, key))

    def change_quota(self) -> bool:
        tenant = self.rng.choice(self.names)
        if tenant not in self.rules:
            return False
        drawn, rules = self._draw_rules(tenant), self.rules[tenant]
        rules.dram, rules.ssd = drawn.dram, drawn.ssd
        rules.namespace_limits = drawn.namespace_limits
        self.say(
            f"{tenant} now has {rules.dram} and {rules.ssd}, its namespace {rules.namespace_limits or 'no limits'}"
        )
        self.push()
        return True

    def rotate_epoch(self) -> bool:
        rules = self.rules.get(self.rng.choice(self.names))
        if rules is None:
            return False
        rules.epochs = (*rules.epochs, rules.epochs[-1] + 1)[-3:]
        self.say("an epoch begins")
        self.push()
        return True

    def retire_epoch(self) -> bool:
        rules = self.rules.get(self.rng.choice(self.names))
        if rules is None or len(rules.epochs) == 1:
            return False
        rules.epochs = rules.epochs[-1:]
        self.say("older epochs end")
        self.push()
        return True

    def recreate_namespace(self) -> bool:
        rules = self.rules.get(self.rng.choice(self.names))
        if rules is None:
            return False
        self.uids += 1
        rules.uid, rules.epochs = f"u{self.uids}", (1,)
        self.say("a namespace is deleted and made anew")
        self.push()
        return True

    def delete_or_create_tenant(self) -> bool:
        tenant = self.rng.choice(self.names)
        if tenant in self.rules and self.rng.random() < 0.6:
            return False
        if tenant in self.rules:
            del self.rules[tenant]
        else:
            self.rules[tenant] = self._draw_rules()
        self.say(f"{tenant} is {'made' if tenant in self.rules else 'deleted'}")
        self.push()
        return True

    def _draw_rules(self, tenant: TenantId | None = None) -> Rules:
        """Any quotas whose reservations both tiers can still promise."""
        self.uids += 1
        others = [rules for name, rules in self.rules.items() if name != tenant]

        def draw(capacity_bytes: int, reserved_by_others: int) -> TierQuota:
            limit_bytes = int(self.rng.choice([0, 0.25, 0.4, 0.6, 0.6, 1, 1, 1.5]) * capacity_bytes)
            wanted_bytes = int(self.rng.choice([0, 0.1, 0.3]) * capacity_bytes)
            reserved_bytes = min(limit_bytes, wanted_bytes, max(capacity_bytes - reserved_by_others, 0))
            return TierQuota(reserved_bytes, limit_bytes, self.rng.choice([1, 100, 100, 1000]))

        return Rules(
            draw(self.dram_bytes, sum(rules.dram.reserved_bytes for rules in others)),
            draw(self.ssd_bytes, sum(rules.ssd.reserved_bytes for rules in others)),
            f"u{self.uids}",
            namespace_limits=self._draw_limits(),
        )

    def _draw_limits(self) -> dict[Tier, int]:
        """Limits of a namespace on either tier, both or none; not always in whole granules or blocks."""
        rng = self.limits_rng
        if rng is None:
            return {}
        capacities = {Tier.DRAM: self.dram_bytes, Tier.SSD: self.ssd_bytes}
        shares = {tier: rng.choice([None, 0, 0.15, 0.25, 0.3, 0.45, 1]) for tier in capacities}
        return {tier: int(share * capacities[tier]) for tier, share in shares.items() if share is not None}

    # ---- looking

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
            (Partition(owner.tenant, _NS, books.storage_uid, books.epoch), key)
            for owner in self.tier.tenants.values()
            for books in owner.partitions.values()
            for key, entry in books.entries.items()
            if (record := self.disk.files[entry.segment.number].at(entry.block)) is not None and record.is_good
        }

    @staticmethod
    def _partition_of(books: SsdPartition) -> Partition:
        return Partition(books.owner.tenant, _NS, books.storage_uid, books.epoch)

    def _any_partition(self) -> Partition:
        """One of the policy's, mostly; else one that it does not open."""
        tenant = self.rng.choice(self.names)
        rules = self.rules.get(tenant)
        if rules is None or self.rng.random() < 0.03:
            return Partition(tenant, _NS, "u-gone", 1)
        epoch = rules.epochs[-1] if self.rng.random() < 0.8 else self.rng.choice(rules.epochs)
        return Partition(tenant, _NS, rules.uid, epoch)


def _payload(partition: Partition, key: BlockKey, number: int, size_bytes: int) -> bytes:
    tag = hashlib.blake2b(f"{partition} {key.hex()} {number}".encode(), digest_size=32).digest()
    return (tag * (size_bytes // 32 + 1))[:size_bytes]


def _in_order(place: tuple[Partition, BlockKey]) -> tuple[str, str, int, bytes]:
    """Sorts what a set holds, so that a seed is the same in every process."""
    partition, key = place
    return partition.tenant, partition.namespace_uid, partition.epoch, key


def _short(key: BlockKey) -> str:
    return f"k{int.from_bytes(key, 'big')}"


def _told(job: Job) -> str:
    match job:
        case Staged(append, value):
            return f"#{value.number} is written to segment {append.segment.number} at {append.block}"
        case Bury(segment, block, keys):
            return f"a tombstone of {len(keys)} keys is written to segment {segment.number} at {block}"
        case Seal(segment):
            return f"segment {segment.number} is sealed"
        case DropSegment(segment):
            return f"segment {segment.number} is removed"
        case _:
            return "a key is destroyed"
