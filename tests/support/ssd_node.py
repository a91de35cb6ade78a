"""Core, SSD tier and files of a node without its doors; work runs when a test says so, and files fail when told to."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dataplane.core.admission import open_partition
from dataplane.core.cache import CacheCore
from dataplane.core.entry import PutRefused
from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES
from dataplane.core.ssd_tier import SsdTier
from dataplane.io.arena import Arena
from dataplane.io.clock import Clock
from dataplane.io.engines.objects import ObjectEngine, ObjectStore
from dataplane.io.ssd import SsdLimits, SsdStore
from dataplane.io.ssd_disk import Disk
from dataplane.io.ssd_files import Files
from dataplane.io.ssd_keys import load_node_key
from dataplane.io.ssd_outdated import OutdatedPartitions
from dataplane.io.ssd_places import place_of
from dataplane.io.workers import Failed
from saltern import wire
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import NO_RATE_LIMITS, RateLimits, Tier, TierQuota

T = TypeVar("T")
KIB = 1024
MIB = 1024 * 1024


class Crash(BaseException):
    """The process is killed here."""


class Steps:
    """Workers that do nothing until :meth:`step`: reads and writes in one queue, callbacks in order."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()
        self.calls: deque[Callable[[], None]] = deque()
        self.timers: list[Callable[[], None]] = []

    def write(self, work: Callable[[], T], done: Callable[[T | Failed], None]) -> None:
        def job() -> None:
            try:
                outcome: T | Failed = work()
            except Exception as error:
                outcome = Failed(error)
            done(outcome)

        self.jobs.append(job)

    read = write

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.calls.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        self.timers.append(callback)
        return lambda: self.timers.remove(callback) if callback in self.timers else None

    def step(self) -> bool:
        """Run everything that waits for the loop, then one job; False if there was nothing at all."""
        did = False
        while self.calls:
            self.calls.popleft()()
            did = True
        if self.jobs:
            self.jobs.popleft()()
            return True
        return did

    def drain(self) -> None:
        while self.step():
            pass


