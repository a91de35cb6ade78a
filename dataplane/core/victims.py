"""Whom a put may displace: chosen completely before anything is evicted, so that a refused put costs nobody (I6).

Rules, in this order:

1. Past its own limit a tenant displaces only itself, coldest first (I4).
2. If the pool is full, the coldest entry goes among tenants above what is protected of their own. Nobody is taken
   *below* that line by a tenant that is itself growing past its reservation: an entry that straddles it stays.
3. A tenant that grows within its reservation takes back what it lent: now also an entry that straddles the line goes,
   since the owner is above it. Nobody at or below the line loses anything, ever (I5).
4. At last, the tenant's own coldest entries.

What is protected is the whole reservation, or under earning reservations the part of it that keeps the tenant's hits
(:mod:`dataplane.core.reservations`).

*Coldest* compares the ages of the tenants' next victims, divided by weights: at weight 200 an entry counts as half as
old as at weight 100. With equal weights and LRU inside each tenant it is plain LRU over the pool.

Where bytes are free but scattered, the same order is followed until the victims and the free extents between them make
one run that is long enough; only victims inside that run are evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from dataplane.core.entry import Entry
from dataplane.core.extents import Extents
from dataplane.core.tenant_cache import TenantCache

#: Most entries that one put may consider: 64 MiB of single granules, twice over.
VICTIMS_MAX: Final = 32_768
_WEIGHT_UNIT: Final = 100
#: Entries of a tenant that caching does not serve count as so many times as old.
_IDLE_AGE_FACTOR: Final = 16


def choose_victims(
    extents: Extents, requester: TenantCache, borrowers: Iterable[TenantCache], extent_bytes: int, now_ns: int
) -> list[Entry] | None:
    """Choose the entries to evict so that ``extent_bytes`` of ``requester`` fit its limit and one free extent.

    Args:
        borrowers: every tenant above what is protected of its own; others may be among them.
        now_ns: not before the last touch.

    Returns:
        The victims, perhaps none; or None if the put must be refused. Nothing is changed either way.
    """
    budget = requester.budget
    own = _Candidate(requester)
    victims: list[Entry] = []
    excess_bytes = budget.used_bytes + extent_bytes - budget.limit_bytes
    if excess_bytes > budget.evictable_bytes:
        return None
    trial = extents.trial()
    longest_bytes = extents.largest_free_bytes
    while excess_bytes > 0:
        entry = own.take()
        victims.append(entry)
        excess_bytes -= entry.extent_bytes
        start, end = trial.add(entry.offset, entry.extent_bytes)
        longest_bytes = max(longest_bytes, end - start)
    if longest_bytes >= extent_bytes:
        return victims

    own_victims = len(victims)
    for entry in _coldest_first(own, borrowers, extent_bytes, now_ns):
        victims.append(entry)
        start, end = trial.add(entry.offset, entry.extent_bytes)
        if end - start >= extent_bytes:
            in_run = (victim for victim in victims[own_victims:] if start <= victim.offset < end)
            return [*victims[:own_victims], *in_run]
        if len(victims) >= VICTIMS_MAX:
            break
    return None


@dataclass(slots=True, eq=False, init=False)
class _Candidate:
    """A tenant that may lose entries: its next victim, and its books as if those taken so far were gone."""

    owner: TenantCache
    head: Entry | None
    used_bytes: int
    protected_bytes: int
    _rest: Iterator[Entry]

    def __init__(self, owner: TenantCache) -> None:
        self.owner = owner
        self.used_bytes = owner.budget.used_bytes
        self.protected_bytes = owner.budget.protected_bytes
        self._rest = iter(owner.order)
        self._advance()

    def take(self) -> Entry:
        entry = self.head
        assert entry is not None, "I8: the books promise more evictable bytes than there are"
        self.used_bytes -= entry.extent_bytes
        self._advance()
        return entry

    def _advance(self) -> None:
        for entry in self._rest:
            if not entry.pins:
                self.head = entry
                return
        self.head = None


#: (negative weighted age, last touch, tenant): the heap's least is the coldest. Touch times are unique, so no tie ever
#: compares candidates.
_Ranked = tuple[int, int, _Candidate]


def _rank(candidate: _Candidate, now_ns: int) -> _Ranked:
    entry = candidate.head
    assert entry is not None
    age_ns = now_ns - entry.touched_ns
    if candidate.owner.is_idle:
        age_ns *= _IDLE_AGE_FACTOR
    return -(age_ns * _WEIGHT_UNIT // candidate.owner.budget.weight), entry.touched_ns, candidate


def _coldest_first(
    own: _Candidate, borrowers: Iterable[TenantCache], extent_bytes: int, now_ns: int
) -> Iterator[Entry]:
    """Yield the entries that ``own`` may displace, by rules 2 to 4.

    One look at each borrower for each put that evicts: fine for hundreds of tenants above their reservation, and the
    place for a heap kept between puts when there are thousands.
    """
    candidates = [_Candidate(owner) for owner in borrowers if owner is not own.owner]
    candidates.append(own)
    straddling: list[_Candidate] = []
    heap = [_rank(candidate, now_ns) for candidate in candidates if candidate.head]
    heapify(heap)
    while heap:
        candidate = heappop(heap)[2]
        head = candidate.head
        assert head is not None
        spare_bytes = candidate.used_bytes - candidate.protected_bytes
        if spare_bytes >= head.extent_bytes or (candidate is own and spare_bytes > 0):
            yield candidate.take()
            if candidate.head:
                heappush(heap, _rank(candidate, now_ns))
        elif candidate is not own:
            straddling.append(candidate)

    if own.used_bytes + extent_bytes <= own.owner.budget.reserved_bytes:
        heap = [_rank(candidate, now_ns) for candidate in straddling]
        heapify(heap)
        while heap:
            candidate = heappop(heap)[2]
            if candidate.used_bytes > candidate.protected_bytes:
                yield candidate.take()
                if candidate.head:
                    heappush(heap, _rank(candidate, now_ns))

    while own.head:
        yield own.take()
