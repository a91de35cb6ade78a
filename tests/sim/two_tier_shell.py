"""What the shell does in a world of two tiers: writes, reads, and what comes of them."""

from __future__ import annotations

from dataplane.core.entry import Entry, Pin, Promotion
from dataplane.core.partition import Partition
from dataplane.core.ssd_books import Append, Bury, DestroyKey, DropSegment, Relocate, Seal
from dataplane.core.usage import DropReason
from saltern.keys import BlockKey
from saltern.names import TenantId
from saltern.wire import checksum
from tests.sim.disk import DiskError, NotDurableError, Value
from tests.sim.two_tier_state import TwoTierState
from tests.sim.two_tier_values import KINDS, Job, Reading, Staged, short, told_of


class Shell(TwoTierState):
    """The writing thread and the reading threads, one job at a time."""

    def _verify(self, partition: Partition, key: BlockKey, pin: Pin) -> None:
        value = self.truth.current.get((partition, key))
        assert value is not None, f"I2, I12: {short(key)} of {partition.tenant} is served and is not there"
        assert bytes(self.arena.view(pin.offset, pin.size_bytes)) == value.payload, "I7: other bytes than were put"
        assert pin.checksum == checksum(value.payload), "I7: another sum"

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
        self.done[f"{'failed to do' if fault else 'did'}: {KINDS[type(job)]}"] += 1
        self.say(f"{told_of(job)}{': failed' if fault else ''}")
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
        self.say(f"{short(ticket.entry.key)} of {index.partition.tenant} comes from SSD: {is_served}")
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
