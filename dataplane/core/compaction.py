"""Room for a large entry where enough bytes are free, or may be, but scattered: which entries to move, and where to.

Best fit keeps most of the arena whole, but an entry below its owner's protected line stays where it is, and n of them
evenly spread leave no run longer than capacity / (n + 1). So that a tenant gets what budgets allow in entries of any
length (I5), a put whose victims make no run may have entries *moved*: bytes copied within the arena, nobody loses
anything.

A plan grows a region of the arena around a free run, past the smaller of its two neighbours at a time, until what is
free in it is enough. A neighbour is moved to the smallest hole elsewhere that takes it; if there is none, it stays in
the region and is pushed to its near end at last. Several free runs are tried, the longest first, and the plan that
moves the fewest bytes is taken. What may be evicted counts as free, and only what lies in the region or in a hole that
is used really is evicted.

Rules upheld here: an entry that is being read or written never moves and bounds the region (I7); planning changes
nothing, so a put that is refused has moved and evicted nothing (I6). Work is bounded by the put's own length: bytes
moved by :data:`MOVED_FACTOR` times that and :data:`MOVED_MAX_BYTES`, extents looked at by :class:`Looks`. Same state,
same plan: the order of what is tried depends on lengths and places alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dataplane.core.entry import Entry, EntryState
from dataplane.core.extents import GRANULE_BYTES, Extents, TrialFree
from dataplane.core.layout import Layout

#: One put moves at most so many times its own bytes.
MOVED_FACTOR: Final = 3
#: One put moves at most so many bytes: about 30 ms of one core.
MOVED_MAX_BYTES: Final = 192 * 1024 * 1024
#: Free runs, and runs that evictions would make, that a plan is tried around.
_STARTS_MAX: Final = 8
#: A plan that moves no more than one part in so many of the put's bytes is taken without looking for a cheaper one.
GOOD_ENOUGH_PARTS: Final = 4
#: Looks that every put has, however small; a larger one has as many as four of its lengths in single granules.
_LOOKS_LEAST: Final = 256

_WRITING: Final = EntryState.WRITING  # an enum's member costs a descriptor call at each use in Python 3.11
_DETACHED: Final = EntryState.DETACHED


class Move(NamedTuple):
    """Copy ``size_bytes`` from ``source`` to ``target``, offsets in the arena. The two may overlap."""

    source: int
    target: int
    size_bytes: int


#: Copies within the arena, one move after the other, all of them before it returns.
Relocate = Callable[[Sequence[Move]], None]


@dataclass(slots=True)
class Looks:
    """How many extents one put may still look at: planning takes less time than the put's bytes take to arrive."""

    left: int

    @classmethod
    def of(cls, extent_bytes: int) -> Looks:
        return cls(_LOOKS_LEAST + 4 * extent_bytes // GRANULE_BYTES)


@dataclass(slots=True)
class Plan:
    """How to make one free extent.

    Attributes:
        leaving: entries that have to be evicted first, of those that may be.
        moves: (entry, its new offset), in the order in which the bytes can be copied.
        moved_bytes: whole granules that are copied.
    """

    leaving: set[Entry]
    moves: list[tuple[Entry, int]]
    moved_bytes: int


def plan_room(
    extents: Extents, layout: Layout, trial: TrialFree, leaving: Sequence[Entry], *, extent_bytes: int, looks: Looks
) -> Plan | None:
    """Plan the moves, and the evictions among ``leaving``, that make a free extent of ``extent_bytes``.

    Args:
        trial: what would be free without ``leaving``, which may be evicted but need not be.
        looks: what may be looked at; what was is taken off.

    Returns:
        The cheapest plan found; None if there is none within the bounds. Nothing is changed either way.
    """
    longest = dict(extents.longest_free(_STARTS_MAX)) | dict(trial.longest_runs(_STARTS_MAX))
    starts = sorted(longest, key=lambda start: (-longest[start], start))
    evictable = set(leaving)
    by_size: dict[int, list[Entry]] = {}
    for entry in leaving:
        by_size.setdefault(entry.extent_bytes, []).append(entry)
    best: Plan | None = None
    most_bytes = min(MOVED_FACTOR * extent_bytes, MOVED_MAX_BYTES)
    for start in starts:
        region = _Region(extents, layout, evictable, _Holes(extents, by_size, looks), start)
        plan = region.grow(extent_bytes, most_bytes, looks)
        if plan is not None:
            best, most_bytes = plan, min(most_bytes, plan.moved_bytes) - GRANULE_BYTES
        if looks.left <= 0 or (best is not None and best.moved_bytes <= extent_bytes // GOOD_ENOUGH_PARTS):
            break
    return best


@dataclass(slots=True, init=False)
class _Holes:
    """Where entries could be moved to: free extents by best fit, then extents of entries that may be evicted.

    Attributes:
        used: start of every hole that is used, to the entry that must be evicted for it.
    """

    used: dict[int, Entry | None]
    _extents: Extents
    _by_size: dict[int, list[Entry]]
    _evictable_sizes: list[int]
    _looks: Looks
    _free: dict[int, Iterator[int]]
    _evictable: dict[int, Iterator[Entry]]
    _rests: list[tuple[int, int]]

    def __init__(self, extents: Extents, by_size: dict[int, list[Entry]], looks: Looks) -> None:
        self.used = {}
        self._extents = extents
        self._by_size = by_size
        self._evictable_sizes = sorted(by_size)
        self._looks = looks
        self._free = {}
        self._evictable = {}
        self._rests = []  # what is left of holes that are used, as (length, start)

    def take(self, extent_bytes: int, start: int, end: int) -> int | None:
        """Take a place for ``extent_bytes`` outside of ``start`` to ``end``; None if there is none."""
        at = bisect_left(self._rests, (extent_bytes, 0))
        rest_bytes = self._rests[at][0] if at < len(self._rests) else None
        hole = self._next_free(extent_bytes, rest_bytes, start, end)
        if hole is None and rest_bytes is not None:
            rest_bytes, target = self._rests.pop(at)
            hole = target, rest_bytes
        elif hole is None:
            hole = self._next_evictable(extent_bytes, start, end)
        if hole is None:
            return None
        target, hole_bytes = hole
        if hole_bytes > extent_bytes:
            insort(self._rests, (hole_bytes - extent_bytes, target + extent_bytes))
        return target

    def _next_free(self, extent_bytes: int, below_bytes: int | None, start: int, end: int) -> tuple[int, int] | None:
        """Use the smallest free extent that takes ``extent_bytes``, if it is shorter than ``below_bytes``."""
        sizes = self._extents.sizes()
        for at in range(bisect_left(sizes, extent_bytes), len(sizes)):
            size = sizes[at]
            if (below_bytes is not None and size >= below_bytes) or self._looks.left <= 0:
                break
            places = self._free.get(size)
            if places is None:
                places = self._free[size] = self._extents.starts_of(size)
            self._looks.left -= 1
            for place in places:
                if not start <= place < end:
                    self.used[place] = None
                    return place, size
        return None

    def _next_evictable(self, extent_bytes: int, start: int, end: int) -> tuple[int, int] | None:
        """Use the smallest entry that may be evicted and makes room for ``extent_bytes``."""
        sizes = self._evictable_sizes
        for at in range(bisect_left(sizes, extent_bytes), len(sizes)):
            if self._looks.left <= 0:
                break
            entries = self._evictable.get(sizes[at])
            if entries is None:
                entries = self._evictable[sizes[at]] = iter(self._by_size[sizes[at]])
            self._looks.left -= 1
            for entry in entries:
                if not start <= entry.offset < end:
                    self.used[entry.offset] = entry
                    return entry.offset, sizes[at]
        return None


@dataclass(slots=True)
class _Region:
    """A stretch of the arena, from ``start`` to ``end``, that is to become one free run and what is pushed aside."""

    extents: Extents
    layout: Layout
    evictable: set[Entry]
    holes: _Holes
    start: int
    end: int = field(init=False)
    free_bytes: int = 0
    moved_bytes: int = 0
    leaving: set[Entry] = field(default_factory=set)
    out: list[tuple[Entry, int]] = field(default_factory=list)
    aside: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.start

    def grow(self, wanted_bytes: int, most_bytes: int, looks: Looks) -> Plan | None:
        """Grow until ``wanted_bytes`` are free in it; None if that moves more than ``most_bytes`` or cannot be."""
        while self.free_bytes < wanted_bytes:
            if looks.left <= 0:
                return None
            looks.left -= 1
            if self._take_in_free():
                continue
            before, after = self._before(), self._after()
            if (before is not None and self._take_in_evictable(before)) or (
                after is not None and self._take_in_evictable(after)
            ):
                continue
            obstacle = _smaller_movable(before, after)
            if obstacle is None or self.moved_bytes + obstacle.extent_bytes > most_bytes:
                return None
            self._move(obstacle)
        return self._plan()

    def _take_in_free(self) -> bool:
        """Take in the free extents at both ends, unless something is to be moved there; whether there were any."""
        used = self.holes.used
        before_bytes = self.extents.free_up_to(self.start)
        if before_bytes and self.start - before_bytes not in used:
            self.start -= before_bytes
            self.free_bytes += before_bytes
            return True
        after_bytes = self.extents.free_from(self.end)
        if after_bytes and self.end not in used:
            self.end += after_bytes
            self.free_bytes += after_bytes
            return True
        return False

    def _before(self) -> Entry | None:
        """The entry that ends where the region begins, if the region can grow past it."""
        if not self.start or self.extents.free_up_to(self.start):
            return None
        entry = self.layout.at(self.extents.begin_before(self.start))
        return None if entry is None or entry.offset in self.holes.used else entry

    def _after(self) -> Entry | None:
        """The entry that begins where the region ends, if the region can grow past it."""
        entry = self.layout.at(self.end)
        return None if entry is None or entry.offset in self.holes.used else entry

    def _take_in_evictable(self, entry: Entry) -> bool:
        if entry not in self.evictable:
            return False
        self.leaving.add(entry)
        self._take_in(entry)
        self.free_bytes += entry.extent_bytes
        return True

    def _move(self, entry: Entry) -> None:
        """Move an entry out of the region if there is a place for it, else aside."""
        self._take_in(entry)
        self.moved_bytes += entry.extent_bytes
        target = self.holes.take(entry.extent_bytes, self.start, self.end)
        if target is None:
            self.aside.append(entry)
        else:
            self.out.append((entry, target))
            self.free_bytes += entry.extent_bytes

    def _take_in(self, entry: Entry) -> None:
        if entry.offset < self.start:
            self.start = entry.offset
        else:
            self.end += entry.extent_bytes

    def _plan(self) -> Plan:
        """First what goes out, to places where nothing lies; then what is pushed to the region's begin, in order.

        So each copy's target is free, or was left by an earlier one, or is a part of its own source.
        """
        moves = list(self.out)
        moved_bytes = sum(entry.extent_bytes for entry, _ in moves)
        place = self.start
        for entry in sorted(self.aside, key=lambda aside: aside.offset):
            if entry.offset != place:
                moves.append((entry, place))
                moved_bytes += entry.extent_bytes
            place += entry.extent_bytes
        leaving = self.leaving | {entry for entry in self.holes.used.values() if entry is not None}
        return Plan(leaving, moves, moved_bytes)


def _smaller_movable(before: Entry | None, after: Entry | None) -> Entry | None:
    """The smaller of two entries among those that nobody reads or writes (I7)."""
    if before is None or not _is_movable(before):
        return after if after is not None and _is_movable(after) else None
    if after is None or not _is_movable(after) or before.extent_bytes <= after.extent_bytes:
        return before
    return after


def _is_movable(entry: Entry) -> bool:
    return not entry.pins and entry.state is not _WRITING and entry.state is not _DETACHED
