"""The SSD tier of one node as a state machine: admissions and completions in, places and actions out; no I/O.

::

    append_start --> [record is written at append.block of append.segment] --> append_end
    read_start   --> [record is read and verified]                         --> read_end
    actions: what the shell must do in this order; each says how to answer it

The shell performs everything that changes files strictly in the order in which it was handed out: a file is dropped
only after every record admitted to it has been answered, and a footer is asked for only when all its records are on
disk.

Rules upheld here: I2 (an index is reached only through a Partition), I4 (charged before it is written, credited when
the file is gone), I5 (whose segments go), I7 (an entry is found only after its record was written), I8 and I12 (keys
are destroyed before files).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dataplane.core.lease import without_growth
from dataplane.core.partition import Partition, storage_uid
from dataplane.core.segments import BLOCK_BYTES, FIXED_BLOCKS, record_blocks
from dataplane.core.ssd_books import (
    NO_QUOTA,
    Append,
    Bury,
    DropSegment,
    Grave,
    Outdate,
    Relocate,
    Seal,
    SegmentState,
    SsdEntry,
    SsdPartition,
    SsdRead,
    TenantSsd,
)
from dataplane.core.ssd_log import SegmentLog
from dataplane.core.ssd_namespaces import set_namespace_limits
from dataplane.core.usage import DropReason, SsdUsage
from saltern.errors import InternalError
from saltern.keys import BlockKey
from saltern.names import TenantId
from tenants.policy import NodePolicy
from tenants.quota import Tier


class SsdTier(SegmentLog):
    """What core and shell ask of the log of segments; see :class:`dataplane.core.ssd_log.SegmentLog`."""

    # ---- policy

    def apply_policy(self, policy: NodePolicy, touched: Collection[TenantId] | None = None) -> None:
        """Follow a policy whose reservations fit: what it does not name is unreachable, its key destroyed first (I12).

        Args:
            touched: tenants whose rules may have changed; None for all.
        """
        if touched is None:
            touched = dict.fromkeys((*self.tenants, *policy.tenants))
        for tenant in [tenant for tenant in touched if tenant not in policy.tenants]:
            owner = self.tenants.get(tenant)
            if owner is not None:
                owner.in_policy, owner.quota = False, NO_QUOTA
                for partition in list(owner.partitions.values()):
                    self._destroy(partition)
                self._forget_if_empty(owner)
                self._suspect(owner)
        for tenant in touched:
            rules = policy.tenants.get(tenant)
            if rules is None:
                continue
            owner = self._owner(tenant)
            self._suspect(owner)
            owner.in_policy = True
            owner.set_uid(rules.uid)
            owner.quota = rules.tiers.get(Tier.SSD, NO_QUOTA)
            # A second's worth at once; what was taken in advance is still owed under the new rate.
            owner.bucket.rate_per_s = rules.rates.ssd_write_bytes_per_s or self._write_bytes_per_s
            owner.bucket.burst = owner.bucket.rate_per_s
            live = {
                (storage_uid(space.uid, group_uid), epoch)
                for space in rules.namespaces.values()
                for group_uid in ("", *space.groups)
                for epoch in space.epochs_of(group_uid)
            }
            for identity, partition in list(owner.partitions.items()):
                if identity not in live:
                    self._destroy(partition)
            set_namespace_limits(owner, rules)
            for namespace in owner.namespaces.values():
                self._shrink(namespace)
            self._shrink(owner)

    def set_quotas(self, policy: NodePolicy, *, is_frozen: bool) -> None:
        """Limits of a policy that was applied; or no more than is there, when the node's lease has run out (I9)."""
        self._above = None
        for tenant, rules in policy.tenants.items():
            owner, quota = self._owner(tenant), rules.tiers.get(Tier.SSD, NO_QUOTA)
            owner.quota = without_growth(quota, owner.used_bytes) if is_frozen else quota
            set_namespace_limits(owner, rules, is_frozen=is_frozen)

    @property
    def is_within_limits(self) -> bool:
        """Whether nobody has more on the device than a limit; what leaves counts until it has left."""
        suspects = self.tenants.values() if self._above is None else self._above
        self._above = {owner for owner in suspects if owner.is_above_a_limit}
        return not self._above

    def _suspect(self, owner: TenantSsd) -> None:
        if self._above is not None:
            self._above.add(owner)

    # ---- writing

    def wants(self, partition: Partition, key: BlockKey) -> bool:
        """Whether an entry that DRAM gives up should be offered: its tenant may use SSD, and it is not there yet."""
        owner = self.tenants.get(partition.tenant)
        if owner is None or not owner.quota.limit_bytes:
            return False
        namespace = owner.namespaces.get(partition.namespace_uid)
        if namespace is not None and not namespace.limit_bytes:
            return False
        books = owner.partitions.get((partition.storage_uid, partition.epoch))
        return books is None or not (key in books.entries or key in books.writing)

    def drop(self, partition: Partition, reason: DropReason) -> None:
        """Count an entry that DRAM gave up and that never came as far as :meth:`append_start`."""
        self._owner(partition.tenant).counters.dropped(reason)

    def append_start(
        self,
        partition: Partition,
        key: BlockKey,
        size_bytes: int,
        now_ns: int,
    ) -> Append | None:
        """Admit an entry that DRAM gives up; None if it is there already or cannot be taken, which is counted."""
        if not self.wants(partition, key):
            return None
        owner = self.tenants[partition.tenant]
        record_bytes = record_blocks(size_bytes) * BLOCK_BYTES
        least_bytes = record_bytes + FIXED_BLOCKS * BLOCK_BYTES
        most_bytes = min(owner.limit_bytes, owner.namespace(partition.namespace_uid).limit_bytes, self.capacity_bytes)
        refused: DropReason | None = None
        if not self.is_writable:
            refused = DropReason.NOT_WRITABLE
        elif least_bytes > most_bytes:
            refused = DropReason.NO_ROOM
        elif not owner.bucket.take(record_bytes, now_ns):
            refused = DropReason.WRITE_BUDGET
        if refused is not None:
            owner.counters.dropped(refused)
            return None
        books = owner.partitions.get((partition.storage_uid, partition.epoch))
        if books is None:
            books = SsdPartition(owner, self._number(), partition.storage_uid, partition.epoch)
            owner.partitions[books.storage_uid, books.epoch] = books
        append = self._admit(books, key, size_bytes)
        if append is None:
            owner.counters.dropped(DropReason.NO_ROOM)
        return append

    def append_end(self, append: Append, *, written: bool) -> None:
        """Say whether a record is on disk; only then can its entry be found (I7)."""
        if not append.is_open:
            raise InternalError("an append was ended twice", reason="APPEND_REUSED")
        append.is_open = False
        segment = append.segment
        partition = segment.partition
        counters = partition.owner.counters
        segment.writers -= 1
        if partition.writing.get(append.key) is append:
            del partition.writing[append.key]
        replaced = append.replaces
        if written:
            counters.written_bytes += record_blocks(append.size_bytes) * BLOCK_BYTES
        if not written:
            # Its blocks may hold half a record: they are not written again (nonces), and the segment is over.
            self._close(segment)
            if replaced is None:
                counters.dropped(DropReason.WRITE_FAILED)
        elif append.is_cancelled or (replaced is not None and not replaced.is_alive):
            self._bury(partition, [Grave(append.key, segment, append.block)])
        elif segment.is_leaving:
            if segment in partition.remains:
                partition.remains[segment].add(append.key)
            if replaced is None:
                counters.dropped(DropReason.NO_ROOM)
        else:
            entry = SsdEntry(append.key, segment, append.block, self._shared(append.size_bytes))
            if replaced is not None:
                self._lose(replaced)
                counters.relocations += 1
            else:
                counters.demotions += 1
                counters.demoted_bytes += append.size_bytes
            partition.entries[append.key] = entry
            segment.entries.append(entry)
            segment.live_bytes += entry.record_bytes
        self._settle(segment)

    # ---- reading

    def index(self, partition: Partition) -> SsdPartition | None:
        """What a partition has on SSD that can be read; the caller has checked that the policy opens it (I2)."""
        return self._books(partition) if self.is_readable else None

    def find(self, partition: Partition, key: BlockKey) -> SsdEntry | None:
        books = self.index(partition)
        return None if books is None else books.entries.get(key)

    def _books(self, partition: Partition) -> SsdPartition | None:
        owner = self.tenants.get(partition.tenant)
        return None if owner is None else owner.partitions.get((partition.storage_uid, partition.epoch))

    def read_start(self, entry: SsdEntry, *, relocates: bool = False, reader: TenantId | None = None) -> SsdRead:
        """Hold an entry's file until :meth:`read_end`.

        Args:
            reader: a peer of its tenant in a sharing group, whose interest writes nothing anew for the owner (I5).
        """
        owner = entry.segment.partition.owner.tenant
        entry.segment.readers += 1
        if reader is None or reader == owner:
            entry.is_hot = True
        return SsdRead(entry, owner if reader is None else reader, relocates)

    def read_end(self, read: SsdRead, *, intact: bool) -> bool:
        """Give a read back; return whether its entry may be served: it is whole, and still there (I7, I12)."""
        if not read.is_open:
            raise InternalError("a read was ended twice", reason="READ_REUSED")
        read.is_open = False
        entry = read.entry
        is_alive = entry.is_alive
        entry.segment.readers -= 1
        counters = entry.segment.partition.owner.counters
        if not intact:
            counters.read_failures += 1
            if is_alive:
                # What could not be read now may be readable after a restart: it is charged, and must not come back
                # once the client has deleted or replaced it (I12).
                self._lose(entry)
                entry.segment.partition.remains.setdefault(entry.segment, set()).add(entry.key)
        elif is_alive and not read.relocates:
            reader = self.tenants.get(read.reader)
            counters = counters if reader is None else reader.counters
            counters.reads += 1
            counters.read_bytes += entry.size_bytes
        self._settle(entry.segment)
        return intact and is_alive

    # ---- removal

    def delete(self, partition: Partition, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Remove entries, those on their way too; return which were there. Tombstones keep them from coming back."""
        if not self.is_known:
            self._outdate_unknown(partition.tenant, partition.storage_uid, partition.epoch)
        books = self._books(partition)
        if books is None:
            return set()
        wanted = list(keys)
        found: set[BlockKey] = set()
        graves = self._take_remains(books, wanted)
        for key in wanted:
            entry, append = books.entries.get(key), books.writing.get(key)
            if entry is not None:
                graves.append(Grave(key, entry.segment, entry.block))
                self._lose(entry)
                self._settle(entry.segment)
                found.add(key)
            if append is not None and not append.is_cancelled:
                append.is_cancelled = True  # and stays in the way of another record of the key until it has ended
                found.add(key)
        self._bury(books, graves)
        return found

    def outdate(self, partition: Partition, key: BlockKey) -> bool:
        """A client puts ``key``: True if it is here already; a record on its way is given up for the client's bytes.

        While the tier cannot be read what it has is given up too: the client's bytes can be served, and it cannot. A
        record that could not be read is buried, so that it does not come back in place of the client's bytes (I12);
        while nothing can be written that waits for a delete: a put must not cost whole segments.
        """
        books = self._books(partition)
        if books is None:
            return False
        entry = books.entries.get(key)
        if entry is not None and self.is_readable:
            return True
        graves = self._take_remains(books, (key,)) if books.remains and self.is_writable else []
        if entry is not None:
            if self.is_writable:
                graves.append(Grave(key, entry.segment, entry.block))
            else:
                books.remains.setdefault(entry.segment, set()).add(key)
            self._lose(entry)
            self._settle(entry.segment)
        append = books.writing.get(key)
        if append is not None:
            append.is_cancelled = True
        self._bury(books, graves)
        return False

    # ---- answers to actions

    def bury_end(self, bury: Bury, *, written: bool) -> None:
        bury.segment.writers -= 1
        if not written:
            self._close(bury.segment)
            self._give_up(bury.keys, bury.targets)
        self._settle(bury.segment)

    def seal_end(self, seal: Seal, *, written: bool, lost: bool = False) -> None:
        """Say whether the segment is durable.

        Args:
            lost: the device failed to make it durable. What it was asked to write may be gone although reads still
                show it, and asking again would succeed without it: nothing of the segment is served any more.
        """
        segment = seal.segment
        segment.writers -= 1
        if lost:
            segment.partition.owner.counters.lost += len(segment.live_entries())
            self._doom(segment)
        if written:
            # The footer lists what was alive; what was set aside for it and not needed is credited.
            before_bytes = segment.charged_bytes
            segment.row_count = len(seal.rows)
            self._charge(segment.partition, segment.charged_bytes - before_bytes)
            if segment.is_leaving:
                self._charge_leaving(segment.partition, segment.charged_bytes - before_bytes)
        if segment.state is SegmentState.SEALING:
            segment.state = SegmentState.SEALED if written else SegmentState.CLOSED
        self._settle(segment)

    def relocate_end(self, relocate: Relocate) -> None:
        segment = relocate.entry.segment
        segment.relocating -= 1
        if segment.state is SegmentState.RECLAIMING and not segment.relocating:
            self._doom(segment)

    def relocate_append(self, relocate: Relocate, now_ns: int) -> Append | None:
        """Admit the new copy of an entry that has been read; None if there is no room or it is gone."""
        entry = relocate.entry
        partition = entry.segment.partition
        if not entry.is_alive or not self.is_writable or not partition.owner.bucket.take(entry.record_bytes, now_ns):
            return None
        entry.is_hot = False
        return self._admit(partition, entry.key, entry.size_bytes, replaces=entry)

    def drop_end(self, drop: DropSegment, *, removed: bool) -> None:
        """The file is gone and no longer charged; or it could not be removed, and stays charged (I8)."""
        segment = drop.segment
        partition, owner = segment.partition, segment.partition.owner
        if not removed:
            segment.state = SegmentState.DOOMED
            # A tombstone would also bury a newer record of the key; while there is one, that one counts anyway.
            due = [key for key in segment.owed if not (key in partition.entries or key in partition.writing)]
            for key in due:
                del segment.owed[key]
            self._bury(partition, [Grave(key, segment) for key in due])
            return
        del owner.segments[segment.number]
        partition.remains.pop(segment, None)
        # They name their segment: in a circle they would stay until a full pass of the collector, which a node that is
        # always busy never makes (dataplane.io.garbage).
        segment.entries.clear()
        charged_bytes = segment.charged_bytes
        self._charge(partition, -charged_bytes)
        self._charge_leaving(partition, -charged_bytes)
        for waiting in list(owner.segments.values()):
            if waiting.tombstones or waiting.state is SegmentState.DOOMED:
                self._settle(waiting)
        self._forget_if_empty(owner)

    def outdate_end(self, outdate: Outdate, *, written: bool) -> None:
        """What could not be remembered is asked for again with the partition's next deletion."""
        if not written:
            self._outdated.discard(outdate)

    def drop_again(self, drop: DropSegment) -> None:
        """Ask once more to remove a file that could not be removed, if nobody has asked since."""
        self._settle(drop.segment)

    def seal_all(self) -> None:
        """Ask for the footer of every open segment: before a clean stop, so that the next start is quick."""
        for owner in self.tenants.values():
            for partition in owner.partitions.values():
                if partition.open_segment is not None:
                    self._retire(partition)

    # ---- what is there

    def usage(self, tenant: TenantId) -> SsdUsage | None:
        """Books and counters of one tenant; None if the tier does not know it."""
        owner = self.tenants.get(tenant)
        if owner is None:
            return None
        return SsdUsage(
            reserved_bytes=owner.quota.reserved_bytes,
            limit_bytes=owner.quota.limit_bytes,
            used_bytes=owner.used_bytes,
            leaving_bytes=owner.leaving_bytes,
            live_bytes=sum(segment.live_bytes for segment in owner.segments.values()),
            entries=sum(len(partition.entries) for partition in owner.partitions.values()),
            segments=len(owner.segments),
            counters=owner.counters.copy(),
            write_bytes_per_s=owner.bucket.rate_per_s,
        )
