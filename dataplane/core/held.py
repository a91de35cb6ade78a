"""How much tenants may hold beyond their reservations, so that transfers cannot keep an owner from its own (I5).

Bytes that are being written or read cannot be evicted. What a tenant *holds beyond* its reservation is the part of them
that somebody else's reservation may be waiting for::

    held beyond = sum over tenants of max(0, held - reserved)
                <= capacity - sum of reservations + margin

The first two terms are what is promised to nobody: with a margin of nothing, every byte of every reservation could be
had at once, and where all of the capacity is reserved nobody could use what others leave idle. So up to the margin, one
part in 16 of the capacity, may be lent to transfers: a tenant that grows within its reservation lacks bytes only while
less than the margin of all reservations is idle, and no longer than those transfers last, which the doors bound.

A put past the bound is refused, and a get serves the front of its batch and misses the rest (I10: a full node is a
miss). A single entry is always let through, or a tenant without a reservation could do nothing on a small node. What a
tenant holds within its reservation is never counted and never refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from dataplane.core.tenant_cache import PartitionIndex, TenantCache
from saltern.keys import BlockKey

#: The margin is one part in so many of the capacity.
MARGIN_PARTS: Final = 16


class HeldBeyond:
    """What all tenants together hold beyond their reservations, kept up to date.

    Attributes:
        beyond_bytes: the sum; may be above the bound after a new policy, and then only falls.
    """

    __slots__ = ("_beyond_of", "_capacity_bytes", "_shared_bytes", "beyond_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._beyond_of: dict[TenantCache, int] = {}
        self.beyond_bytes = 0
        self.set_reserved(0)

    def set_reserved(self, reserved_bytes: int) -> None:
        """Follow a new policy, whose reservations sum up to ``reserved_bytes``."""
        self._shared_bytes = self._capacity_bytes - reserved_bytes + self._capacity_bytes // MARGIN_PARTS

    def note(self, owner: TenantCache) -> None:
        """What ``owner`` holds or has reserved changed."""
        budget = owner.budget
        beyond_bytes = budget.held_bytes - budget.reserved_bytes
        if beyond_bytes > 0:
            self.beyond_bytes += beyond_bytes - self._beyond_of.get(owner, 0)
            self._beyond_of[owner] = beyond_bytes
        elif owner in self._beyond_of:
            self.forget(owner)

    def forget(self, owner: TenantCache) -> None:
        """The tenant is gone, or holds nothing beyond its reservation any more."""
        self.beyond_bytes -= self._beyond_of.pop(owner, 0)

    def most_bytes(self, owner: TenantCache) -> int:
        """What ``owner`` may hold in all, but for a single entry."""
        others_bytes = self.beyond_bytes - self._beyond_of.get(owner, 0)
        return owner.budget.reserved_bytes + max(0, self._shared_bytes - others_bytes)

    def may_hold(self, owner: TenantCache, extent_bytes: int) -> bool:
        """Whether ``owner`` may hold an entry more."""
        held_bytes = owner.budget.held_bytes
        return held_bytes + extent_bytes <= self.most_bytes(owner) or self._is_first(owner, held_bytes)

    def servable(self, index: PartitionIndex, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys``, from the first on, can be read at once."""
        owner = index.owner
        held_bytes, most_bytes = owner.budget.held_bytes, self.most_bytes(owner)
        taken = set()
        for position, key in enumerate(keys):
            entry = index.entries.get(key)
            if entry is None or entry.pins or key in taken:
                continue
            if held_bytes + entry.extent_bytes > most_bytes and not self._is_first(owner, held_bytes):
                return position
            taken.add(key)
            held_bytes += entry.extent_bytes
        return len(keys)

    def check_invariants(self, owners: Iterable[TenantCache]) -> None:
        """Assert that the sum is that of ``owners``, who are all there are."""
        beyond = {owner: owner.budget.held_bytes - owner.budget.reserved_bytes for owner in owners}
        assert self._beyond_of == {owner: held for owner, held in beyond.items() if held > 0}, "I5: held beyond"
        assert self.beyond_bytes == sum(self._beyond_of.values()), "I5: sum of what is held beyond"

    def _is_first(self, owner: TenantCache, held_bytes: int) -> bool:
        """Whether nobody holds anything beyond, ``owner`` included if it holds ``held_bytes``."""
        return self.beyond_bytes == self._beyond_of.get(owner, 0) and held_bytes <= owner.budget.reserved_bytes
