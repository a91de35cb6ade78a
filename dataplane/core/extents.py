"""Which bytes of the arena are free: a best-fit allocator of extents that coalesce.

An extent is a run of whole granules. Free extents are indexed three ways: by start and by end, so that a freed extent
finds both neighbours and merges with them at once, and by exact size, so that an allocation takes the smallest free
extent that is large enough. Sizes are kept in one sorted list: n distinct sizes need at least n(n+1)/2 granules, so a
64 GiB arena of 4 KiB granules never has more than 5,793 of them, and a binary search in C finds the best fit.

One byte for each granule marks where an extent begins, free or not, so that a search in C finds the one before another.

All lengths are integer bytes and multiples of :data:`GRANULE_BYTES`. The allocator keeps no list of what is allocated;
the entries do, and :meth:`dataplane.core.cache.CacheCore.check_invariants` compares the two (I8).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final, NewType

from saltern.errors import InternalError

ArenaOffset = NewType("ArenaOffset", int)  #: bytes from the start of the arena

GRANULE_BYTES: Final = 4096
_GRANULE_SHIFT: Final = 12


def round_up(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to whole granules: what an entry of that size occupies."""
    return (size_bytes + GRANULE_BYTES - 1) & -GRANULE_BYTES


class Extents:
    """Allocator over the offsets 0 to ``capacity_bytes``, which is rounded down to whole granules."""

    __slots__ = (
        "_begins",
        "_size_by_start",
        "_sizes",
        "_start_by_end",
        "_starts_by_size",
        "capacity_bytes",
        "free_bytes",
    )

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes: Final = capacity_bytes & -GRANULE_BYTES
        self.free_bytes = 0
        self._size_by_start: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._starts_by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._begins = bytearray(self.capacity_bytes >> _GRANULE_SHIFT)
        if self.capacity_bytes:
            self._add(0, self.capacity_bytes)
            self._begins[0] = 1
            self.free_bytes = self.capacity_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Length of the longest free extent; 0 if nothing is free."""
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, extent_bytes: int) -> ArenaOffset | None:
        """Take ``extent_bytes`` from the smallest free extent that holds them; None if there is none.

        It fails only when no free extent is long enough: there is no rounding up to size classes.
        """
        sizes = self._sizes
        at = bisect_left(sizes, extent_bytes)
        if at == len(sizes):
            return None
        size = sizes[at]
        starts = self._starts_by_size[size]
        start, _ = starts.popitem()
        if not starts:
            del self._starts_by_size[size], sizes[at]
        del self._size_by_start[start], self._start_by_end[start + size]
        if size > extent_bytes:
            self._add(start + extent_bytes, size - extent_bytes)
            self._begins[start + extent_bytes >> _GRANULE_SHIFT] = 1
        self.free_bytes -= extent_bytes
        # In CPython a sum of large ints keeps room for a carry, 48 bytes in place of 32; a shift makes it exact. The
        # offset lives as long as its entry.
        return ArenaOffset(start >> 0)

    def take(self, offset: ArenaOffset, extent_bytes: int) -> None:
        """Take exactly this extent, such as one that an entry had before a restart or is moved to.

        Raises:
            InternalError: not all of it is free, or it is not whole granules (BAD_EXTENT).
        """
        start: int = offset
        end = start + extent_bytes
        free_start = self._begins.rfind(1, 0, (start >> _GRANULE_SHIFT) + 1) << _GRANULE_SHIFT
        free_end = free_start + self._size_by_start.get(free_start, 0)
        if extent_bytes <= 0 or (start | extent_bytes) % GRANULE_BYTES or not free_start <= start < end <= free_end:
            raise InternalError(f"extent {start}+{extent_bytes} is not free", reason="BAD_EXTENT")
        self._remove(free_start, free_end - free_start)
        if free_start < start:
            self._add(free_start, start - free_start)
            self._begins[start >> _GRANULE_SHIFT] = 1
        if end < free_end:
            self._add(end, free_end - end)
            self._begins[end >> _GRANULE_SHIFT] = 1
        self.free_bytes -= extent_bytes

    def free(self, offset: ArenaOffset, extent_bytes: int) -> None:
        """Give an extent back; it merges with the free extents on both sides.

        Raises:
            InternalError: the extent is not inside the arena, or an end of it is free already.
        """
        start: int = offset
        end = start + extent_bytes
        if start < 0 or extent_bytes <= 0 or end > self.capacity_bytes or start in self._size_by_start:
            raise InternalError(f"extent {start}+{extent_bytes} cannot be freed", reason="BAD_EXTENT")
        before = self._start_by_end.get(start)
        if before is not None:
            self._remove(before, start - before)
            self._begins[start >> _GRANULE_SHIFT] = 0
            start = before
        after_bytes = self._size_by_start.get(end)
        if after_bytes is not None:
            self._remove(end, after_bytes)
            self._begins[end >> _GRANULE_SHIFT] = 0
            end += after_bytes
        self._add(start, end - start)
        self.free_bytes += extent_bytes

    def divide(self, start: int) -> None:
        """Note that an extent begins at ``start``, inside of what was taken at once."""
        self._begins[start >> _GRANULE_SHIFT] = 1

    def free_extents(self) -> list[tuple[int, int]]:
        """Return (start, length in bytes) of every free extent, by start."""
        return sorted(self._size_by_start.items())

    # ---- what lies where, for who looks for room

    def free_from(self, start: int) -> int:
        """Length of the free extent that begins at ``start``; 0 if none does."""
        return self._size_by_start.get(start, 0)

    def free_up_to(self, end: int) -> int:
        """Length of the free extent that ends at ``end``; 0 if none does."""
        return end - self._start_by_end.get(end, end)

    def begin_before(self, end: int) -> int:
        """Where the extent begins, free or not, that ends at ``end``, the end of an extent above 0."""
        return self._begins.rfind(1, 0, end >> _GRANULE_SHIFT) << _GRANULE_SHIFT

    def longest_free(self, count: int) -> list[tuple[int, int]]:
        """Return (start, length in bytes) of the ``count`` longest free extents, longest first."""
        longest = ((start, size) for size in reversed(self._sizes) for start in self._starts_by_size[size])
        return list(islice(longest, count))

    def sizes(self) -> Sequence[int]:
        """Every length that a free extent has, ascending; only to read, until the allocator changes."""
        return self._sizes

    def starts_of(self, size: int) -> Iterator[int]:
        """Where the free extents of exactly this length begin."""
        return iter(self._starts_by_size[size])

    def trial(self) -> TrialFree:
        """Begin a trial: what would be free if some extents were, without freeing them."""
        return TrialFree(self._size_by_start, self._start_by_end)

    def check_invariants(self) -> None:
        """Assert that the three indexes agree, that free extents lie inside the arena and that none touch."""
        extents = self.free_extents()
        previous_end = -1
        for start, size in extents:
            assert size > 0 and start % GRANULE_BYTES == 0 and size % GRANULE_BYTES == 0
            assert start > previous_end, "free extents overlap or were not merged"
            previous_end = start + size
            assert self._start_by_end[previous_end] == start
            assert start in self._starts_by_size[size]
            assert self._begins[start >> _GRANULE_SHIFT]
        assert previous_end <= self.capacity_bytes
        assert len(self._start_by_end) == len(extents) == sum(map(len, self._starts_by_size.values()))
        assert self._sizes == sorted(self._starts_by_size) and all(self._starts_by_size.values())
        assert self.free_bytes == sum(size for _, size in extents)

    def check_begins(self, starts: Sequence[int]) -> None:
        """Assert that extents, free or not, begin exactly at ``starts``."""
        assert all(self._begins[start >> _GRANULE_SHIFT] for start in starts), "an extent's begin is not marked"
        assert self._begins.count(1) == len(starts), "a begin is marked where no extent begins"

    def _add(self, start: int, size: int) -> None:
        self._size_by_start[start] = size
        self._start_by_end[start + size] = start
        starts = self._starts_by_size.get(size)
        if starts is None:
            self._starts_by_size[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None

    def _remove(self, start: int, size: int) -> None:
        del self._size_by_start[start], self._start_by_end[start + size]
        starts = self._starts_by_size[size]
        del starts[start]
        if not starts:
            del self._starts_by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]


class TrialFree:
    """What the free extents would be if the extents given to :meth:`add` were free as well; changes nothing.

    This is how victims are chosen before any is evicted (I6). Valid until the allocator changes.
    """

    __slots__ = ("_run_end_by_start", "_run_start_by_end", "_size_by_start", "_start_by_end")

    def __init__(self, size_by_start: dict[int, int], start_by_end: dict[int, int]) -> None:
        self._size_by_start = size_by_start
        self._start_by_end = start_by_end
        self._run_end_by_start: dict[int, int] = {}
        self._run_start_by_end: dict[int, int] = {}

    def add(self, offset: ArenaOffset, extent_bytes: int) -> tuple[int, int]:
        """Pretend that an extent is free; return (start, end) of the free run that it would be part of.

        A run takes in the free extents at its ends as it grows, and free extents never touch each other: so there is
        either a run or a free extent on each side, and one look is enough.
        """
        start: int = offset
        end = start + extent_bytes
        run_start = self._run_start_by_end.pop(start, None)
        start = self._start_by_end.get(start, start) if run_start is None else run_start
        run_end = self._run_end_by_start.pop(end, None)
        end = end + self._size_by_start.get(end, 0) if run_end is None else run_end
        self._run_end_by_start[start] = end
        self._run_start_by_end[end] = start
        return start, end

    def longest_runs(self, count: int) -> list[tuple[int, int]]:
        """Return (start, length in bytes) of the ``count`` longest runs so far, longest first."""
        runs = ((end - start, -start) for start, end in self._run_end_by_start.items())
        return [(-start, size) for size, start in nlargest(count, runs)]
