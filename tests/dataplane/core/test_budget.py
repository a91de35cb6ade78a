from __future__ import annotations

import pytest

from dataplane.core.budget import TierBudget
from tenants.quota import TierQuota

G = 4096


def test_i8_the_books_follow_an_entry_through_its_life() -> None:
    budget = TierBudget()
    budget.set_quota(TierQuota(reserved_bytes=G, limit_bytes=4 * G, weight=50))

    budget.begin(G + 1, 2 * G)
    assert (budget.used_bytes, budget.in_flight_bytes, budget.resident_bytes) == (2 * G, G + 1, 0)
    assert (budget.slack_bytes, budget.evictable_bytes) == (G - 1, 0)

    budget.commit(G + 1, 2 * G)
    assert (budget.used_bytes, budget.in_flight_bytes, budget.resident_bytes) == (2 * G, 0, G + 1)
    assert (budget.slack_bytes, budget.evictable_bytes) == (G - 1, 2 * G)

    budget.hold(2 * G)
    assert budget.evictable_bytes == 0
    budget.unhold(2 * G)
    budget.release(G + 1, 2 * G)
    assert (budget.used_bytes, budget.resident_bytes, budget.slack_bytes, budget.held_bytes) == (0, 0, 0, 0)


def test_an_aborted_put_leaves_nothing() -> None:
    budget = TierBudget(limit_bytes=G)
    budget.begin(17, G)
    budget.abort(17, G)
    assert (budget.used_bytes, budget.in_flight_bytes, budget.held_bytes, budget.slack_bytes) == (0, 0, 0, 0)


def test_i4_charging_past_the_limit_is_a_fault_of_ours() -> None:
    budget = TierBudget(limit_bytes=G)
    with pytest.raises(AssertionError, match="I4"):
        budget.begin(G + 1, 2 * G)


def test_a_lower_limit_leaves_the_books_as_they_are() -> None:
    budget = TierBudget(limit_bytes=2 * G)
    budget.begin(2 * G, 2 * G)
    budget.set_quota(TierQuota(0, G))
    assert (budget.used_bytes, budget.limit_bytes) == (2 * G, G)
