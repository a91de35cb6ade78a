"""Least recently used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from dataplane.core.entry import Entry, Link


class LruOrder:
    """Entries of one tenant by last use, in a ring through the entries themselves; implements EvictionOrder.

    Attributes:
        root: where the ring begins and ends; ``root.warmer`` is the coldest entry, ``root.colder`` the warmest.
    """

    __slots__ = ("root",)

    def __init__(self) -> None:
        self.root = root = Link()
        root.colder = root.warmer = root

    def __del__(self) -> None:
        # The ring is a circle even when it is empty, and would stay until a full pass of the collector, which a node
        # that is always busy never makes (dataplane.io.garbage).
        del self.root.colder, self.root.warmer

    def insert(self, entry: Entry) -> None:
        root = self.root
        warmest = root.colder
        entry.colder, entry.warmer = warmest, root
        warmest.warmer = root.colder = entry

    def touch(self, entry: Entry) -> None:
        root = self.root
        colder, warmer = entry.colder, entry.warmer
        if warmer is root:
            return
        colder.warmer, warmer.colder = warmer, colder
        warmest = root.colder
        entry.colder, entry.warmer = warmest, root
        warmest.warmer = root.colder = entry

    def refresh(self, entry: Entry) -> None:
        self.touch(entry)

    def remove(self, entry: Entry) -> None:
        colder, warmer = entry.colder, entry.warmer
        colder.warmer, warmer.colder = warmer, colder
        del entry.colder, entry.warmer  # a removed entry keeps no neighbour alive

    evict = remove

    def adopt(self, entry: Entry) -> None:
        self.insert(entry)

    @property
    def counts(self) -> Sequence[int]:
        return ()

    @counts.setter
    def counts(self, counts: Sequence[int]) -> None:
        """There is nothing to measure."""

    def first(self) -> Entry | None:
        root = self.root
        link = root.warmer
        return None if link is root else cast("Entry", link)

    def __iter__(self) -> Iterator[Entry]:
        root = self.root
        link = root.warmer
        while link is not root:
            yield cast("Entry", link)
            link = link.warmer
