"""The books of one tenant on one tier: what it may hold and what it holds, in integer bytes (I4, I5, I8).

::

    used = resident + in-flight + slack <= limit      at every instant (I4)

*Resident* are the bytes of committed entries, *in-flight* those of puts that have begun, *slack* what rounding up to
granules costs on top of both. An entry is charged when its put starts and credited when its memory is free again, not
when it becomes unreachable: a deleted entry that a reader still holds is still charged.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenants.quota import TierQuota


@dataclass(slots=True)
class TierBudget:
    """Quota and books of one tenant on one tier.

    ``size_bytes`` below is the length of an entry, ``extent_bytes`` the same rounded up to whole granules.

    Attributes:
        reserved_bytes: what it may always use, whoever else holds those bytes now (I5).
        protected_bytes: nobody else takes this tenant's entries while it uses no more than this (I5); the whole
            reservation, or the part of it that the rule in force protects (:mod:`dataplane.core.reservations`).
        limit_bytes: ``used_bytes`` never grows past it (I4).
        soft_mark_bytes: above it the tenant's own coldest entries leave in the background
            (:mod:`dataplane.core.soft_mark`); between the reservation and the limit.
        weight: divides the age of its entries when victims are compared across tenants.
        used_bytes: everything charged, in whole granules.
        resident_bytes: lengths of committed entries.
        in_flight_bytes: lengths of entries being written.
        held_bytes: the part of ``used_bytes`` that cannot be evicted now: being written or being read.
    """

    reserved_bytes: int = 0
    protected_bytes: int = 0
    limit_bytes: int = 0
    soft_mark_bytes: int = 0
    weight: int = 100
    used_bytes: int = 0
    resident_bytes: int = 0
    in_flight_bytes: int = 0
    held_bytes: int = 0

    @property
    def slack_bytes(self) -> int:
        """What rounding up to whole granules costs."""
        return self.used_bytes - self.resident_bytes - self.in_flight_bytes

    @property
    def evictable_bytes(self) -> int:
        """What evicting every entry that nobody holds would free."""
        return self.used_bytes - self.held_bytes

    def set_quota(self, quota: TierQuota, soft_mark_percent: int = 100) -> None:
        """Take over a new quota; what is held stays and may be above the new limit until it is evicted.

        Args:
            soft_mark_percent: the soft mark as a share of the limit; 100 for none.
        """
        self.reserved_bytes = self.protected_bytes = quota.reserved_bytes
        self.limit_bytes = quota.limit_bytes
        self.soft_mark_bytes = max(quota.reserved_bytes, quota.limit_bytes * soft_mark_percent // 100)
        self.weight = quota.weight

    def begin(self, size_bytes: int, extent_bytes: int) -> None:
        """Charge a put that starts."""
        self.used_bytes += extent_bytes
        self.held_bytes += extent_bytes
        self.in_flight_bytes += size_bytes
        assert self.used_bytes <= self.limit_bytes, "I4: charged past the limit"

    def commit(self, size_bytes: int, extent_bytes: int) -> None:
        """What was in flight becomes resident."""
        self.held_bytes -= extent_bytes
        self.in_flight_bytes -= size_bytes
        self.resident_bytes += size_bytes

    def abort(self, size_bytes: int, extent_bytes: int) -> None:
        """Credit a put that ends without an entry."""
        self.used_bytes -= extent_bytes
        self.held_bytes -= extent_bytes
        self.in_flight_bytes -= size_bytes

    def adopt(self, size_bytes: int, extent_bytes: int) -> None:
        """Charge entries that were there before this process; they may be above the limit until they are evicted."""
        self.used_bytes += extent_bytes
        self.resident_bytes += size_bytes

    def hold(self, extent_bytes: int) -> None:
        """An entry got its first reader."""
        self.held_bytes += extent_bytes

    def unhold(self, extent_bytes: int) -> None:
        """An entry lost its last reader."""
        self.held_bytes -= extent_bytes

    def release(self, size_bytes: int, extent_bytes: int) -> None:
        """Credit a committed entry that nobody holds and whose memory is free again."""
        self.used_bytes -= extent_bytes
        self.resident_bytes -= size_bytes
