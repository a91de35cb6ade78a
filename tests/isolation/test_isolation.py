"""Every row of the isolation table holds for Saltern; ``python -m tests.isolation`` prints the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.isolation import cases_budget, cases_bytes, cases_identity
from tests.isolation.adapter import StoreAdapter
from tests.isolation.saltern_store import SalternAdapter
from tests.isolation.suite import SUITE
from tests.isolation.table import Case, Judge, Outcome, Verdict, run_case
from tests.sim import two_tier_plants
from tests.sim.plants import planted


@pytest.fixture(scope="module")
def saltern() -> Iterator[SalternAdapter]:
    with closing(SalternAdapter()) as adapter:
        yield adapter


@pytest.mark.parametrize("tried", SUITE, ids=[tried.name for tried in SUITE])
def test_isolation(saltern: SalternAdapter, tried: Case) -> None:
    row = run_case(saltern, tried)
    assert row.outcome is Outcome.HOLDS, row.detail


@pytest.mark.parametrize(
    ("judge", "fault"),
    [
        (cases_identity.same_key_in_two_tenants, "one index for every tenant"),
        (cases_identity.overwrites_a_neighbour, "one index for every tenant"),
        (cases_identity.look_alike_names, "one index for every tenant"),
        (cases_identity.shares_by_consent, "one index for every tenant"),
        (cases_identity.remove_all_of_one, "keep a deleted tenant"),
        (cases_budget.quota_under_flood, "grow past the limit"),
        (cases_budget.shrunk_below_use, "keep what is above a lowered limit"),
        (cases_budget.churn_in_an_overcommitted_pool, "ignore reservations"),
        (cases_budget.larger_than_the_quota, "wipe for what can never fit"),
        (cases_bytes.slow_read, "free what is being read"),
        (cases_bytes.half_a_value, "leak the memory of a torn put"),
        (cases_bytes.wrong_sized_buffer, "send a neighbour's bytes"),
    ],
)
def test_a_case_fails_where_the_core_is_broken(judge: Judge, fault: str) -> None:
    """A suite that no fault can fail would prove nothing."""
    with planted(fault):
        row = run_case(SalternAdapter("tcp"), Case("I1", "any", judge))
    assert row.outcome is Outcome.FAILS, row.detail


def test_i5_a_flood_of_four_times_the_pool_takes_nothing_from_a_tenant_within_its_reservation() -> None:
    """By amount, so that it says the same on a machine of any speed; tests/noisy has it by time."""
    row = run_case(SalternAdapter("tcp"), Case("I5", "any", cases_budget.churn_in_an_overcommitted_pool))
    assert row.outcome is Outcome.HOLDS, row.detail


def test_the_case_of_a_namespaces_limit_fails_where_that_is_not_kept() -> None:
    with two_tier_plants.planted("grow past a namespace's limit"):
        row = run_case(SalternAdapter("tcp"), Case("I4", "any", cases_budget.namespace_under_flood))
    assert row.outcome is Outcome.FAILS, row.detail


def test_a_case_that_raises_is_a_row_that_fails() -> None:
    def judge(_: StoreAdapter) -> Verdict:
        raise ConnectionResetError("the store went away")

    row = run_case(SalternAdapter(), Case("I1", "any", judge))
    assert row.outcome is Outcome.FAILS and "the store went away" in row.detail
