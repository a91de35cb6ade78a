"""Whom a put may displace: chosen completely before anything is evicted, so that a refused put costs nobody (I6).

Rules, in this order:

1. Past its own limit a tenant displaces only itself, coldest first (I4). Past the limit of the put's namespace that
   one's own coldest go before (:func:`coldest`), whatever is colder elsewhere.
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
one run that is long enough; only victims inside that run are evicted. Before a put so costs others much more than its
own length, or is refused, other entries are moved out of the way (:mod:`dataplane.core.compaction`): as soon as it has
considered as many bytes as it brings, and once more each time that these have doubled; and before it considers anything
where more is free, in pieces, than one part in :data:`SCATTERED_PARTS` of the arena, since that much lies idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

from dataplane.core.borrowers import Borrowers, Kind, Record
from dataplane.core.compaction import Looks, plan_room
from dataplane.core.entry import Entry
from dataplane.core.extents import Extents
from dataplane.core.layout import Layout
from dataplane.core.tenant_cache import NamespaceBooks, TenantCache

#: Most entries that one put may consider: 64 MiB of single granules, twice over.
VICTIMS_MAX: Final = 32_768
#: So small a part of the arena may lie idle in pieces before entries are moved rather than evicted.
SCATTERED_PARTS: Final = 64
_WEIGHT_UNIT: Final = 100
#: Entries of a tenant that caching does not serve count as so many times as old.
_IDLE_AGE_FACTOR: Final = 16


class Room(NamedTuple):
    """What makes room for one entry: whom to evict, then (entry, new offset) of whom to move, in that order."""

    victims: list[Entry]
    moves: list[tuple[Entry, int]]


def coldest(namespace: NamespaceBooks, excess_bytes: int) -> list[Entry] | None:
    """The coldest entries of a namespace that nobody holds, of ``excess_bytes`` or just more; None if it has less.

    It is looked at no more entries than that takes and transfers hold: what is held cannot go, and has bounds of its
    own (:mod:`dataplane.core.held`).
    """
    found: list[Entry] = []
    for entry in namespace.order or ():
        if not entry.pins:
            found.append(entry)
            excess_bytes -= entry.extent_bytes
            if excess_bytes <= 0:
                break
    return found if excess_bytes <= 0 else None


def only_victim(
    extents: Extents, requester: TenantCache, borrowers: Borrowers, extent_bytes: int, excess_bytes: int
) -> Entry | None:
    """The one entry of the requester's own, of exactly ``extent_bytes``, that :func:`choose_room` would choose; None if
    that is another choice, or takes a longer look to see.

    Args:
        excess_bytes: by which the put would pass the requester's limit; 0 or less if only memory lacks.
    """
    if excess_bytes <= 0 and (extents.free_bytes >= extent_bytes or not borrowers.has_only(requester)):
        return None
    entry = requester.order.first()
    if entry is None or entry.pins or not entry.extent_bytes == extent_bytes >= excess_bytes:
        return None
    return entry


def choose_room(
    extents: Extents,
    requester: TenantCache,
    borrowers: Borrowers,
    extent_bytes: int,
    now_ns: int,
    *,
    layout: Layout | None = None,
    leaving: Collection[Entry] = (),
) -> Room | None:
    """Choose whom to evict and whom to move so that an entry of ``requester`` fits its limit and one free extent.

    Args:
        borrowers: every tenant above what is protected of its own.
        now_ns: not before the last touch.
        layout: which entry lies where; None if none can be moved.
        leaving: entries of the requester that must go whatever else goes, for the limit of a namespace.

    Returns:
        Victims, ``leaving`` first, and moves, perhaps none; or None if the put must be refused. Nothing is changed
        either way (I6).
    """
    budget = requester.budget
    own = _Candidate(requester, leaving)
    victims = list(leaving)
    excess_bytes = budget.used_bytes + extent_bytes - budget.limit_bytes
    if excess_bytes > budget.evictable_bytes:
        return None
    trial = extents.trial()
    longest_bytes = extents.largest_free_bytes
    considered_bytes = 0
    for entry in leaving:
        excess_bytes -= entry.extent_bytes
        considered_bytes += entry.extent_bytes
        start, end = trial.add(entry.offset, entry.extent_bytes)
        longest_bytes = max(longest_bytes, end - start)
    while excess_bytes > 0:
        entry = own.take()
        victims.append(entry)
        excess_bytes -= entry.extent_bytes
        considered_bytes += entry.extent_bytes
        start, end = trial.add(entry.offset, entry.extent_bytes)
        longest_bytes = max(longest_bytes, end - start)
    if longest_bytes >= extent_bytes:
        return Room(victims, [])

    own_victims = len(victims)
    looks = Looks.of(extent_bytes)

    def compact() -> Room | None:
        """Room within what is considered so far, by moving entries."""
        if layout is None or not layout.is_mixed or extents.free_bytes + considered_bytes < extent_bytes:
            return None
        plan = plan_room(extents, layout, trial, victims, extent_bytes=extent_bytes, looks=looks)
        if plan is None:
            return None
        rest = (victim for victim in victims[own_victims:] if victim in plan.leaving)
        return Room([*victims[:own_victims], *rest], plan.moves)

    compact_from_bytes = extent_bytes
    is_scattered = extents.free_bytes >= max(extent_bytes, extents.capacity_bytes // SCATTERED_PARTS)
    if is_scattered and considered_bytes < compact_from_bytes and (room := compact()):
        return room
    for entry in _coldest_first(own, borrowers, extent_bytes, now_ns):
        if considered_bytes >= compact_from_bytes:
            if room := compact():
                return room
            compact_from_bytes = 2 * considered_bytes
        victims.append(entry)
        considered_bytes += entry.extent_bytes
        start, end = trial.add(entry.offset, entry.extent_bytes)
        if end - start >= extent_bytes:
            in_run = (victim for victim in victims[own_victims:] if start <= victim.offset < end)
            return Room([*victims[:own_victims], *in_run], [])
        if len(victims) >= VICTIMS_MAX:
            break
    return compact()


@dataclass(slots=True, eq=False, init=False)
class _Candidate:
    """A tenant that may lose entries: its next victim, and its books as if those taken so far were gone."""

    owner: TenantCache
    head: Entry | None
    used_bytes: int
    protected_bytes: int
    _rest: Iterator[Entry]
    _leaving: Collection[Entry]

    def __init__(self, owner: TenantCache, leaving: Collection[Entry] = ()) -> None:
        """``leaving``: entries of its own that are as good as gone."""
        self.owner = owner
        self.used_bytes = owner.budget.used_bytes
        self.protected_bytes = owner.budget.protected_bytes
        self._leaving = leaving
        if leaving:
            self._leaving = frozenset(leaving)
            self.used_bytes -= sum(entry.extent_bytes for entry in leaving)
        self._rest = iter(owner.order)
        self._advance()

    def take(self) -> Entry:
        entry = self.head
        assert entry is not None, "I8: the books promise more evictable bytes than there are"
        self.used_bytes -= entry.extent_bytes
        self._advance()
        return entry

    def _advance(self) -> None:
        leaving = self._leaving
        for entry in self._rest:
            if not entry.pins and not (leaving and entry in leaving):
                self.head = entry
                return
        self.head = None


class _Contest:
    """Candidates by the weighted age of their next victims: those at hand, and those in the borrowers' heaps.

    A heap is walked, not emptied: below each record lie only younger ones, and they come into view when it is taken.
    """

    __slots__ = ("_borrowers", "_in_view", "_now_ns")

    def __init__(self, borrowers: Borrowers, now_ns: int, *, straddles: bool) -> None:
        self._borrowers = borrowers
        self._now_ns = now_ns
        # (negative weighted age, last touch, serial, candidate or place in a heap): the least is the coldest. No two
        # agree in the first three: entries differ in their last touch, records in their serial.
        self._in_view: list[tuple[int, int, int, _Candidate | _Place]] = []
        for kind, records in borrowers.heaps(straddles=straddles):
            self._show(_Place(kind, records, 0))

    def add(self, candidate: _Candidate) -> None:
        """Let a candidate take part with its next victim, if it has one."""
        entry = candidate.head
        if entry is not None:
            owner = candidate.owner
            rank = self._rank(entry.touched_ns, owner.budget.weight, is_idle=owner.is_idle)
            heappush(self._in_view, (rank, entry.touched_ns, 0, candidate))

    def take_coldest(self) -> _Candidate | None:
        """Take out the candidate whose next victim is the coldest."""
        while self._in_view:
            coldest = heappop(self._in_view)[3]
            if isinstance(coldest, _Candidate):
                return coldest
            kind, records, at = coldest
            for below in range(2 * at + 1, min(2 * at + 3, len(records))):
                self._show(_Place(kind, records, below))
            record = records[at]
            if self._borrowers.is_in_force(kind, record):
                return _Candidate(record.owner)
        return None

    def _show(self, place: _Place) -> None:
        record = place.records[place.at]
        rank = self._rank(record.touched_ns, place.kind.weight, is_idle=place.kind.is_idle)
        heappush(self._in_view, (rank, record.touched_ns, record.serial, place))

    def _rank(self, touched_ns: int, weight: int, *, is_idle: bool) -> int:
        age_ns = self._now_ns - touched_ns
        if is_idle:
            age_ns *= _IDLE_AGE_FACTOR
        return -(age_ns * _WEIGHT_UNIT // weight)


class _Place(NamedTuple):
    """A record in a heap of the borrowers."""

    kind: Kind
    records: Sequence[Record]
    at: int


def _coldest_first(own: _Candidate, borrowers: Borrowers, extent_bytes: int, now_ns: int) -> Iterator[Entry]:
    """Yield the entries that ``own`` may displace, by rules 2 to 4."""
    borrowers.settle(own.owner)
    straddling: list[_Candidate] = []
    contest = _Contest(borrowers, now_ns, straddles=False)
    contest.add(own)
    while (candidate := contest.take_coldest()) is not None:
        head = candidate.head
        assert head is not None, "I5: a borrower without a next victim has no record"
        spare_bytes = candidate.used_bytes - candidate.protected_bytes
        if spare_bytes >= head.extent_bytes or (candidate is own and spare_bytes > 0):
            yield candidate.take()
            contest.add(candidate)
        elif candidate is not own:
            straddling.append(candidate)

    if own.used_bytes + extent_bytes <= own.owner.budget.reserved_bytes:
        contest = _Contest(borrowers, now_ns, straddles=True)
        for candidate in straddling:
            contest.add(candidate)
        while (candidate := contest.take_coldest()) is not None:
            if candidate.used_bytes > candidate.protected_bytes:
                yield candidate.take()
                contest.add(candidate)

    while own.head:
        yield own.take()
