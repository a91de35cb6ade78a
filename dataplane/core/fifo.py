"""First in, first out."""

from __future__ import annotations

from dataplane.core.entry import Entry
from dataplane.core.lru import LruOrder


class FifoOrder(LruOrder):
    """Entries of one tenant by the time of their put; use changes nothing. Implements EvictionOrder."""

    __slots__ = ()

    def touch(self, entry: Entry) -> None:
        """Reading an entry does not make it younger."""

    def refresh(self, entry: Entry) -> None:
        """Neither does putting its batch in order."""
