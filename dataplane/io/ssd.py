"""The SSD tier of a running node: carries bytes between arena and files as the core decides, on worker threads.

::

    CacheCore --evicts--> demote: copy to staging --> writing thread: seal, write --> SsdTier.append_end
    GetBatch  --misses--> fetch: promote_start    --> reading threads: read, open --> CacheCore.promote_end, pins

Everything but the workers' jobs runs on the event loop. Nothing waits for the device but a get that has misses in DRAM
and hits on SSD: a demotion that finds no staging memory is dropped and counted, a read that finds the queue full or
takes too long is a miss (I10). Any fault of the device ends in a state that is told, never in wrong bytes (I7).
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast

import structlog

from dataplane.core.cache import CacheCore
from dataplane.core.entry import Entry, Pin, Promotion
from dataplane.core.extents import ArenaOffset, Extents, round_up
from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES, BadFormatError, record_blocks
from dataplane.core.ssd_books import (
    Append,
    Bury,
    DestroyKey,
    DropSegment,
    Relocate,
    Seal,
    SegmentBooks,
    SsdAction,
    SsdPartition,
)
from dataplane.core.ssd_tier import SsdTier
from dataplane.io.arena import Arena
from dataplane.io.clock import Clock
from dataplane.io.ssd_disk import RUN_MAX, Disk, Folder, Record, SegmentClosedError, SegmentPath, Wanted
from dataplane.io.ssd_fetch import Fetch, ReadJob
from dataplane.io.ssd_recovery import adopt, find_segments
from dataplane.io.workers import Failed, Workers
from saltern.keys import BlockKey
from saltern.names import TenantId

_log = structlog.get_logger(__name__)
MIB: Final = 1024 * 1024
#: One job of the writing thread takes about this much.
_JOB_BYTES: Final = 8 * MIB
#: One job of a reading thread takes about this much: large enough for the device, small enough to spread.
_RUN_BYTES: Final = MIB
#: How long after a failed write the next is tried.
_RETRY_S: Final = 30.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class SsdState(StrEnum):
    """How the tier fares; DRAM goes on in each of them."""

    OK = "ok"
    DEGRADED = "degraded"  #: reads and writes go on; something was lost or left alone
    READ_ONLY = "read-only"  #: the device takes no writes; tried again after a while
    OFF = "off"


@dataclass(frozen=True, slots=True)
class SsdStatus:
    """State of the tier, why, and whether it bypasses the page cache."""

    state: SsdState
    reason: str = ""
    is_direct: bool = False


@dataclass(frozen=True, slots=True)
class SsdLimits:
    """Bounds on what the tier may hold in memory and wait for.

    Attributes:
        staging_bytes: entries on their way to the device; room for more than one of the largest size. Taken from the
            system only as it is used.
        reads_max: reads on their way, all sessions together. One tenant has at most half of either (I10: a flood of
            one is no stall for another).
        read_s: how long a get waits for the device before what has not come is a miss.
    """

    staging_bytes: int = 128 * MIB
    reads_max: int = 1024
    read_s: float = 2.0


@dataclass(slots=True, eq=False)
class _Staged:
    """A record in staging memory; ``relocate`` if it is the new copy of an entry."""

    append: Append
    record: Record
    offset: ArenaOffset
    extent_bytes: int
    relocate: Relocate | None = None


class SsdStore:
    """Joins core, tier and disk; use :meth:`recover` before the first command to the core.

    Args:
        workers: where blocking work runs and how it comes back.
    """

    def __init__(
        self,
        core: CacheCore,
        tier: SsdTier,
        *,
        arena: Arena,
        disk: Disk,
        clock: Clock,
        workers: Workers,
        limits: SsdLimits | None = None,
    ) -> None:
        self.tier: Final = tier
        self._core = core
        self._arena = arena
        self._disk = disk
        self._clock = clock
        self._workers = workers
        self._limits = limits or SsdLimits()
        self._staging = Arena(self._limits.staging_bytes)
        self._staging_extents = Extents(self._limits.staging_bytes)
        self._queue: deque[_Staged | SsdAction] = deque()
        #: By tenant: demotions in staging memory, and reads on their way.
        self._staged_bytes: Counter[TenantId] = Counter()
        self._tenant_reads: Counter[TenantId] = Counter()
        self._is_writing = False
        self._is_pumping = False
        self._reads = 0
        self._retry_ns: int | None = None
        self._problem = ""
        self._on_idle: Callable[[], None] | None = None
        self._promotions: dict[tuple[Partition, BlockKey], list[Fetch]] = {}
        self.status = SsdStatus(SsdState.OFF, "not started")
        core.on_evict(self.demote)
        tier.on_action = self._wake

    # ---- start and stop

    def recover(self) -> None:
        """Take over what an earlier process left. Blocks; call it before anything else. Never raises for a bad disk."""
        self.tier.is_writable = False
        try:
            self._disk.files.probe(self._disk.root)
            found = find_segments(self._disk)
        except OSError as error:
            self._tell(SsdState.OFF, f"the folder cannot be used: {error.strerror or error}")
            return
        self.tier.is_writable = True
        adopt(found, self.tier)
        for problem in found.problems:
            _log.warning("ssd tier: found at start", problem=problem)
        if found.problems:
            self._problem = found.problems[0] + (f" (and {len(found.problems) - 1} more)" if found.problems[1:] else "")
        self._tell_health()

    def close(self, on_idle: Callable[[], None]) -> None:
        """Seal open segments, so that the next start is quick, and call ``on_idle`` when nothing is in progress."""
        self.tier.seal_all()
        self._on_idle = on_idle
        self._workers.call_soon(self._pump)

    def release(self) -> None:
        """Close files and give memory back; the workers must have ended."""
        self._disk.close()
        self._staging.close()

    @property
    def is_idle(self) -> bool:
        return not (self._is_writing or self._reads or self._queue or self.tier.actions)

    # ---- demotion

    def demote(self, entry: Entry) -> None:
        """Copy an entry that DRAM is about to lose into staging memory, if the tier takes it."""
        tier, partition, key = self.tier, entry.index.partition, entry.key
        if tier.find(partition, key) is not None:
            return
        now_ns = self._clock.monotonic_ns()
        if self._retry_ns is not None and now_ns >= self._retry_ns:
            self._retry_ns, tier.is_writable = None, True
            self._tell_health()
        owner = tier.tenants.get(partition.tenant)
        if owner is None or not owner.quota.limit_bytes:
            return
        extent_bytes = record_blocks(entry.size_bytes) * BLOCK_BYTES
        has_share = 2 * (self._staged_bytes[partition.tenant] + extent_bytes) <= self._limits.staging_bytes
        offset = self._staging_extents.allocate(extent_bytes) if has_share else None
        if offset is None:
            owner.counters.demotions_dropped += 1
            return
        append = tier.append_start(partition, key, entry.size_bytes, now_ns)
        if append is None:
            self._staging_extents.free(offset, extent_bytes)
            return
        memory = self._staging.view(offset, extent_bytes)
        memory[BLOCK_BYTES : BLOCK_BYTES + entry.size_bytes] = self._arena.view(entry.offset, entry.size_bytes)
        self._staged_bytes[partition.tenant] += extent_bytes
        record = Record(append.block, key, entry.size_bytes, entry.checksum, memory)
        self._stage(_Staged(append, record, offset, extent_bytes))

    # ---- promotion

    def fetch(
        self,
        partition: Partition,
        keys: Sequence[BlockKey],
        pins: list[Pin | None],
        max_sizes: Sequence[int] | None,
    ) -> Fetch | None:
        """Begin to bring what ``pins`` lacks from SSD into DRAM; None if there is nothing to wait for."""
        below = self.tier.index(partition)
        if below is None or not below.entries:
            return None
        fetch = Fetch(partition, pins)
        reads: list[ReadJob] = []
        find = below.entries.get
        for position, key in enumerate(keys):
            if pins[position] is not None:
                continue
            entry = find(key)
            if entry is None or (max_sizes is not None and entry.size_bytes > max_sizes[position]):
                continue
            if key not in fetch.pending:
                if not self._promote(partition, key, fetch, reads):
                    continue
                fetch.pending[key] = []
            fetch.pending[key].append(position)
            fetch.expected_bytes += entry.size_bytes
        self._submit(reads)
        if not fetch.pending:
            return None
        fetch.limit(self._workers.call_later(self._limits.read_s, fetch.give_up))
        return fetch

    def _promote(self, partition: Partition, key: BlockKey, fetch: Fetch, reads: list[ReadJob]) -> bool:
        """Begin one promotion, whose read is added to ``reads``, or join one that is on its way."""
        waiting = self._promotions.get((partition, key))
        if waiting is not None:
            waiting.append(fetch)
            return True
        reads_max, count = self._limits.reads_max, len(reads)
        if self._reads + count >= reads_max or 2 * (self._tenant_reads[partition.tenant] + count) >= reads_max:
            return False
        promotion = self._core.promote_start(partition, key, self._clock.monotonic_ns())
        if promotion is None:
            return False
        self._promotions[partition, key] = [fetch]
        ticket = promotion.ticket
        target = self._arena.view(ticket.offset, round_up(ticket.size_bytes))
        reads.append(
            ReadJob(promotion.read, target, lambda checksum: self._arrived(partition, key, promotion, checksum))
        )
        return True

    def _arrived(self, partition: Partition, key: BlockKey, promotion: Promotion, checksum: int | None) -> None:
        now_ns = self._clock.monotonic_ns()
        self._core.promote_end(promotion, checksum, now_ns)
        for fetch in self._promotions.pop((partition, key)):
            fetch.arrive(key, lambda: self._core.promote_pin(partition, key, now_ns))
        self._tell_if_idle()

    def _submit(self, reads: list[ReadJob]) -> None:
        """Hand reads to the workers: those that follow each other on the device in one go."""
        reads.sort(key=lambda one: (one.read.entry.segment.number, one.read.entry.block))
        run: list[ReadJob] = []
        run_bytes = 0
        for one in reads:
            if run and (run_bytes >= _RUN_BYTES or len(run) >= RUN_MAX or not run[-1].is_before(one)):
                self._read(run)
                run, run_bytes = [], 0
            run.append(one)
            run_bytes += len(one.target)
        if run:
            self._read(run)

    def _read(self, run: list[ReadJob]) -> None:
        place = self._place(run[0].read.entry.segment)
        wanted = [
            Wanted(one.read.entry.block, one.read.entry.key, one.read.entry.size_bytes, one.target) for one in run
        ]
        tenant = place.folder.tenant
        self._reads += len(run)
        self._tenant_reads[tenant] += len(run)

        def finish(outcome: list[int | BadFormatError] | Failed) -> None:
            self._reads -= len(run)
            _take(self._tenant_reads, tenant, len(run))
            outcomes = [outcome.error] * len(run) if isinstance(outcome, Failed) else outcome
            for one, result in zip(run, outcomes, strict=True):
                if isinstance(result, int):
                    one.done(result)
                else:
                    self._failed_read(place, result)
                    one.done(None)
            self._tell_if_idle()

        self._workers.read(lambda: self._disk.read(place, wanted), finish)

    # ---- the queue of the writing thread

    def _wake(self) -> None:
        if not self._is_pumping:
            self._is_pumping = True
            self._workers.call_soon(self._pump)

    def _stage(self, staged: _Staged) -> None:
        """Queue a record behind the actions that came before it."""
        self._collect()
        self._queue.append(staged)
        self._wake()

    def _collect(self) -> None:
        actions = self.tier.actions
        while actions:
            action = actions.popleft()
            if isinstance(action, Relocate):
                self._relocate(action)
            else:
                self._queue.append(action)

    def _relocate(self, relocate: Relocate) -> None:
        entry = relocate.entry
        extent_bytes = record_blocks(entry.size_bytes) * BLOCK_BYTES
        offset = self._staging_extents.allocate(extent_bytes) if entry.is_alive else None
        if offset is None:
            self._workers.call_soon(lambda: self.tier.relocate_end(relocate))
            return
        read = self.tier.read_start(entry, relocates=True)
        memory = self._staging.view(offset, extent_bytes)

        def arrived(checksum: int | None) -> None:
            is_good = self.tier.read_end(read, intact=checksum is not None)
            append = self.tier.relocate_append(relocate, self._clock.monotonic_ns()) if is_good else None
            if append is None or checksum is None:
                self._staging_extents.free(offset, extent_bytes)
                self.tier.relocate_end(relocate)
                return
            record = Record(append.block, entry.key, entry.size_bytes, checksum, memory)
            self._stage(_Staged(append, record, offset, extent_bytes, relocate))

        self._read([ReadJob(read, memory[BLOCK_BYTES:], arrived)])

    def _pump(self) -> None:
        """Hand the writing thread its next job, if it has none."""
        self._is_pumping = False
        self._collect()
        if self._is_writing:
            return
        if not self._queue:
            self._tell_if_idle()
            return
        job: list[_Staged | SsdAction] = []
        job_bytes = 0
        while self._queue and job_bytes < _JOB_BYTES:
            item = self._queue.popleft()
            job.append(item)
            job_bytes += item.extent_bytes if isinstance(item, _Staged) else BLOCK_BYTES
        steps = self._plan(job)
        self._is_writing = True
        self._workers.write(lambda: [_attempt(step) for step, _ in steps], lambda outcome: self._done(steps, outcome))

    def _plan(self, job: Sequence[_Staged | SsdAction]) -> list[tuple[Callable[[], None], list[_Staged | SsdAction]]]:
        """Steps of a job: records that follow each other in file and memory become one write."""
        steps: list[tuple[Callable[[], None], list[_Staged | SsdAction]]] = []
        run: list[_Staged] = []
        for item in job:
            if isinstance(item, _Staged):
                if run and not _follows(run[-1], item):
                    steps.append(self._write_step(run))
                    run = []
                run.append(item)
                continue
            if run:
                steps.append(self._write_step(run))
                run = []
            steps.append((self._action_step(item), [item]))
        if run:
            steps.append(self._write_step(run))
        return steps

    def _write_step(self, run: list[_Staged]) -> tuple[Callable[[], None], list[_Staged | SsdAction]]:
        place = self._place(run[0].append.segment)
        records = [staged.record for staged in run]
        memory = self._staging.view(run[0].offset, sum(staged.extent_bytes for staged in run))
        return lambda: self._disk.write_records(place, records, memory), cast("list[_Staged | SsdAction]", run)

    def _action_step(self, action: SsdAction) -> Callable[[], None]:
        disk = self._disk
        if isinstance(action, DestroyKey):
            folder = self._folder(action.partition)
            return lambda: disk.destroy_key(folder)
        assert not isinstance(action, Relocate)
        place = self._place(action.segment)
        if isinstance(action, Bury):
            return lambda: disk.write_tombstones(place, action.block, action.keys)
        if isinstance(action, Seal):
            return lambda: disk.seal(place, action.end_block, action.rows, action.tombstones)
        return lambda: disk.drop(place)

    def _done(
        self,
        steps: Sequence[tuple[Callable[[], None], list[_Staged | SsdAction]]],
        outcome: list[Exception | None] | Failed,
    ) -> None:
        self._is_writing = False
        errors = [outcome.error] * len(steps) if isinstance(outcome, Failed) else outcome
        for (_, items), error in zip(steps, errors, strict=True):
            if error is not None and not isinstance(error, SegmentClosedError):
                self._failed_write(error)
            for item in items:
                self._answer(item, written=error is None)
        self._pump()

    def _answer(self, item: _Staged | SsdAction, *, written: bool) -> None:
        tier = self.tier
        if isinstance(item, _Staged):
            self._staging_extents.free(item.offset, item.extent_bytes)
            if item.relocate is None:
                _take(self._staged_bytes, item.append.segment.partition.owner.tenant, item.extent_bytes)
            tier.append_end(item.append, written=written)
            if item.relocate is not None:
                tier.relocate_end(item.relocate)
        elif isinstance(item, Bury):
            tier.bury_end(item, written=written)
        elif isinstance(item, Seal):
            tier.seal_end(item, written=written)
        elif isinstance(item, DropSegment):
            tier.drop_end(item, removed=written)
        elif isinstance(item, DestroyKey) and not written:
            self._workers.call_later(_RETRY_S, lambda: self._ask_again(item))

    def _ask_again(self, action: DestroyKey) -> None:
        """I12: a key that could not be destroyed is tried until it is; a new process tries at its first policy."""
        self._queue.append(action)
        self._wake()

    # ---- places

    @staticmethod
    def _folder(partition: SsdPartition) -> Folder:
        return Folder(partition.owner.tenant, partition.number, partition.namespace_uid, partition.epoch)

    def _place(self, segment: SegmentBooks) -> SegmentPath:
        return SegmentPath(self._folder(segment.partition), segment.number)

    # ---- state

    def _failed_write(self, error: Exception) -> None:
        """The device takes no more: serve what is there, and try again later."""
        code = error.errno if isinstance(error, OSError) else None
        reason = "the device is full" if code in _FULL else f"a write failed: {error}"
        self.tier.is_writable = False
        self._retry_ns = self._clock.monotonic_ns() + int(_RETRY_S * 1e9)
        self._tell(SsdState.READ_ONLY, reason)

    def _failed_read(self, place: SegmentPath, error: Exception) -> None:
        if isinstance(error, BadFormatError) and place not in self._disk.ciphers:
            return  # dropped meanwhile
        self._problem = f"{self._disk.path(place)}: {error}"
        if self.status.state is SsdState.OK:
            self._tell(SsdState.DEGRADED, self._problem)

    def _tell_health(self) -> None:
        self._tell(SsdState.DEGRADED if self._problem else SsdState.OK, self._problem)

    def _tell(self, state: SsdState, reason: str) -> None:
        changed = state is not self.status.state
        self.status = SsdStatus(state, reason, self._disk.files.is_direct)
        if changed:
            _log.log(20 if state is SsdState.OK else 30, "ssd tier", state=state.value, reason=reason)

    def _tell_if_idle(self) -> None:
        if self._on_idle is not None and self.is_idle:
            callback, self._on_idle = self._on_idle, None
            callback()


def _take(counts: Counter[TenantId], tenant: TenantId, amount: int) -> None:
    """Take ``amount`` off and keep no record of a tenant that has nothing."""
    counts[tenant] -= amount
    if not counts[tenant]:
        del counts[tenant]


def _follows(earlier: _Staged, later: _Staged) -> bool:
    return (
        earlier.append.segment is later.append.segment
        and earlier.offset + earlier.extent_bytes == later.offset
        and earlier.append.block + earlier.extent_bytes // BLOCK_BYTES == later.append.block
    )


def _attempt(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except (OSError, BadFormatError) as error:
        return error
    return None
