"""The default order: least recently used, where an entry nobody has read yet ages faster the more the cache thrashes.

Entries wait in one of two LRU queues: *new* ones, which have only been put, and *proven* ones, which have been read
since or came back soon after they were evicted. The next victim is the coldest of either queue, and a new entry's age
counts ``pressure`` times::

    pressure = 1 + 4 * (keys that came back soon after their eviction) / (hits)

A cache that is large enough sees few evicted keys again, so the pressure is 1 and this is plain LRU, entry for entry.
A cache that is far too small would under LRU drop every chain just before its next turn; with a high pressure the
chains that have proven themselves stay, and those that pass through once leave first. Nothing is tuned to a workload:
the ratio is measured by the cache itself, over about as many uses as it has entries.

The queues are those of 2Q (Johnson and Shasha, VLDB 1994); weighing ages in place of fixed queue lengths, and taking
the weight from ghost hits, makes the borderline with LRU smooth. It contains nothing of ARC (US 6,996,676).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

from dataplane.core.entry import Entry
from dataplane.core.ghosts import GhostTable
from dataplane.core.lru import LruOrder

_GHOST_WEIGHT: Final = 4
_PRESSURE_MAX: Final = 64
#: Entries touched so lately belong to the batch in progress, whose touches are a nanosecond apart.
_SAME_BATCH_NS: Final = 1_000_000
#: A key counts as evicted too early if it comes back within as many evictions as there are entries, times this.
_GHOSTS_PER_ENTRY: Final = 1
#: Uses over which the pressure is measured, beyond one for each entry.
_WINDOW_LEAST: Final = 64


class TwoQueueOrder:
    """Implements EvictionOrder. Constant time; at most 64 bytes of ghosts for each entry, none before it evicts."""

    __slots__ = ("_entries", "_ghost_hits", "_ghosts", "_hits", "_new", "_now_ns", "_proven")

    def __init__(self) -> None:
        self._new = LruOrder()
        self._proven = LruOrder()
        self._ghosts: GhostTable | None = None
        self._entries = 0
        self._hits = 1
        self._ghost_hits = 0
        self._now_ns = 0  # the tenant's own clock: it stands while the tenant is idle

    def insert(self, entry: Entry) -> None:
        self._now_ns = entry.touched_ns
        self._entries += 1
        ghosts = self._ghosts
        entry.is_proven = ghosts is not None and ghosts.take(entry.key, _GHOSTS_PER_ENTRY * self._entries)
        if entry.is_proven:
            self._ghost_hits += 1
            self._age_counters()
            self._proven.insert(entry)
        else:
            self._new.insert(entry)

    def touch(self, entry: Entry) -> None:
        self._now_ns = entry.touched_ns
        self._hits += 1
        self._age_counters()
        if entry.is_proven:
            self._proven.touch(entry)
            return
        self._new.remove(entry)
        entry.is_proven = True
        self._proven.insert(entry)

    def refresh(self, entry: Entry) -> None:
        self._now_ns = entry.touched_ns
        (self._proven if entry.is_proven else self._new).touch(entry)

    def evict(self, entry: Entry) -> None:
        if self._ghosts is None:
            self._ghosts = GhostTable(self._entries)
        else:
            self._ghosts.grow(self._entries)
        self._ghosts.add(entry.key)
        self.remove(entry)

    def remove(self, entry: Entry) -> None:
        self._entries -= 1
        (self._proven if entry.is_proven else self._new).remove(entry)

    def adopt(self, entry: Entry) -> None:
        """The keys evicted before the restart are forgotten: a ghost more or less moves the pressure by little."""
        self._now_ns = max(self._now_ns, entry.touched_ns)
        self._entries += 1
        (self._proven if entry.is_proven else self._new).insert(entry)

    @property
    def counts(self) -> Sequence[int]:
        return self._hits, self._ghost_hits

    @counts.setter
    def counts(self, counts: Sequence[int]) -> None:
        if len(counts) == 2 and counts[0] >= 1 and counts[1] >= 0:
            self._hits, self._ghost_hits = counts

    def first(self) -> Entry | None:
        return next(iter(self), None)

    def __iter__(self) -> Iterator[Entry]:
        """The coldest first, by weighted age; integers only, so every machine chooses alike."""
        now_ns, hits = self._now_ns, self._hits
        pressed = min(hits + _GHOST_WEIGHT * self._ghost_hits, _PRESSURE_MAX * hits)
        new_end, proven_end = self._new.root, self._proven.root
        new, proven = cast("Entry", new_end.warmer), cast("Entry", proven_end.warmer)
        while new is not new_end or proven is not proven_end:
            if proven is proven_end or (
                new is not new_end and _is_colder(now_ns - new.touched_ns, now_ns - proven.touched_ns, pressed, hits)
            ):
                yield new
                new = cast("Entry", new.warmer)
            else:
                yield proven
                proven = cast("Entry", proven.warmer)

    def _age_counters(self) -> None:
        """Halve the counts when they cover as many uses as there are entries, so that the pressure follows the load."""
        if self._hits + self._ghost_hits > self._entries + _WINDOW_LEAST:
            self._hits = (self._hits >> 1) | 1
            self._ghost_hits >>= 1


def _is_colder(new_age_ns: int, proven_age_ns: int, pressed: int, hits: int) -> bool:
    """Whether the new entry goes first. Within one batch age is only the place in the chain: plain LRU there."""
    if proven_age_ns < _SAME_BATCH_NS:
        return new_age_ns >= proven_age_ns
    return new_age_ns * pressed >= proven_age_ns * hits
