"""What an eviction policy is to the core: an order over the entries of one tenant.

A policy decides within a tenant only; between tenants decide the reservations and the age of the coldest entry
(:mod:`dataplane.core.victims`). The core calls it for every committed entry and tells it about nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from dataplane.core.entry import Entry


class EvictionOrder(Protocol):
    """Order in which one tenant's entries leave. Every method but ``__iter__`` takes constant time."""

    def insert(self, entry: Entry) -> None:
        """A put was committed."""

    def touch(self, entry: Entry) -> None:
        """An entry was used. A batch is touched last key first, so that the head of a chain outlives its tail."""

    def remove(self, entry: Entry) -> None:
        """An entry was evicted, deleted or dropped."""

    def __iter__(self) -> Iterator[Entry]:
        """Entries from the next victim on; the caller skips pinned ones and changes nothing while it iterates."""
