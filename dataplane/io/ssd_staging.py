"""Staging memory: where records lie from the moment DRAM gives them up until they are on the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from dataplane.core.extents import ArenaOffset, Extents
from dataplane.io.arena import Arena
from saltern.names import TenantId


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A piece of staging memory; ``tenant`` whose share it counts against, None for a relocation."""

    offset: ArenaOffset
    extent_bytes: int
    memory: memoryview
    tenant: TenantId | None

    def is_before(self, other: Slot) -> bool:
        """Whether ``other`` follows right after this in memory."""
        return self.offset + self.extent_bytes == other.offset


class Staging:
    """``capacity_bytes`` of page-aligned memory, of which one tenant's demotions have at most half (I10).

    What relocations take is bounded by the reclaim that asked for them.
    """

    def __init__(self, capacity_bytes: int, *, prefault: bool = False) -> None:
        self.capacity_bytes: Final = capacity_bytes
        self._arena = Arena(capacity_bytes, prefault=prefault)
        self._extents = Extents(capacity_bytes)
        self._shares: Counter[TenantId] = Counter()

    @property
    def used_bytes(self) -> int:
        return self._extents.capacity_bytes - self._extents.free_bytes

    def take(self, extent_bytes: int, tenant: TenantId | None) -> Slot | None:
        """Memory for one record; None if there is none, or not for this tenant."""
        if tenant is not None and 2 * (self._shares[tenant] + extent_bytes) > self.capacity_bytes:
            return None
        offset = self._extents.allocate(extent_bytes)
        if offset is None:
            return None
        if tenant is not None:
            self._shares[tenant] += extent_bytes
        return Slot(offset, extent_bytes, self._arena.view(offset, extent_bytes), tenant)

    def give_back(self, slot: Slot) -> None:
        self._extents.free(slot.offset, slot.extent_bytes)
        if slot.tenant is not None:
            take_off(self._shares, slot.tenant, slot.extent_bytes)

    def span(self, first: Slot, size_bytes: int) -> memoryview:
        """The memory of slots that follow each other, from ``first`` on."""
        return self._arena.view(first.offset, size_bytes)

    def close(self) -> None:
        self._arena.close()


def take_off(counts: Counter[TenantId], tenant: TenantId, amount: int) -> None:
    """Lower a tenant's count, and keep no record of a tenant that has nothing."""
    counts[tenant] -= amount
    if not counts[tenant]:
        del counts[tenant]