class FaultyFiles(Files):
    """Real files that fail on demand and know what a loss of power would take.

    Attributes:
        write_faults, read_faults: taken from the left, one for each operation; None for none. Writes: an errno, or
            "short". Reads: an errno, or "flip".
        sync_faults: the same for making a segment durable, which then is not.
        syncs: segments in the order in which that was tried.
        crash_in: the process dies in the middle of this many operations from now that change files; None for never.
        unsynced: for each file, the spans written since its last sync.
    """

    def __init__(self) -> None:
        self.write_faults: deque[int | str | None] = deque()
        self.read_faults: deque[int | str | None] = deque()
        self.sync_faults: deque[int | str | None] = deque()
        self.syncs: list[Path] = []
        self.crash_in: int | None = None
        self.unsynced: dict[Path, list[tuple[int, int]]] = {}
        self.open_descriptors: set[int] = set()

    def probe(self, folder: Path) -> None:
        self._count()

    def create(self, path: Path) -> int:
        self._count()
        self._fault()
        return super().create(path)

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        path = path_of(descriptor)
        half = len(data) // 2 // 512 * 512
        try:
            self._count()
            fault = self._next(self.write_faults)
        except Crash:
            super_write(descriptor, data[:half], offset)
            self.unsynced.setdefault(path, []).append((offset, half))
            raise
        if fault == "short":
            super_write(descriptor, data[:half], offset)
            raise OSError(errno.EIO, "short write")
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        super().write_at(descriptor, data, offset)
        self.unsynced.setdefault(path, []).append((offset, len(data)))

    def read_at(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        fault = self._next(self.read_faults)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        count = super().read_at(descriptor, views, offset)
        if fault == "flip":
            views[-1][0] ^= 1
        return count

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        self._count()
        self._fault()
        super().truncate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        self._count()
        self._fault()
        self.syncs.append(path_of(descriptor))
        fault = self._next(self.sync_faults)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        super().sync(descriptor)
        self.unsynced.pop(path_of(descriptor), None)

    def unlink(self, path: Path) -> None:
        self._count()
        self._fault()
        super().unlink(path)
        self.unsynced.pop(path, None)

    def write_small(self, path: Path, content: bytes) -> None:
        self._count()
        self._fault()
        super().write_small(path, content)

    def destroy_small(self, path: Path) -> None:
        if self.crash_in == 1 and path.exists():
            path.write_bytes(bytes(path.stat().st_size))  # dies between overwriting and removing
        self._count()
        self._fault()
        super().destroy_small(path)

    def lose_power(self, keep: Callable[[int], int]) -> None:
        """Drop or tear what was not synced: of each span of n bytes, ``keep(n)`` stay and the rest is zero."""
        for path, spans in self.unsynced.items():
            if not path.exists():
                continue
            with path.open("r+b") as file:
                for offset, length in spans:
                    kept = min(keep(length), length)
                    file.seek(offset + kept)
                    file.write(bytes(length - kept))
        self.unsynced.clear()

    def _count(self) -> None:
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in <= 0:
                raise Crash

    def _fault(self) -> None:
        fault = self._next(self.write_faults)
        if fault is not None:
            code = fault if isinstance(fault, int) else errno.EIO
            raise OSError(code, os.strerror(code))

    @staticmethod
    def _next(faults: deque[int | str | None]) -> int | str | None:
        return faults.popleft() if faults else None


def path_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def super_write(descriptor: int, data: memoryview, offset: int) -> None:
    if len(data):
        os.pwrite(descriptor, data, offset)


def policy_of(
    version: int,
    quotas: dict[str, tuple[TierQuota, TierQuota]],
    *,
    epochs: tuple[int, ...] = (1,),
    uid: str = "uid-1",
    block_bytes: int = MIB,
    rates: RateLimits = NO_RATE_LIMITS,
) -> NodePolicy:
    """Tenants by name with their (DRAM, SSD) quotas, each with one namespace ``ns``."""
    return NodePolicy(
        version,
        {
            TenantId(name): TenantPolicy(
                TenantState.ACTIVE,
                {Tier.DRAM: dram, Tier.SSD: ssd},
                {NamespaceId("ns"): NamespacePolicy(uid, block_bytes, epochs)},
                rates=rates,
            )
            for name, (dram, ssd) in quotas.items()
        },
    )


class SsdNode:
    """One life of a node's tiers over a folder that outlives it, and over a store of objects if there is one."""

    def __init__(
        self,
        folder: Path,
        *,
        dram_bytes: int,
        ssd_bytes: int,
        files: Files | None = None,
        staging_bytes: int = 4 * MIB,
        segment_min_bytes: int = 64 * KIB,
        write_bytes_per_s: int = 0,
        objects: ObjectStore | None = None,
    ) -> None:
        self.now_ns = 1
        self.workers = Steps()
        self.files = files or FaultyFiles()
        self.tier = SsdTier(ssd_bytes, segment_min_bytes=segment_min_bytes, write_bytes_per_s=write_bytes_per_s)
        self.core = CacheCore(dram_bytes, ssd=self.tier)
        self.arena = Arena(dram_bytes)
        folder.mkdir(exist_ok=True)
        self.root = folder / "ssd"
        node_key = load_node_key(folder, Files())
        self.disk = (
            Disk(self.root, node_key, self.files)
            if objects is None
            else ObjectEngine(self.root, node_key, objects, self.files)
        )
        self.store = SsdStore(
            self.core,
            self.tier,
            arena=self.arena,
            disk=self.disk,
            clock=Clock(self.tick, lambda: self.now_ns / 1e9),
            workers=self.workers,
            outdated=OutdatedPartitions(folder),
            limits=SsdLimits(staging_bytes),
        )

    def tick(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def pass_time(self, seconds: int) -> None:
        """Let time pass, and everything that waits for it happen."""
        self.now_ns += seconds * 1_000_000_000
        timers, self.workers.timers = self.workers.timers, []
        for timer in timers:
            timer()

    def recover(self) -> SsdNode:
        self.store.recover()
        return self

    def apply(self, policy: NodePolicy) -> None:
        self.core.apply_policy(policy, self.tick())

    def partition(self, tenant: str, epoch: int = 1) -> Partition:
        namespace = NamespaceId("ns")
        return open_partition(
            self.core.policy,
            claims_tenant=TenantId(tenant),
            claims_namespace=namespace,
            requested_namespace=namespace,
            epoch=epoch,
        )

    def put(self, partition: Partition, key: BlockKey, value: bytes) -> str:
        """Put and commit; return "" or the reason of the refusal."""
        outcome = self.core.put_start(partition, key, len(value), self.tick())
        if isinstance(outcome, PutRefused):
            return outcome.error.reason
        self.arena.view(outcome.offset, len(value))[:] = value
        refused = self.core.put_commit(outcome, wire.checksum(value), self.tick())
        return refused.error.reason if refused else ""

    def get(self, partition: Partition, *keys: BlockKey) -> list[bytes | None]:
        """Read from both tiers, running jobs until everything has come."""
        pins = self.core.get_start(partition, keys, self.tick(), counts_misses=False)
        fetch = self.store.fetch(partition, keys, pins, None)
        while fetch is not None and not fetch.is_done:
            assert self.workers.step(), "the fetch waits for nothing"
        if fetch is not None:
            fetch.close()
        values = []
        for pin in pins:
            value = None if pin is None else bytes(self.arena.view(pin.offset, pin.size_bytes))
            assert pin is None or value is None or wire.checksum(value) == pin.checksum
            values.append(value)
        self.core.get_end(pins)
        return values

    def found(self, partition: Partition, keys: Sequence[BlockKey]) -> bytes:
        return self.core.lookup(partition, keys)[1]

    def file_bytes(self, tenant: str) -> int:
        """What the tenant's segments take on disk."""
        return sum(path.stat().st_size for path in (self.root / tenant).rglob("*.seg"))

    def used_bytes(self, tenant: str) -> int:
        owner = self.tier.tenants.get(TenantId(tenant))
        return owner.used_bytes if owner else 0

    def stop(self) -> None:
        """Stop cleanly."""
        idle: list[Any] = []
        self.store.close(lambda: idle.append(True))
        self.workers.drain()
        assert idle
        self.release()

    def release(self) -> None:
        """Give everything back as the kernel does when a process is killed: nothing more is written."""
        self.store.release()
        self.arena.close()

    def check(self) -> None:
        """Books against each other, and against the files."""
        self.core.check_invariants()
        for tenant, owner in self.tier.tenants.items():
            known = owner.used_bytes + self.tier.unusable_bytes
            assert self.file_bytes(tenant) <= known, "I4: more bytes on disk than are charged"
            assert owner.used_bytes % BLOCK_BYTES == 0

    def check_files(self) -> None:
        """After everything was done: exactly the files that the books name, each as long as it is charged (I8)."""
        named = {
            self.disk.path(place_of(segment)): segment.charged_bytes
            for owner in self.tier.tenants.values()
            for segment in owner.segments.values()
            if segment.next_block > 1
        }
        there = {path: path.stat().st_size for path in self.root.rglob("*.seg")}
        assert there.keys() <= named.keys(), "an orphan file"
        assert all(there[path] <= named[path] for path in there)
