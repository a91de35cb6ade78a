"""Quotas: what a tenant is promised, may hold and how it fares under pressure, for each tier; integer bytes only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from saltern.errors import FailedPreconditionError, InvalidArgumentError

RATE_MAX = 2**40  #: operations or bytes in a second
BYTES_MAX = 2**53  #: 9 PB; keeps sums inside what Postgres, JSON and every client language hold exactly
WEIGHT_DEFAULT = 100
WEIGHT_MAX = 1000


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(
            f"quota {field} {value!r} is outside {low}..{high}",
            reason="QUOTA_OUT_OF_RANGE",
            hint=f"give {field} as an integer from {low} to {high}",
            metadata={"field": field},
        )


class Tier(StrEnum):
    """Where entries live."""

    DRAM = "dram"
    SSD = "ssd"


@dataclass(frozen=True, slots=True)
class TierQuota:
    """Quota of one tenant on one tier.

    Attributes:
        reserved_bytes: what no other tenant can take (I5); at most ``limit_bytes``.
        limit_bytes: what is never passed (I4).
        weight: relative claim to what is not reserved, 1 to 1000.

    Raises:
        InvalidArgumentError: a value is out of range or the reservation is above the limit.
    """

    reserved_bytes: int
    limit_bytes: int
    weight: int = WEIGHT_DEFAULT

    def __post_init__(self) -> None:
        _check_range("reserved_bytes", self.reserved_bytes, 0, BYTES_MAX)
        _check_range("limit_bytes", self.limit_bytes, 0, BYTES_MAX)
        _check_range("weight", self.weight, 1, WEIGHT_MAX)
        if self.reserved_bytes > self.limit_bytes:
            raise InvalidArgumentError(
                f"reserved_bytes {self.reserved_bytes} is above limit_bytes {self.limit_bytes}",
                reason="RESERVATION_ABOVE_LIMIT",
                hint="raise the limit or lower the reservation",
            )


@dataclass(frozen=True, slots=True)
class RateLimits:
    """How fast one tenant may use a node, whatever it holds; 0 is no limit.

    Attributes:
        operations_per_s: entries asked for, stored or removed, and every request at least one.
        bytes_per_s: bytes of entries moved to and from clients.
        ssd_write_bytes_per_s: bytes written to SSD, against wear.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    operations_per_s: int = 0
    bytes_per_s: int = 0
    ssd_write_bytes_per_s: int = 0

    def __post_init__(self) -> None:
        _check_range("operations_per_s", self.operations_per_s, 0, RATE_MAX)
        _check_range("bytes_per_s", self.bytes_per_s, 0, RATE_MAX)
        _check_range("ssd_write_bytes_per_s", self.ssd_write_bytes_per_s, 0, RATE_MAX)


NO_RATE_LIMITS = RateLimits()


def check_reservations(reservations_bytes: Iterable[int], capacity_bytes: int, tier: Tier) -> None:
    """I5: the sum of all reservations on a tier must fit its capacity.

    Raises:
        FailedPreconditionError: it does not; the message holds both sums.
    """
    total_bytes = sum(reservations_bytes)
    if total_bytes > capacity_bytes:
        raise FailedPreconditionError(
            f"reservations on {tier.value} would add up to {total_bytes} bytes, above the capacity of {capacity_bytes}",
            reason="RESERVATIONS_ABOVE_CAPACITY",
            hint="reserve less, lower another tenant's reservation, or add a node",
            metadata={
                "tier": tier.value,
                "reserved_bytes": str(total_bytes),
                "capacity_bytes": str(capacity_bytes),
            },
        )
