"""Who evicts whom: what each tenant's puts have displaced of each other tenant's, for a bounded number of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from saltern.names import TenantId

#: Of 10,000 tenants any two may meet; a node tells of the pairs that met last, and these are enough to see who floods.
PAIRS_MAX: Final = 200


class Displacements:
    """Bytes that one tenant's puts evicted of another's, for the ``pairs_max`` pairs to which that happened last.

    A pair that has to give way and comes back begins at zero, as a counter does that was reset.
    """

    def __init__(self, pairs_max: int = PAIRS_MAX) -> None:
        self._pairs_max = pairs_max
        self._bytes: dict[tuple[TenantId, TenantId], int] = {}  # the pair that is longest without an eviction first

    def add(self, victim: TenantId, taker: TenantId, size_bytes: int) -> None:
        """A put of ``taker`` has evicted an entry of ``victim``."""
        pair = victim, taker
        before_bytes = self._bytes.pop(pair, 0)
        if len(self._bytes) >= self._pairs_max:
            del self._bytes[next(iter(self._bytes))]
        self._bytes[pair] = before_bytes + size_bytes

    def snapshot(self) -> Mapping[tuple[TenantId, TenantId], int]:
        """Lengths of the entries by (victim, taker), as they are now."""
        return dict(self._bytes)
