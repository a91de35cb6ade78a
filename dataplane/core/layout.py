"""Which entry lies where in the arena, for whoever has to move some (:mod:`dataplane.core.compaction`).

Entries of one length cannot fragment the arena, whatever is evicted: every extent that one leaves fits the next. So
the map is kept only from the moment on that two lengths have been there, and a node with blocks of one length does not
pay for it: about 80 bytes an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dataplane.core.entry import Entry


class Layout:
    """Entries in any state by where they begin, once their lengths differ.

    Args:
        everything: yields every entry that occupies memory, also those being written and those only held.
    """

    __slots__ = ("_by_start", "_everything", "_only_bytes")

    def __init__(self, everything: Callable[[], Iterable[Entry]]) -> None:
        self._everything = everything
        self._only_bytes = 0
        self._by_start: dict[int, Entry] | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether entries of more than one length have been there; without that nothing is ever moved."""
        return self._by_start is not None

    def add(self, entry: Entry) -> None:
        """An entry got its memory, and is among everything that there is. The first of a second length is linear."""
        if self._by_start is not None:
            self._by_start[entry.offset] = entry
        elif not self._only_bytes:
            self._only_bytes = entry.extent_bytes
        elif entry.extent_bytes != self._only_bytes:
            self._by_start = {other.offset: other for other in self._everything()}

    def remove(self, entry: Entry) -> None:
        """The memory of an entry is about to be free, or to be another."""
        if self._by_start is not None:
            del self._by_start[entry.offset]

    def at(self, start: int) -> Entry | None:
        """The entry that begins at ``start``; None if none does."""
        assert self._by_start is not None, "nothing is moved where all entries have one length"
        return self._by_start.get(start)

    def check_invariants(self, entries: Iterable[Entry]) -> None:
        """Assert that the map is what ``entries``, all there are, say (I8)."""
        if self._by_start is not None:
            assert self._by_start == {entry.offset: entry for entry in entries}, "I8: an entry is not where it is said"
        else:
            assert {entry.extent_bytes for entry in entries} <= {self._only_bytes}, "two lengths went unnoticed"
