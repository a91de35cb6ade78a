"""Quotas: integers in range, reservations inside limits and inside capacity (I5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern.errors import FailedPreconditionError, InvalidArgumentError
from tenants.quota import (
    BYTES_MAX,
    NO_RATE_LIMITS,
    RATE_MAX,
    WEIGHT_DEFAULT,
    WEIGHT_MAX,
    RateLimits,
    Tier,
    TierQuota,
    check_reservations,
)

sizes = st.integers(0, BYTES_MAX)


@given(sizes, sizes, st.integers(1, WEIGHT_MAX))
def test_a_quota_in_range_is_what_was_given(one: int, other: int, weight: int) -> None:
    reserved_bytes, limit_bytes = sorted((one, other))
    quota = TierQuota(reserved_bytes, limit_bytes, weight)
    assert (quota.reserved_bytes, quota.limit_bytes, quota.weight) == (reserved_bytes, limit_bytes, weight)
    assert TierQuota(0, 0).weight == WEIGHT_DEFAULT


@given(sizes, st.integers(1, BYTES_MAX))
def test_i5_a_reservation_above_the_limit_is_refused(limit_bytes: int, above: int) -> None:
    if limit_bytes + above <= BYTES_MAX:
        with pytest.raises(InvalidArgumentError) as caught:
            TierQuota(limit_bytes + above, limit_bytes)
        assert caught.value.reason == "RESERVATION_ABOVE_LIMIT"


@pytest.mark.parametrize(
    ("reserved_bytes", "limit_bytes", "weight", "field"),
    [
        (-1, 0, 1, "reserved_bytes"),
        (0, -1, 1, "limit_bytes"),
        (0, BYTES_MAX + 1, 1, "limit_bytes"),
        (0, 0, 0, "weight"),
        (0, 0, WEIGHT_MAX + 1, "weight"),
        (0.5, 1, 1, "reserved_bytes"),
        (0, 1e9, 1, "limit_bytes"),
        (0, "1", 1, "limit_bytes"),
        (False, 1, 1, "reserved_bytes"),
        (0, True, 1, "limit_bytes"),
        (0, None, 1, "limit_bytes"),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    reserved_bytes: object, limit_bytes: object, weight: object, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        TierQuota(reserved_bytes, limit_bytes, weight)  # type: ignore[arg-type]
    assert caught.value.reason == "QUOTA_OUT_OF_RANGE"
    assert caught.value.metadata == {"field": field}
    assert field in caught.value.hint


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 5000))
def test_i5_the_sum_of_reservations_is_at_most_the_capacity(reservations: list[int], capacity_bytes: int) -> None:
    if sum(reservations) <= capacity_bytes:
        check_reservations(iter(reservations), capacity_bytes, Tier.DRAM)
        return
    with pytest.raises(FailedPreconditionError) as caught:
        check_reservations(iter(reservations), capacity_bytes, Tier.DRAM)
    assert caught.value.metadata == {
        "tier": "dram",
        "reserved_bytes": str(sum(reservations)),
        "capacity_bytes": str(capacity_bytes),
    }


@pytest.mark.parametrize("field", ["operations_per_s", "bytes_per_s", "ssd_write_bytes_per_s"])
def test_rate_limits_are_integers_in_range_and_0_means_none(field: str) -> None:
    assert getattr(NO_RATE_LIMITS, field) == 0
    assert getattr(RateLimits(**{field: RATE_MAX}), field) == RATE_MAX
    for value in (-1, RATE_MAX + 1, 1.0, True, "1", None):
        with pytest.raises(InvalidArgumentError) as caught:
            RateLimits(**{field: value})  # type: ignore[arg-type]
        assert (caught.value.reason, caught.value.metadata) == ("QUOTA_OUT_OF_RANGE", {"field": field})
