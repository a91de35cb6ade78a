"""The SSD tier of a running node: carries bytes between arena and files as the core decides, on worker threads.

::

    CacheCore --evicts--> SsdStore.demote: seal into staging --> Writer: write --> SsdTier.append_end
    GetBatch  --misses--> SsdStore.fetch --> Reader: read, open --> CacheCore.promote_end, pins

Everything but the workers' jobs runs on the event loop. Nothing waits for the device but a get that has misses in DRAM
and hits on SSD: a demotion that finds no staging memory is dropped and counted, a read that finds the queue full or
takes too long is a miss (I10). Any fault of the device ends in a state that is told, never in wrong bytes (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from dataplane.core.cache import CacheCore
from dataplane.core.entry import Entry, Pin
from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES, record_blocks
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.usage import DropReason
from dataplane.io.arena import Arena
from dataplane.io.clock import Clock
from dataplane.io.ssd_disk import Disk
from dataplane.io.ssd_fetch import Fetch
from dataplane.io.ssd_health import Health, SsdState, SsdStatus
from dataplane.io.ssd_outdated import OutdatedPartitions
from dataplane.io.ssd_places import place_of
from dataplane.io.ssd_reader import Reader
from dataplane.io.ssd_recovery import adopt, discard_outdated, find_segments
from dataplane.io.ssd_staging import Staging
from dataplane.io.ssd_writer import Staged, Writer
from dataplane.io.workers import Workers
from saltern.keys import BlockKey

__all__ = ["SsdLimits", "SsdState", "SsdStatus", "SsdStore"]

_log = structlog.get_logger(__name__)
MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SsdLimits:
    """Bounds on what the tier may hold in memory and wait for.

    Attributes:
        staging_bytes: entries on their way to the device; room for more than one of the largest size.
        prefault: take that memory from the system at the start. Without it the event loop pays for every page that is
            used for the first time, milliseconds where the system has to find huge pages.
        reads_max: reads on their way, all sessions together. One tenant has at most half of either (I10: a flood of
            one is no stall for another).
        read_s: how long a get waits for the device before what has not come is a miss.
    """

    staging_bytes: int = 128 * MIB
    prefault: bool = False
    reads_max: int = 1024
    read_s: float = 2.0


class SsdStore:
    """Joins core, tier and disk; use :meth:`recover` before the first command to the core.

    Args:
        workers: where blocking work runs and how it comes back.
        outdated: what was deleted while an earlier process could not read the folder.
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
        outdated: OutdatedPartitions,
        limits: SsdLimits | None = None,
    ) -> None:
        limits = limits or SsdLimits()
        self.tier: Final = tier
        self._arena = arena
        self._disk = disk
        self._outdated = outdated
        self._clock = clock
        self._workers = workers
        self._staging = Staging(limits.staging_bytes, prefault=limits.prefault)
        self._health = Health(tier, clock, workers)
        self._reader = Reader(
            core,
            tier,
            arena=arena,
            disk=disk,
            clock=clock,
            workers=workers,
            health=self._health,
            reads_max=limits.reads_max,
            read_s=limits.read_s,
            on_progress=self._tell_if_idle,
        )
        self._writer = Writer(
            tier,
            disk=disk,
            staging=self._staging,
            clock=clock,
            workers=workers,
            health=self._health,
            reader=self._reader,
            outdated=outdated,
            on_progress=self._tell_if_idle,
        )
        self._on_idle: Callable[[], None] | None = None
        core.on_evict(self.demote)
        tier.on_action = self._writer.wake

    # ---- start and stop

    def recover(self) -> None:
        """Take over what an earlier process left. Blocks; call it before anything else. Never raises for a bad disk."""
        try:
            self._disk.files.probe(self._disk.root)
            found = find_segments(self._disk)
            discard_outdated(self._disk, found, self._outdated.all())
            self._outdated.clear()
        except OSError as error:
            self._health.unusable(f"the folder cannot be used: {error.strerror or error}")
            return
        except ValueError:
            self._health.unusable(f"{self._outdated.path} is damaged: what was deleted meanwhile is not known")
            return
        adopt(found, self.tier)
        for problem in found.problems:
            _log.warning("ssd tier: found at start", problem=problem)
        self._health.started(found.problems)
        try:
            self._disk.check()
        except OSError as error:
            self._health.write_failed(error)

    def try_again(self) -> None:
        """Whoever keeps the records can be reached again: try at once what would be tried after a while."""
        self._health.try_again()
        self._writer.remove_again()

    def close(self, on_idle: Callable[[], None]) -> None:
        """Seal open segments, so that the next start is quick, and call ``on_idle`` when nothing is in progress."""
        self._writer.remove_again()
        self.tier.seal_all()
        self._on_idle = on_idle
        self._writer.wake()

    def release(self) -> None:
        """Close files and give memory back; the workers must have ended."""
        self._disk.close()
        self._staging.close()

    @property
    def is_idle(self) -> bool:
        return not (self._writer.queued or self._reader.in_progress)

    @property
    def status(self) -> SsdStatus:
        """How the tier fares at this moment."""
        health, tier = self._health, self.tier
        health.look()
        return SsdStatus(
            state=health.state,
            reason=health.reason,
            is_direct=self._disk.files.is_direct,
            since_unix_s=health.since_unix_s,
            capacity_bytes=tier.capacity_bytes,
            used_bytes=tier.used_bytes,
            unusable_bytes=tier.unusable_bytes,
            staging_bytes=self._staging.capacity_bytes,
            staged_bytes=self._staging.used_bytes,
            queued_writes=self._writer.queued,
            reads_in_progress=self._reader.in_progress,
            write_errors=health.write_errors,
            read_errors=health.read_errors,
        )

    # ---- demotion and promotion

    def demote(self, entry: Entry) -> None:
        """Seal an entry that DRAM is about to lose into staging memory, if the tier takes it."""
        tier, partition, key = self.tier, entry.index.partition, entry.key
        if not tier.wants(partition, key):
            return
        slot = self._staging.take(record_blocks(entry.size_bytes) * BLOCK_BYTES, partition.tenant)
        if slot is None:
            tier.drop(partition, DropReason.NO_STAGING)
            return
        append = tier.append_start(partition, key, entry.size_bytes, self._clock.monotonic_ns())
        if append is None:
            self._staging.give_back(slot)
            return
        payload = self._arena.view(entry.offset, entry.size_bytes)
        cipher = self._disk.cipher(place_of(append.segment))
        cipher.seal_record(slot.memory, append.block, key, payload, entry.checksum)
        self._writer.stage(Staged(append, slot))

    def fetch(
        self,
        partition: Partition,
        keys: Sequence[BlockKey],
        pins: list[Pin | None],
        max_sizes: Sequence[int] | None,
    ) -> Fetch | None:
        """Begin to bring what ``pins`` lacks from SSD into DRAM; None if there is nothing to wait for."""
        return self._reader.fetch(partition, keys, pins, max_sizes)

    def _tell_if_idle(self) -> None:
        if self._on_idle is not None and self.is_idle:
            callback, self._on_idle = self._on_idle, None
            callback()
