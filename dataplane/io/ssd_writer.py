"""The queue of the writing thread: records and file work, strictly in the order in which the tier handed them out.

::

    stage(record) --+--> queue --> job of about 8 MiB --> [thread: write | footer, sync | remove] --> answers
    tier.actions ---+    a hot entry that is written anew is read first, and then staged as any other

Jobs run one after the other on one thread: a file is dropped only after every record admitted to it was answered, and a
footer is written only when all its records are on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from dataplane.core.segments import BLOCK_BYTES, BadFormatError, record_blocks
from dataplane.core.ssd_books import (
    Append,
    Bury,
    DestroyKey,
    DropSegment,
    Outdate,
    Relocate,
    Seal,
    SegmentBooks,
    SsdAction,
    SsdPartition,
)
from dataplane.core.ssd_tier import SsdTier
from dataplane.io.clock import Clock
from dataplane.io.engines import ByteEngine
from dataplane.io.ssd_disk import NotDurableError, SegmentClosedError
from dataplane.io.ssd_fetch import ReadJob
from dataplane.io.ssd_health import RETRY_S, Health
from dataplane.io.ssd_outdated import OutdatedPartitions
from dataplane.io.ssd_places import SegmentPath, folder_of, place_of
from dataplane.io.ssd_reader import Reader
from dataplane.io.ssd_staging import Slot, Staging
from dataplane.io.workers import Failed, Workers

#: One job of the writing thread takes about this much.
_JOB_BYTES: Final = 8 * 1024 * 1024
#: Jobs with the thread, so that it need not wait for the event loop between two of them.
_JOBS_MAX: Final = 2


@dataclass(slots=True, eq=False)
class Staged:
    """A sealed record in staging memory; ``relocate`` if it is the new copy of an entry."""

    append: Append
    slot: Slot
    relocate: Relocate | None = None

    def is_before(self, other: Staged) -> bool:
        """Whether ``other`` follows right after this, in memory and in the file."""
        mine, its = self.append, other.append
        return (
            mine.segment is its.segment
            and mine.block + self.slot.extent_bytes // BLOCK_BYTES == its.block
            and self.slot.is_before(other.slot)
        )


Item: TypeAlias = Staged | SsdAction
Step: TypeAlias = tuple[Callable[[], None], list[Item]]  #: work for the thread, and what it answers


class Writer:
    """Feeds the writing thread and answers the tier. Everything but the jobs runs on the event loop."""

    def __init__(
        self,
        tier: SsdTier,
        *,
        disk: ByteEngine,
        staging: Staging,
        clock: Clock,
        workers: Workers,
        health: Health,
        reader: Reader,
        outdated: OutdatedPartitions,
        on_progress: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._disk = disk
        self._outdated = outdated
        self._staging = staging
        self._clock = clock
        self._workers = workers
        self._health = health
        self._reader = reader
        self._on_progress = on_progress
        self._queue: deque[Item] = deque()
        self._jobs = 0
        self._in_jobs = 0
        self._is_pumping = False
        #: Segments and keys whose removal failed, until it succeeds.
        self._unremoved: dict[SegmentBooks | SsdPartition, DropSegment | DestroyKey] = {}
        self._is_retry_due = False

    @property
    def queued(self) -> int:
        """Records and actions that are not answered yet."""
        return len(self._queue) + self._in_jobs + len(self._tier.actions)

    def wake(self) -> None:
        """Look soon whether there is something to do."""
        if not self._is_pumping:
            self._is_pumping = True
            self._workers.call_soon(self._pump)

    def remove_again(self) -> None:
        """Try once more to remove what could not be removed, without waiting for the next time that is due."""
        for action in self._unremoved.values():
            if isinstance(action, DropSegment):
                self._tier.drop_again(action)
            elif action not in self._queue:
                self._queue.append(action)
        self.wake()

    def stage(self, staged: Staged) -> None:
        """Queue a record behind the actions that came before it."""
        self._collect()
        self._queue.append(staged)
        self.wake()

    def _collect(self) -> None:
        actions = self._tier.actions
        while actions:
            action = actions.popleft()
            if isinstance(action, Relocate):
                self._relocate(action)
            else:
                self._queue.append(action)

    def _relocate(self, relocate: Relocate) -> None:
        entry, tier = relocate.entry, self._tier
        slot = self._staging.take(record_blocks(entry.size_bytes) * BLOCK_BYTES, None) if entry.is_alive else None
        if slot is None:
            self._workers.call_soon(lambda: tier.relocate_end(relocate))
            return
        read = tier.read_start(entry, relocates=True)

        def arrived(checksum: int | None) -> None:
            is_good = tier.read_end(read, intact=checksum is not None)
            append = tier.relocate_append(relocate, self._clock.monotonic_ns()) if is_good else None
            if append is None or checksum is None:
                self._staging.give_back(slot)
                tier.relocate_end(relocate)
                return
            cipher = self._disk.cipher(place_of(append.segment))
            payload = slot.memory[BLOCK_BYTES : BLOCK_BYTES + entry.size_bytes]
            cipher.seal_record(slot.memory, append.block, entry.key, payload, checksum)
            self.stage(Staged(append, slot, relocate))

        self._reader.read([ReadJob(read, slot.memory[BLOCK_BYTES:], arrived)])

    def _pump(self) -> None:
        """Keep the writing thread busy: one job in its hands and one that waits for it."""
        self._is_pumping = False
        self._collect()
        while self._queue and self._jobs < _JOBS_MAX:
            job: list[Item] = []
            job_bytes = 0
            while self._queue and job_bytes < _JOB_BYTES:
                item = self._queue.popleft()
                job.append(item)
                job_bytes += item.slot.extent_bytes if isinstance(item, Staged) else BLOCK_BYTES
            self._begin(self._plan(job), len(job))
        if not self._jobs:
            self._on_progress()

    def _begin(self, steps: list[Step], items: int) -> None:
        self._jobs += 1
        self._in_jobs += items

        def done(outcome: list[Exception | None] | Failed) -> None:
            self._jobs -= 1
            self._in_jobs -= items
            self._done(steps, outcome)

        self._workers.write(lambda: [_attempt(step) for step, _ in steps], done)

    def _plan(self, job: Sequence[Item]) -> list[Step]:
        """Steps of a job: records that follow each other in file and memory become one write."""
        steps: list[Step] = []
        run: list[Staged] = []
        for item in job:
            if run and not (isinstance(item, Staged) and run[-1].is_before(item)):
                steps.append(self._write_step(run))
                run = []
            if isinstance(item, Staged):
                run.append(item)
            else:
                steps.append((self._action_step(item), [item]))
        if run:
            steps.append(self._write_step(run))
        return steps

    def _write_step(self, run: list[Staged]) -> Step:
        place = place_of(run[0].append.segment)
        blocks = [staged.append.block for staged in run]
        memory = self._staging.span(run[0].slot, sum(staged.slot.extent_bytes for staged in run))
        return lambda: self._disk.write_records(place, blocks, memory), cast("list[Item]", run)

    def _action_step(self, action: SsdAction) -> Callable[[], None]:
        disk = self._disk
        if isinstance(action, DestroyKey):
            folder = folder_of(action.partition)
            return lambda: disk.destroy_key(folder)
        if isinstance(action, Outdate):
            return lambda: self._outdated.add(action)
        assert not isinstance(action, Relocate)
        place = place_of(action.segment)
        if isinstance(action, Bury):
            buried = [(place_of(segment), block) for segment, block in action.places]
            return lambda: _bury(disk, action, place, buried)
        if isinstance(action, Seal):
            return lambda: disk.seal(place, action.end_block, action.rows, action.tombstones)
        return lambda: disk.drop(place)

    def _done(self, steps: Sequence[Step], outcome: list[Exception | None] | Failed) -> None:
        errors = [outcome.error] * len(steps) if isinstance(outcome, Failed) else outcome
        for (_, items), error in zip(steps, errors, strict=True):
            if isinstance(items[0], DropSegment | DestroyKey):  # it works on a full device, too
                self._note_removal(items[0], error)
            elif error is None:
                self._health.write_succeeded()
            elif not isinstance(error, SegmentClosedError):
                self._health.write_failed(error)
            for item in items:
                self._answer(item, error)
        self._pump()

    def _answer(self, item: Item, error: Exception | None) -> None:
        tier, written = self._tier, error is None
        if isinstance(item, Staged):
            self._staging.give_back(item.slot)
            tier.append_end(item.append, written=written)
            if item.relocate is not None:
                tier.relocate_end(item.relocate)
        elif isinstance(item, Bury):
            tier.bury_end(item, written=written)
        elif isinstance(item, Seal):
            tier.seal_end(item, written=written, lost=isinstance(error, NotDurableError))
        elif isinstance(item, DropSegment):
            tier.drop_end(item, removed=written)
        elif isinstance(item, Outdate):
            tier.outdate_end(item, written=written)

    def _note_removal(self, action: DropSegment | DestroyKey, error: Exception | None) -> None:
        """I8, I12: what could not be removed is tried until it is; a new process tries at its first policy."""
        subject = action.segment if isinstance(action, DropSegment) else action.partition
        if error is None:
            self._unremoved.pop(subject, None)
            if not self._unremoved:
                self._health.removals_succeeded()
            return
        self._unremoved[subject] = action
        self._health.removal_failed(error)
        self._keep_removing()

    def _keep_removing(self) -> None:
        """See to it that what could not be removed is tried after a while; one timer, however much that is."""
        if self._unremoved and not self._is_retry_due:
            self._is_retry_due = True
            self._workers.call_later(RETRY_S, self._retry_is_due)

    def _retry_is_due(self) -> None:
        self._is_retry_due = False
        self.remove_again()
        self._keep_removing()


def _bury(disk: ByteEngine, bury: Bury, place: SegmentPath, buried: Sequence[tuple[SegmentPath, int]]) -> None:
    disk.write_tombstones(place, bury.block, bury.keys)
    for segment, block in buried:
        disk.erase(segment, block)


def _attempt(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except (OSError, ValueError, BadFormatError) as error:
        return error
    return None
