"""What an eviction policy is to the core: an order over the entries of one tenant; and the orders there are.

A policy decides within a tenant only; between tenants decide the reservations and the age of the next victim
(:mod:`dataplane.core.victims`). The core calls it for every committed entry and tells it about nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final, Protocol

from dataplane.core.entry import Entry
from dataplane.core.fifo import FifoOrder
from dataplane.core.lru import LruOrder
from dataplane.core.two_queue import TwoQueueOrder


class EvictionOrder(Protocol):
    """Order in which one tenant's entries leave. Every method but ``__iter__`` takes constant time."""

    def insert(self, entry: Entry) -> None:
        """A put was committed."""

    def touch(self, entry: Entry) -> None:
        """An entry was read. A batch is touched last key first, so that the head of a chain outlives its tail."""

    def refresh(self, entry: Entry) -> None:
        """An entry is as young as after a touch, but nobody read it: the batch it was put with is now in order."""

    def evict(self, entry: Entry) -> None:
        """An entry left to make room."""

    def remove(self, entry: Entry) -> None:
        """An entry was deleted or dropped; nobody wants it back."""

    def adopt(self, entry: Entry) -> None:
        """An entry of an earlier process is back (:mod:`dataplane.core.adoption`); they come from the coldest on.

        Its ``touched_ns`` and ``is_proven`` are what they were.
        """

    @property
    def counts(self) -> Sequence[int]:
        """What the order has measured of its load, to be set again after a restart; may be empty."""

    @counts.setter
    def counts(self, counts: Sequence[int]) -> None:
        """Go on from ``counts``; those that this order could not have given are ignored."""

    def first(self) -> Entry | None:
        """The next victim, whether somebody holds it or not; None if there is no entry."""

    def __iter__(self) -> Iterator[Entry]:
        """Entries from the next victim on; the caller skips pinned ones and changes nothing while it iterates."""


class Eviction(StrEnum):
    """The orders that a node can be started with; docs/eviction.md compares them on real traces."""

    TWO_QUEUE = "two-queue"
    LRU = "lru"
    FIFO = "fifo"


DEFAULT_EVICTION: Final = Eviction.TWO_QUEUE

_ORDERS: Final[dict[Eviction, Callable[[], EvictionOrder]]] = {
    Eviction.TWO_QUEUE: TwoQueueOrder,
    Eviction.LRU: LruOrder,
    Eviction.FIFO: FifoOrder,
}


def new_order(eviction: Eviction) -> EvictionOrder:
    """Make an empty order for one tenant."""
    return _ORDERS[eviction]()
