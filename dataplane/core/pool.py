"""Memory and books of the DRAM tier: how an entry comes into it, changes hands and leaves it.

The pool knows tenants, budgets and extents, and nothing about policies or requests; each of its methods keeps
memory, books and indexes in step, so that the invariants hold between any two calls (I8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from dataplane.core import refusals
from dataplane.core.borrowers import Borrowers
from dataplane.core.compaction import Move, Relocate
from dataplane.core.displacements import Displacements
from dataplane.core.entry import Entry, EntryState, PutRefused
from dataplane.core.extents import GRANULE_BYTES, ArenaOffset, Extents
from dataplane.core.held import HeldBeyond
from dataplane.core.layout import Layout
from dataplane.core.loans import Loans
from dataplane.core.partition import Partition
from dataplane.core.reaping import reap_for
from dataplane.core.tenant_cache import NamespaceBooks, PartitionIndex, TenantCache
from dataplane.core.usage import EvictionCause
from dataplane.core.victims import choose_room, coldest
from saltern.keys import BlockKey
from saltern.names import TenantId

#: Lengths of entries that are shared between them; with more than these, each entry has its own.
_LENGTHS_MAX: Final = 4096


class Pool:
    """All entries of one node's tier.

    Attributes:
        tenants: every tenant that the policy names or that still holds bytes.
        open: partitions that the policy opens now, as far as they have been used.
        borrowers: who could lose an entry to somebody else's put; whatever changes a tenant is noted there.
        held: what tenants hold beyond their reservations.
        loans: what members of sharing groups read of each other.
        above_mark: every tenant above its soft mark, and perhaps some that no longer are.
        purged: partitions that are gone and whose memory is yet to be freed; it stays charged until it is (I8).
        above_limit: tenants whose limit was lowered below what they use, while they have something to evict (I4).
        namespaces_above: the same of namespaces.
        namespaces_held: namespaces above a lowered limit with nothing to evict, and perhaps some that no longer are:
            transfers hold what is too much, and more leaves as each of them ends.
        detached: unreachable entries whose memory is still being read or written.
        last_ns: the latest time that a touch has had.
        demote: told of every entry that is evicted, while its bytes are still there; it must take them before it
            returns, and must not call back into the pool.
        layout: where every entry lies; None if none can be moved.
        displaced: who evicted whom.
        compactions, moved_bytes: puts that had entries moved, and lengths of those entries; they only grow.
        digest: XXH3-64 over so many bytes of the arena from an offset on; needed once entries are adopted.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.extents: Final = Extents(capacity_bytes)
        self.tenants: Final[dict[TenantId, TenantCache]] = {}
        self.open: Final[dict[Partition, PartitionIndex]] = {}
        self.borrowers: Final = Borrowers()
        self.held: Final = HeldBeyond(self.extents.capacity_bytes)
        self.loans: Final = Loans()
        self.above_mark: Final[dict[TenantCache, None]] = {}
        self.purged: Final[dict[PartitionIndex, None]] = {}
        self.above_limit: Final[dict[TenantCache, None]] = {}
        self.namespaces_above: Final[dict[NamespaceBooks, None]] = {}
        self.namespaces_held: Final[dict[NamespaceBooks, None]] = {}
        self.detached: Final[dict[Entry, None]] = {}
        self._lengths: dict[int, int] = {}
        self.last_ns = 0
        self.demote: Callable[[Entry], None] | None = None
        self.layout: Layout | None = None
        self._relocate: Relocate | None = None
        self.displaced: Final = Displacements()
        self.compactions = 0
        self.moved_bytes = 0
        self.digest: Callable[[ArenaOffset, int], int] | None = None

    def advance(self, now_ns: int) -> int:
        """Move the clock; returns a time that no touch has had, so that ages never tie."""
        self.last_ns = last_ns = now_ns if now_ns > self.last_ns else self.last_ns + 1
        return last_ns

    def move_with(self, relocate: Relocate) -> None:
        """Have ``relocate`` copy the bytes of entries that are moved; before there are any."""
        self._relocate = relocate
        self.layout = Layout(self.entries)

    def entries(self) -> Iterator[Entry]:
        """Every entry that occupies memory."""
        for owner in self.tenants.values():
            for index in owner.partitions.values():
                yield from index.entries.values()
                yield from index.writing.values()
        for index in self.purged:
            yield from index.entries.values()
        yield from self.detached

    def admit(
        self, index: PartitionIndex, key: BlockKey, size_bytes: int, extent_bytes: int, now_ns: int
    ) -> Entry | PutRefused:
        """Charge an entry and set its memory aside (I4), evicting and moving what must; or refuse and do neither (I6).

        The entry is not larger than the limits and the arena: the caller has checked.
        """
        owner, namespace = index.owner, index.namespace
        budget = owner.budget
        offset = None
        if budget.held_bytes + extent_bytes > budget.reserved_bytes and not self.held.may_hold(owner, extent_bytes):
            return refusals.transfers_full(owner, size_bytes)
        excess_bytes = budget.used_bytes + extent_bytes - budget.limit_bytes
        own_excess_bytes = namespace.used_bytes + extent_bytes - namespace.limit_bytes
        if excess_bytes <= 0 and own_excess_bytes <= 0:
            offset = self.extents.allocate(extent_bytes)
        if offset is None and self.purged:
            offset = reap_for(self, index, extent_bytes)
            excess_bytes = budget.used_bytes + extent_bytes - budget.limit_bytes
            own_excess_bytes = namespace.used_bytes + extent_bytes - namespace.limit_bytes
        if offset is None:
            if owner in self.above_limit:
                return refusals.limit_lowered(owner, size_bytes)
            if namespace in self.namespaces_above:
                return refusals.namespace_limit_lowered(index, size_bytes)
            if excess_bytes > budget.evictable_bytes:
                return refusals.quota_exceeded(owner, size_bytes)
            leaving = coldest(namespace, own_excess_bytes) if own_excess_bytes > 0 else []
            if leaving is None:
                return refusals.namespace_limit(index, size_bytes)
            room = choose_room(
                self.extents,
                owner,
                self.borrowers,
                extent_bytes,
                self.advance(now_ns),
                layout=self.layout,
                leaving=leaving,
            )
            if room is None:
                return refusals.node_full(owner, size_bytes, self.extents.free_bytes)
            self._make_room(owner, room.victims, excess_bytes, len(leaving))
            if room.moves:
                self._move(room.moves)
            offset = self.extents.allocate(extent_bytes)
            assert offset is not None, "victims and moves were chosen to make one free extent"
        budget.begin(size_bytes, extent_bytes)
        namespace.used_bytes += extent_bytes
        assert namespace.used_bytes <= namespace.limit_bytes, "I4: charged past the namespace's limit"
        self.changed(owner)
        size_bytes, extent_bytes = self._share(size_bytes), self._share(extent_bytes)
        entry = index.writing[key] = Entry(key, index, offset, size_bytes, extent_bytes)
        if self.layout is not None:
            self.layout.add(entry)
        return entry

    def publish(self, entry: Entry, checksum: int, now_ns: int) -> None:
        """Make an entry readable that a client has put (I7)."""
        self.insert(entry, checksum, now_ns)
        counters = entry.index.owner.counters
        counters.puts_stored += 1
        counters.put_bytes += entry.size_bytes

    def insert(self, entry: Entry, checksum: int, now_ns: int) -> None:
        """Make a written entry readable (I7)."""
        index = entry.index
        owner = index.owner
        del index.writing[entry.key]
        entry.state = EntryState.READABLE
        entry.checksum = checksum
        entry.touched_ns = self.advance(now_ns)
        index.entries[entry.key] = entry
        owner.order.insert(entry)
        owner.budget.commit(entry.size_bytes, entry.extent_bytes)
        if owner.account is not None:
            owner.account.stored(entry.key, entry.extent_bytes)
        self.changed(owner)

    def abort(self, entry: Entry) -> None:
        """End a put without an entry: only now is its memory certain not to be written any more (I7)."""
        owner = entry.index.owner
        if entry.state is EntryState.DETACHED:
            del self.detached[entry]
        else:
            del entry.index.writing[entry.key]
        if self.layout is not None:
            self.layout.remove(entry)
        self.extents.free(entry.offset, entry.extent_bytes)
        owner.budget.abort(entry.size_bytes, entry.extent_bytes)
        entry.index.namespace.used_bytes -= entry.extent_bytes
        self.changed(owner)
        self.forget_if_empty(owner)

    def unpin(self, entry: Entry) -> None:
        """Take one reader off an entry; the last one frees it if it was removed meanwhile.

        The caller says :meth:`changed` when it is through with the pins of a tenant.
        """
        entry.pins -= 1
        if entry.pins:
            return
        owner = entry.index.owner
        owner.budget.unhold(entry.extent_bytes)
        if entry.state is EntryState.DETACHED:
            del self.detached[entry]
            self._free(entry)
            return
        if self.namespaces_held and entry.index.namespace in self.namespaces_held:
            self.evict_namespace_down(entry.index.namespace)
        if owner.budget.used_bytes > owner.budget.limit_bytes and owner.in_policy and owner not in self.above_limit:
            self.evict_down_to_limit(owner)

    def remove(self, entry: Entry) -> None:
        """Make a readable entry unreachable; its memory is free now, or when its last reader ends (I7)."""
        entry.index.owner.order.remove(entry)
        self._detach(entry)

    def evict(self, entry: Entry, cause: EvictionCause) -> bool:
        """Remove an entry that nobody holds, to make room; False if it was purged already, so that nobody loses it."""
        owner = entry.index.owner
        if entry.index in self.purged:
            self.remove(entry)
            return False
        owner.counters.evicted(entry.size_bytes, cause)
        if self.demote is not None and (entry.state is not EntryState.ADOPTED or self._is_intact(entry)):
            self.demote(entry)
        owner.order.evict(entry)
        self._detach(entry)
        return True

    def evict_down_to_limit(self, owner: TenantCache, work_max: int = 2**62) -> int:
        """After the limit was lowered: evict own coldest until it is met (I4) or nothing more can go; how many went.

        Args:
            work_max: stop when so much is done, as :meth:`eviction_work` counts; the tenant is then ``above_limit``.
        """
        self.above_limit.pop(owner, None)
        excess_bytes = owner.budget.used_bytes - owner.budget.limit_bytes
        victims, goes_on = self._coldest_within(owner.order, excess_bytes, work_max)
        evicted = sum(self.evict(entry, EvictionCause.QUOTA) for entry in victims)
        if goes_on:
            self.above_limit[owner] = None
        return evicted

    def evict_namespace_down(self, namespace: NamespaceBooks, work_max: int = 2**62) -> int:
        """The same for the limit of a namespace, which has an order of its own since it has one."""
        self.namespaces_above.pop(namespace, None)
        self.namespaces_held.pop(namespace, None)
        excess_bytes = namespace.used_bytes - namespace.limit_bytes
        victims, goes_on = self._coldest_within(namespace.order or (), excess_bytes, work_max)
        evicted = sum(self.evict(entry, EvictionCause.NAMESPACE_LIMIT) for entry in victims)
        if goes_on:
            self.namespaces_above[namespace] = None
        elif namespace.is_above_limit:
            self.namespaces_held[namespace] = None
        return evicted

    def _coldest_within(self, order: Iterable[Entry], excess_bytes: int, work_max: int) -> tuple[list[Entry], bool]:
        """The coldest entries that nobody holds, of ``excess_bytes`` or of ``work_max``; whether more must follow."""
        victims: list[Entry] = []
        for entry in order if excess_bytes > 0 else ():
            if entry.pins:
                continue
            if excess_bytes <= 0 or work_max <= 0:
                return victims, excess_bytes > 0
            victims.append(entry)
            excess_bytes -= entry.extent_bytes
            work_max -= self.eviction_work(entry)
        return victims, False  # what is left is held, and follows when its transfers end

    def eviction_work(self, entry: Entry) -> int:
        """What evicting an entry costs, in bytes: with a tier below they are copied, else it is as if it were small."""
        return GRANULE_BYTES if self.demote is None else entry.extent_bytes

    def purge(self, index: PartitionIndex) -> int:
        """Make a whole partition unreachable at once (I12), in constant time; return how many entries it had.

        Its memory is freed by :meth:`reap`, or when a transfer that reads or writes it ends.
        """
        self.open.pop(index.partition, None)
        del index.owner.partitions[index.partition]
        for entry in index.writing.values():
            entry.state = EntryState.DETACHED
            self.detached[entry] = None
        index.writing.clear()
        if index.entries:
            self.purged[index] = None
        return len(index.entries)

    def reap(self, index: PartitionIndex, entries_max: int) -> int:
        """Free memory of a purged partition, entry by entry; return how many went."""
        owner, entries = index.owner, index.entries
        count = min(len(entries), entries_max)
        for _ in range(count):
            _, entry = entries.popitem()
            owner.order.remove(entry)
            self._let_go(entry)
        if not entries:
            del self.purged[index]
        self.changed(owner)
        return count

    def verify(self, entry: Entry) -> bool:
        """Make an adopted entry readable if its bytes are those that were put, else remove it (I7); which it was."""
        if self._is_intact(entry):
            entry.state = EntryState.READABLE
            return True
        self.remove(entry)
        return False

    def changed(self, owner: TenantCache) -> None:
        """Call after anything of a tenant changed: its entries, their order, who holds them, its books, its quota."""
        if self.tenants.get(owner.tenant) is owner:
            self.borrowers.note(owner)
            self.held.note(owner)
            if owner.budget.used_bytes > owner.budget.soft_mark_bytes:
                self.above_mark[owner] = None

    def forget_if_empty(self, owner: TenantCache) -> None:
        """The record of a tenant outside the policy stays only as long as it holds bytes (I8)."""
        if not owner.in_policy and not owner.budget.used_bytes:
            self.borrowers.forget(owner)
            self.held.forget(owner)
            self.above_mark.pop(owner, None)
            self.above_limit.pop(owner, None)
            for namespace in owner.namespaces.values():
                self.forget_limit(namespace)
            owner.dissolve()
            self.tenants.pop(owner.tenant, None)

    def forget_limit(self, namespace: NamespaceBooks) -> None:
        """The namespace is gone, or has no limit any more: nothing has to leave for it."""
        self.namespaces_above.pop(namespace, None)
        self.namespaces_held.pop(namespace, None)

    def _share(self, size_bytes: int) -> int:
        """Return the one object for this length: entries are of few lengths, and an int of its own takes 32 bytes."""
        lengths = self._lengths
        shared = lengths.get(size_bytes)
        if shared is not None:
            return shared
        if len(lengths) < _LENGTHS_MAX:
            lengths[size_bytes] = size_bytes
        return size_bytes

    def _make_room(self, requester: TenantCache, victims: list[Entry], excess_bytes: int, leaving: int) -> None:
        """Evict what a put displaces.

        Args:
            victims: the first ``leaving`` go for the limit of the put's namespace; then so many as bring the limit of
                the requester ``excess_bytes``, those included.
        """
        for at, victim in enumerate(victims):
            if victim.index.owner is not requester:
                if self.evict(victim, EvictionCause.NEIGHBOUR):
                    requester.counters.took(victim.size_bytes)
                    self.displaced.add(victim.index.owner.tenant, requester.tenant, victim.size_bytes)
            elif at < leaving:
                self.evict(victim, EvictionCause.NAMESPACE_LIMIT)
            else:
                self.evict(victim, EvictionCause.OWN_LIMIT if excess_bytes > 0 else EvictionCause.OWN_PUT)
            excess_bytes -= victim.extent_bytes

    def _move(self, moves: list[tuple[Entry, int]]) -> None:
        """Give entries that nobody holds other memory, and copy their bytes there."""
        assert self._relocate is not None and self.layout is not None, "moves are planned only where they can be done"
        copies = [Move(entry.offset, target, entry.size_bytes) for entry, target in moves]
        self._relocate(copies)
        for entry, target in moves:
            assert not entry.pins, "I7: an entry moved under its reader"
            self.layout.remove(entry)
            self.extents.free(entry.offset, entry.extent_bytes)
            entry.offset = ArenaOffset(target >> 0)  # an exact int, see Extents.allocate
            self.extents.take(entry.offset, entry.extent_bytes)
            self.layout.add(entry)
        self.compactions += 1
        self.moved_bytes += sum(copy.size_bytes for copy in copies)

    def _is_intact(self, entry: Entry) -> bool:
        assert self.digest is not None, "adopting set it"
        return self.digest(entry.offset, entry.size_bytes) == entry.checksum

    def _detach(self, entry: Entry) -> None:
        del entry.index.entries[entry.key]
        self._let_go(entry)
        self.changed(entry.index.owner)

    def _let_go(self, entry: Entry) -> None:
        entry.state = EntryState.DETACHED
        if entry.pins:
            self.detached[entry] = None
        else:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        owner = entry.index.owner
        if self.layout is not None:
            self.layout.remove(entry)
        self.extents.free(entry.offset, entry.extent_bytes)
        owner.budget.release(entry.size_bytes, entry.extent_bytes)
        entry.index.namespace.used_bytes -= entry.extent_bytes
        self.forget_if_empty(owner)
