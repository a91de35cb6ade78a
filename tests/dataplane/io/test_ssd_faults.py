"""The SSD store against a plain model, on a device that fails, in a process that dies at any step (I4, I7, I8, I12)."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.core.partition import Partition
from dataplane.io.ssd import SsdState
from saltern.keys import BlockKey
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_node import KIB, Crash, FaultyFiles, SsdNode, policy_of

TENANTS = ("a", "b")
KEYS = [key_of(number) for number in range(64)]
SIZES = [1, 4096, 5000, 12 * KIB, 40 * KIB]
DRAM_BYTES = 96 * KIB
SSD_BYTES = 512 * KIB
LIMITS = [0, 40 * KIB, 150 * KIB, 300 * KIB, 300 * KIB, 700 * KIB]

Name = tuple[Partition, BlockKey]
#: How many jobs are done after a command; mostly all of them.
jobs_done = st.sampled_from([1000, 1000, 1000, 0, 1, 3])
tenants = st.sampled_from(["a", "a", "a", "b"])
firsts = st.integers(0, len(KEYS) - 1)


class StoreMachine(RuleBasedStateMachine):
    """``latest`` is what was put last; ``known`` all that may come back after a crash; ``gone`` what never may."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="saltern-ssd-"))
        self.version = 0
        self.epoch = 1
        self.count = 0
        self.limits = dict.fromkeys(TENANTS, 300 * KIB)
        self.above: dict[str, int] = {}
        self.latest: dict[Name, bytes | None] = {}
        self.known: dict[Name, set[bytes]] = {}
        self.rots = False
        self.start()

    @initialize(rots=st.booleans())
    def choose(self, rots: bool) -> None:
        """Bits that rot may take anything with them, tombstones too: in half of the runs there is none."""
        self.rots = rots

    # ---- lives

    def start(self) -> None:
        self.node = SsdNode(self.folder, dram_bytes=DRAM_BYTES, ssd_bytes=SSD_BYTES, segment_min_bytes=32 * KIB)
        self.node.recover()
        assert isinstance(self.node.files, FaultyFiles)
        self.files = self.node.files
        if not self.node.workers.calls:  # nothing left to seal or to remove
            there = sum(self.node.file_bytes(tenant) for tenant in TENANTS)
            assert there == self.node.tier.used_bytes + self.node.tier.unusable_bytes, "I8: books after a restart"
        # What was about to be removed is there again.
        self.above = {tenant: self.node.used_bytes(tenant) for tenant in TENANTS}
        self.push()

    def push(self) -> None:
        self.version += 1
        quotas = {
            tenant: (TierQuota(0, DRAM_BYTES), TierQuota(min(limit, 100 * KIB), limit))
            for tenant, limit in self.limits.items()
        }
        self.apply(lambda: self.node.apply(policy_of(self.version, quotas, epochs=(self.epoch,))))
        self.partitions = {tenant: self.node.partition(tenant, self.epoch) for tenant in self.limits}
        live = set(self.partitions.values())
        for name in [name for name in self.known if name[0] not in live]:
            del self.known[name]
            self.latest.pop(name, None)
        for partition in live:
            for key in KEYS:
                if self.node.tier.find(partition, key) is not None:
                    assert self.known.get((partition, key)), "a deleted entry came back"

    def apply(self, command: object) -> None:
        """Run a command; the process may die in it."""
        try:
            command()  # type: ignore[operator]
        except Crash:
            self.restart(power=False)

    def restart(self, *, power: bool, keep: int = 0) -> None:
        self.files.crash_in = None
        self.node.release()
        if power:
            self.files.lose_power(lambda length: keep * length // 8)
        self.latest = {}
        self.start()

    # ---- commands

    @rule(tenant=tenants, first=firsts, count=st.integers(3, 24), size=st.sampled_from(SIZES), jobs=jobs_done)
    def put(self, tenant: str, first: int, count: int, size: int, jobs: int) -> None:
        if tenant not in self.limits:
            return
        if jobs == 1000:
            self.time_passes()
        partition = self.partitions[tenant]
        for number in range(first, first + count):
            name = (partition, KEYS[number % len(KEYS)])
            self.count += 1
            value = (self.count.to_bytes(4, "big") + tenant.encode()) * (size // 5 + 1)
            value = value[: max(size, 5)]
            if not self.node.put(*name, value):
                self.latest[name] = value
                self.known.setdefault(name, set()).add(value)
        self.work(jobs)

    @rule(tenant=tenants, first=firsts, count=st.integers(1, 24))
    def get(self, tenant: str, first: int, count: int) -> None:
        if tenant not in self.limits:
            return
        keys = self.aim(self.partitions[tenant], first, count)

        def read() -> None:
            for key, value in zip(keys, self.node.get(self.partitions[tenant], *keys), strict=True):
                self.judge((self.partitions[tenant], key), value)

        self.apply(read)

    def aim(self, partition: Partition, first: int, count: int) -> list[BlockKey]:
        """Keys from ``first`` on: of those on SSD if it is even, or of all."""
        on_ssd = [key for key in KEYS if self.node.tier.find(partition, key) is not None]
        choice = on_ssd if on_ssd and first % 2 == 0 else KEYS
        return list(dict.fromkeys(choice[number % len(choice)] for number in range(first, first + count)))

    def judge(self, name: Name, value: bytes | None) -> None:
        """I7: the bytes that were put last, or a miss; after a crash any that were put and not deleted."""
        if value is None:
            return
        if name in self.latest:
            assert value == self.latest[name], "stale or foreign bytes"
        else:
            assert value in self.known.get(name, set()), "bytes that were deleted, or never put here"
            self.latest[name] = value

    @rule(tenant=tenants, first=firsts, count=st.integers(1, 24), settled=st.sampled_from([True, True, False]))
    def delete(self, tenant: str, first: int, count: int, settled: bool) -> None:
        if tenant not in self.limits:
            return
        partition = self.partitions[tenant]
        keys = self.aim(partition, first, count)
        self.node.core.delete(partition, keys)
        assert not any(self.node.found(partition, keys))
        for key in keys:
            self.latest[partition, key] = None

        def settle() -> None:
            self.node.workers.drain()
            try:
                self.node.disk.flush()
            except OSError:
                return
            if self.node.store.status.state is SsdState.READ_ONLY:
                return  # the device took neither tombstone nor removal
            for key in [] if self.rots else keys:
                self.known.pop((partition, key), None)

        if settled:
            self.apply(settle)

    def work(self, jobs: int) -> None:
        def run() -> None:
            for _ in range(jobs):
                if not self.node.workers.step():
                    return

        self.apply(run)

    @rule()
    def settle(self) -> None:
        self.apply(self.node.workers.drain)
        if not self.node.workers.jobs:
            self.node.check_files()

    # ---- policy

    @rule(
        tenant=tenants,
        change=st.sampled_from([*[""] * 8, "limit", "limit", "tenant", "epoch"]),  # what wipes too often tests nothing
        limit=st.sampled_from(LIMITS),
    )
    def change_policy(self, tenant: str, change: str, limit: int) -> None:
        if not change:
            return
        if change == "epoch":
            self.epoch += 1
        elif tenant not in self.limits:
            self.above[tenant] = self.node.used_bytes(tenant)
            self.limits[tenant] = 300 * KIB
            self.epoch += 1  # a namespace made anew has another uid, or at least another epoch
        elif change == "tenant":
            del self.limits[tenant]
        else:
            self.above[tenant] = self.node.used_bytes(tenant)
            self.limits[tenant] = limit
        self.push()

    # ---- faults

    @rule(fault=st.sampled_from([errno.EIO, errno.ENOSPC, "short", "flip", "die", "sync"]), after=st.integers(0, 6))
    def fail_soon(self, fault: int | str, after: int) -> None:
        """The device fails at a later operation, and recovers from what failed before."""
        if fault == "die":
            self.files.crash_in = after + 1
        elif fault == "sync":
            self.files.sync_faults.extend([None] * after + [errno.EIO])
        elif fault == "flip":
            self.files.read_faults.extend([None] * after + [fault])
        else:
            self.files.write_faults.extend([None] * after + [fault])
            if fault == errno.EIO:
                self.files.read_faults.extend([None] * after + [fault])
        self.time_passes()

    def time_passes(self) -> None:
        self.node.pass_time(60)

    @rule(power=st.booleans(), keep=st.integers(0, 8))
    def die_now(self, power: bool, keep: int) -> None:
        self.restart(power=power, keep=keep)

    @rule()
    def stop_and_start(self) -> None:
        self.files.write_faults.clear()
        self.files.read_faults.clear()
        self.files.sync_faults.clear()
        self.files.crash_in = None
        self.node.workers.drain()
        on_ssd = {
            (partition, key)
            for partition in self.partitions.values()
            for key in KEYS
            if self.node.tier.find(partition, key) is not None
        }
        self.node.stop()
        before = self.latest
        self.latest = {}
        self.start()
        for name in on_ssd:
            assert self.rots or self.node.tier.find(*name) is not None, "a flushed entry was lost"
            if before.get(name) is not None and not self.rots:
                self.latest[name] = before[name]

    @precondition(lambda self: self.rots)
    @rule(which=st.integers(0, 1000), where=st.integers(0, 10**6), bit=st.integers(0, 7))
    def rot(self, which: int, where: int, bit: int) -> None:
        paths = sorted(self.node.root.rglob("*.seg"))
        if not paths:
            return
        path = paths[which % len(paths)]
        with path.open("r+b") as file:
            size = path.stat().st_size
            if not size:
                return
            file.seek(where % size)
            byte = file.read(1)
            file.seek(where % size)
            file.write(bytes([byte[0] ^ (1 << bit)]))

    # ---- what always holds

    @invariant()
    def i4_i8_books_agree_and_cover_the_files(self) -> None:
        self.node.check()
        for tenant, limit in self.limits.items():
            used = self.node.used_bytes(tenant)
            assert used <= max(limit, self.above.get(tenant, 0)), "I4"
            if used <= limit:
                self.above.pop(tenant, None)

    @invariant()
    def i4_the_tier_is_within_its_capacity(self) -> None:
        assert self.node.tier.used_bytes + self.node.tier.unusable_bytes <= SSD_BYTES + self.node.tier.leaving_bytes

    def teardown(self) -> None:
        self.files.write_faults.clear()
        self.files.read_faults.clear()
        self.files.sync_faults.clear()
        self.files.crash_in = None
        self.limits.clear()
        self.node.apply(policy_of(self.version + 1, {}))
        self.node.workers.drain()
        for _ in range(3):  # keys and files that could not be removed before are tried again
            self.time_passes()
            self.node.workers.drain()
        self.node.release()
        shutil.rmtree(self.folder)


TestStoreAgainstModel = StoreMachine.TestCase
TestStoreAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
