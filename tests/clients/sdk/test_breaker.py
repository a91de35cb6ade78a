"""The circuit breaker as a state machine: every test is a short story in made-up time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern.breaker import BreakerPolicy, CircuitBreaker
from saltern.errors import DeadlineExceededError, UnavailableError

FAILURE = UnavailableError("refused")
POLICY = BreakerPolicy(quick_failures=3, backoff_first_s=1.0, backoff_max_s=8.0)


def breaker_of(policy: BreakerPolicy = POLICY) -> CircuitBreaker:
    """Without jitter: a jitter of 1 leaves a backoff as it is."""
    return CircuitBreaker("node n", policy, lambda: 1.0)


def lets_through(breaker: CircuitBreaker, now_s: float, patience_s: float = 1.0) -> bool:
    try:
        breaker.check(now_s, patience_s=patience_s)
    except UnavailableError as error:
        assert error.reason == "CIRCUIT_OPEN"
        assert error.retry_after_ms is not None and error.retry_after_ms >= 1
        return False
    return True


def test_quick_failures_open_it_only_in_a_row() -> None:
    breaker = breaker_of()
    for now_s in range(10):
        breaker.record_failure(now_s, FAILURE, waited=False)
        breaker.record_failure(now_s, FAILURE, waited=False)
        breaker.record_success()
    assert lets_through(breaker, 10)
    for _ in range(3):
        breaker.record_failure(10, FAILURE, waited=False)
    assert not lets_through(breaker, 10)


def test_one_timeout_opens_it_and_one_probe_goes_through_after_the_backoff() -> None:
    breaker = breaker_of()
    breaker.record_failure(100, DeadlineExceededError("slow"), waited=True)
    assert not lets_through(breaker, 100.9)
    assert lets_through(breaker, 101)
    assert not lets_through(breaker, 101.5), "one probe at a time"
    breaker.record_success()
    assert lets_through(breaker, 101.5)


def test_a_probe_that_is_never_heard_of_is_given_up() -> None:
    breaker = breaker_of()
    breaker.record_failure(0, FAILURE, waited=True)
    assert lets_through(breaker, 1, patience_s=5)
    assert not lets_through(breaker, 5.9)
    assert lets_through(breaker, 6)


def test_backoff_doubles_up_to_its_bound_and_starts_anew_after_success() -> None:
    breaker, now_s = breaker_of(), 0.0
    for expected_s in (1, 2, 4, 8, 8, 8):
        breaker.record_failure(now_s, FAILURE, waited=True)
        assert not lets_through(breaker, now_s + expected_s - 0.01)
        now_s += expected_s
        assert lets_through(breaker, now_s)
    breaker.record_success()
    breaker.record_failure(now_s, FAILURE, waited=True)
    assert lets_through(breaker, now_s + 1)


def test_many_callers_that_fail_together_are_one_failure() -> None:
    breaker = breaker_of()
    for _ in range(50):
        breaker.record_failure(0, FAILURE, waited=True)
    assert lets_through(breaker, 1)


@pytest.mark.parametrize("jitter", [0.0, 0.3, 1.0])
def test_jitter_shortens_a_backoff_to_no_less_than_half(jitter: float) -> None:
    breaker = CircuitBreaker("node n", POLICY, lambda: jitter)
    breaker.record_failure(0, FAILURE, waited=True)
    assert not lets_through(breaker, 0.49)
    assert lets_through(breaker, 1)


def test_the_error_says_what_happened_last() -> None:
    breaker = breaker_of()
    breaker.record_failure(0, UnavailableError("connection refused"), waited=True)
    with pytest.raises(UnavailableError, match="connection refused"):
        breaker.check(0, patience_s=1)


@given(st.lists(st.tuples(st.sampled_from(["ok", "quick", "slow", "ask"]), st.floats(0, 3)), max_size=60))
def test_it_never_stays_open_for_longer_than_its_longest_backoff(steps: list[tuple[str, float]]) -> None:
    breaker, now_s = breaker_of(), 0.0
    for what, wait_s in steps:
        now_s += wait_s
        if what == "ok":
            breaker.record_success()
            assert lets_through(breaker, now_s)
        elif what == "ask":
            lets_through(breaker, now_s, patience_s=2.0)
        else:
            breaker.record_failure(now_s, FAILURE, waited=what == "slow")
    assert lets_through(breaker, now_s + POLICY.backoff_max_s)
