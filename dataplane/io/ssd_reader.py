"""Promotion: what a get misses in DRAM is read from SSD straight into the arena, on reading threads.

::

    fetch --> promote_start --> [reading thread: read in place, open in place] --> promote_end --> pins of the get

Two gets of one entry share its read. A read that finds the queue full, and one that takes too long, is a miss (I10).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from dataplane.core.cache import CacheCore
from dataplane.core.entry import Pin, Promotion
from dataplane.core.extents import round_up
from dataplane.core.partition import Partition
from dataplane.core.segments import BadFormatError, GoneError
from dataplane.core.ssd_tier import SsdTier
from dataplane.io.arena import Arena
from dataplane.io.clock import Clock
from dataplane.io.engines import ByteEngine
from dataplane.io.ssd_disk import RUN_MAX, Wanted
from dataplane.io.ssd_fetch import Fetch, ReadJob
from dataplane.io.ssd_health import Health
from dataplane.io.ssd_places import SegmentPath, place_of
from dataplane.io.ssd_staging import take_off
from dataplane.io.workers import Failed, Workers
from saltern.keys import BlockKey
from saltern.names import TenantId

_NS: Final = 1_000_000_000


class Reader:
    """Reads records for gets and for relocations. Everything but the reading itself runs on the event loop.

    Args:
        reads_max: records on their way, all sessions together; one tenant has at most half of them (I10).
        read_s: how long a get waits before what has not come is a miss.
    """

    def __init__(
        self,
        core: CacheCore,
        tier: SsdTier,
        *,
        arena: Arena,
        disk: ByteEngine,
        clock: Clock,
        workers: Workers,
        health: Health,
        reads_max: int,
        read_s: float,
        on_progress: Callable[[], None],
    ) -> None:
        self.in_progress = 0
        self._core = core
        self._tier = tier
        self._arena = arena
        self._disk = disk
        self._clock = clock
        self._workers = workers
        self._health = health
        self._reads_max = reads_max
        self._read_s = read_s
        self._on_progress = on_progress
        self._tenant_reads: Counter[TenantId] = Counter()
        self._promotions: dict[tuple[Partition, BlockKey], list[Fetch]] = {}
        #: When a read last finished, or the first of those in progress began.
        self._progress_ns = 0

    def fetch(
        self,
        partition: Partition,
        keys: Sequence[BlockKey],
        pins: list[Pin | None],
        max_sizes: Sequence[int] | None,
    ) -> Fetch | None:
        """Begin to bring what ``pins`` lacks from SSD into DRAM; None if there is nothing to wait for."""
        fetch = Fetch(partition, pins)
        reads: list[ReadJob] = []
        for source in self._core.sources(partition, self._clock.monotonic_ns()):
            self._fetch_from(source, keys, max_sizes, fetch, reads)
        self._submit(reads)
        if not fetch.pending:
            return None
        fetch.limit(self._workers.call_later(self._read_s, lambda: self._give_up(fetch)))
        return fetch

    def _fetch_from(
        self,
        source: Partition,
        keys: Sequence[BlockKey],
        max_sizes: Sequence[int] | None,
        fetch: Fetch,
        reads: list[ReadJob],
    ) -> None:
        """Begin to bring what ``source`` has of a get's missing keys."""
        below = self._tier.index(source)
        if below is None or not below.entries:
            return
        find, pins, earlier = below.entries.get, fetch.pins, frozenset(fetch.pending)
        for position, key in enumerate(keys):
            if pins[position] is not None or key in earlier:
                continue
            entry = find(key)
            if entry is None or (max_sizes is not None and entry.size_bytes > max_sizes[position]):
                continue
            if key not in fetch.pending:
                if not self._promote(fetch.partition, source, key, fetch, reads):
                    continue
                fetch.pending[key] = []
            fetch.pending[key].append(position)
            fetch.expected_bytes += entry.size_bytes

    def _promote(
        self, partition: Partition, source: Partition, key: BlockKey, fetch: Fetch, reads: list[ReadJob]
    ) -> bool:
        """Begin one promotion, whose read is added to ``reads``, or join one that is on its way."""
        waiting = self._promotions.get((partition, key))
        if waiting is not None:
            waiting.append(fetch)
            return True
        reads_max, count = self._reads_max, len(reads)
        if self.in_progress + count >= reads_max or 2 * (self._tenant_reads[partition.tenant] + count) >= reads_max:
            return False
        promotion = self._core.promote_start(partition, key, self._clock.monotonic_ns(), source=source)
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

    def _give_up(self, fetch: Fetch) -> None:
        """What has not come by now is a miss (I10); if nothing comes at all, nothing more is promised."""
        if self.in_progress and self._clock.monotonic_ns() >= self._progress_ns + int(self._read_s * _NS):
            self._health.read_stalled()
        fetch.give_up()

    def _submit(self, reads: list[ReadJob]) -> None:
        """Hand reads to the workers: those that follow each other on the device in one go."""
        reads.sort(key=lambda one: (one.read.entry.segment.number, one.read.entry.block))
        run: list[ReadJob] = []
        run_bytes = 0
        for one in reads:
            if run and (run_bytes >= self._disk.run_bytes or len(run) >= RUN_MAX or not run[-1].is_before(one)):
                self.read(run)
                run, run_bytes = [], 0
            run.append(one)
            run_bytes += len(one.target)
        if run:
            self.read(run)

    def read(self, run: Sequence[ReadJob]) -> None:
        """Read records that follow each other on the device; each is told what came of it, later."""
        place = place_of(run[0].read.entry.segment)
        wanted = [
            Wanted(one.read.entry.block, one.read.entry.key, one.read.entry.size_bytes, one.target) for one in run
        ]
        tenant = run[0].read.reader
        if not self.in_progress:
            self._progress_ns = self._clock.monotonic_ns()
        self.in_progress += len(run)
        self._tenant_reads[tenant] += len(run)

        def finish(outcome: list[int | Exception] | Failed) -> None:
            self.in_progress -= len(run)
            take_off(self._tenant_reads, tenant, len(run))
            self._progress_ns = self._clock.monotonic_ns()
            outcomes = [outcome.error] * len(run) if isinstance(outcome, Failed) else outcome
            for one, result in zip(run, outcomes, strict=True):
                if isinstance(result, int):
                    self._health.read_succeeded()
                    one.done(result)
                else:
                    self._failed(place, result)
                    one.done(None)
            self._on_progress()

        self._workers.read(lambda: self._disk.read(place, wanted), finish)

    def _failed(self, place: SegmentPath, error: Exception) -> None:
        if isinstance(error, BadFormatError) and place not in self._disk.ciphers:
            return  # dropped meanwhile
        if isinstance(error, GoneError):
            self._health.read_succeeded()  # it was asked, and has answered
            return
        self._health.read_failed(f"{self._disk.path(place)}: {error}", by_device=not isinstance(error, BadFormatError))
