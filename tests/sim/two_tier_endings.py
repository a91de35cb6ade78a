"""What happens to the disk and to the process in a world of two tiers."""

from __future__ import annotations

from typing import Final

from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.snapshot import ArenaIdentity
from dataplane.core.usage import EvictionCause
from tenants.quota import TierQuota
from tests.sim.disk import DiskError
from tests.sim.two_tier_life import SOFT_MARK_PERCENT, Life
from tests.sim.two_tier_values import BY_A_CLEAN_STOP, NS

_ARENA: Final = ArenaIdentity("node-1", "boot", "generation", 1, 0)


class Endings(Life):
    """Faults of the disk, and every way in which a life ends and the next begins."""

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
        sealed = {number for number, file in self.disk.files.items() if file.footer is not None} | {BY_A_CLEAN_STOP}
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
            (Partition(owner.tenant, NS, books.storage_uid, books.epoch), key)
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
            self.truth.dead.update(dict.fromkeys(numbers, BY_A_CLEAN_STOP))
        self.truth.graves.clear()

    def _end_transfers(self) -> None:
        for writing in self.writings:
            self.core.put_abort(writing.ticket)
        self.core.get_end(self.pins)
        self.writings, self.pins = [], []
