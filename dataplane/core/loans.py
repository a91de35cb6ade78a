"""What members of a sharing group read of each other at this moment, and how much of a tenant that may hold (I4, I5).

An entry that somebody reads cannot make way. Its owner's puts would be refused once others read all that the owner has,
so loans hold at most half of the owner's limit: the other half turns over as if nobody shared. What is past the bound
is a miss for the reader, as everything that cannot be had right now (I10).

A loan takes nothing else of the owner: it does not touch the entry's place in the order of eviction, earns nothing for
the reservation, and brings nothing into the owner's DRAM. Hits, misses and bytes are the reader's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dataplane.core.entry import Entry, EntryState, Pin

if TYPE_CHECKING:
    from dataplane.core.pool import Pool
    from dataplane.core.tenant_cache import PartitionIndex, TenantCache
    from saltern.keys import BlockKey

#: Loans hold at most one part in so many of their owner's limit.
LENT_PARTS: Final = 2


class Loans:
    """Entries that peers read, by owner; an entry counts once, however many read it."""

    __slots__ = ("_lent_bytes", "_readers")

    def __init__(self) -> None:
        self._readers: dict[Entry, int] = {}
        self._lent_bytes: dict[TenantCache, int] = {}

    def lent_bytes(self, owner: TenantCache) -> int:
        """What peers hold of ``owner`` now."""
        return self._lent_bytes.get(owner, 0)

    def begin(self, entry: Entry) -> bool:
        """One more peer reads ``entry``; False if its owner has lent too much already."""
        readers = self._readers.get(entry, 0)
        if not readers:
            owner = entry.index.owner
            lent_bytes = self.lent_bytes(owner) + entry.extent_bytes
            if lent_bytes > owner.budget.limit_bytes // LENT_PARTS:
                return False
            self._lent_bytes[owner] = lent_bytes
        self._readers[entry] = readers + 1
        return True

    def end(self, entry: Entry) -> None:
        """One peer less reads ``entry``."""
        self._readers[entry] -= 1
        if self._readers[entry]:
            return
        del self._readers[entry]
        owner = entry.index.owner
        self._lent_bytes[owner] -= entry.extent_bytes
        if not self._lent_bytes[owner]:
            del self._lent_bytes[owner]

    def check_invariants(self) -> None:
        """Assert that the sums are those of the entries lent, and that each of these is held (I7, I8)."""
        sums: dict[TenantCache, int] = {}
        for entry, readers in self._readers.items():
            assert 0 < readers <= entry.pins, "I7: lent and not held"
            sums[entry.index.owner] = sums.get(entry.index.owner, 0) + entry.extent_bytes
        assert sums == self._lent_bytes, "I8: what is lent"


def pin_loans(
    pool: Pool,
    reader: PartitionIndex,
    peers: Sequence[PartitionIndex],
    keys: Sequence[BlockKey],
    pins: list[Pin | None],
) -> None:
    """Fill in ``pins`` what the reader itself lacks and a peer has; the hits are the reader's."""
    missing = [position for position, pin in enumerate(pins) if pin is None]
    counters = reader.owner.counters
    for peer in peers:
        owner, still = peer.owner, []
        for position in missing:
            entry = peer.entries.get(keys[position])
            if entry is None or (entry.state is EntryState.ADOPTED and not pool.verify(entry)):
                still.append(position)
                continue
            may_hold = entry.pins > 0 or pool.held.may_hold(owner, entry.extent_bytes)
            if not may_hold or not pool.loans.begin(entry):
                counters.hits_held_back += 1
                still.append(position)
                continue
            if not entry.pins:
                owner.budget.hold(entry.extent_bytes)
            entry.pins += 1
            pins[position] = Pin(entry.offset, entry.size_bytes, entry.checksum, entry, is_loan=True)
            counters.get_hits += 1
            reader.namespace.get_hits += 1
            counters.hit_tokens += peer.block_tokens
            counters.get_bytes += entry.size_bytes
            counters.peer_hits += 1
        if len(still) < len(missing):
            pool.changed(owner)
        missing = still
