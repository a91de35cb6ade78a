"""What a tenant may do in a second: its rate, a burst and one request, never more; waits are short and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.lines import Place
from dataplane.core.rates import RateMeter, TenantRates
from saltern.errors import ResourceExhaustedError
from saltern.names import TenantId
from tenants.quota import RateLimits

MS = 1_000_000
S = 1000 * MS


def rates(operations_per_s: int = 0, bytes_per_s: int = 0, *, wait_max_ns: int = 250 * MS) -> TenantRates:
    made = TenantRates(TenantId("acme"), wait_max_ns)
    made.set_limits(RateLimits(operations_per_s, bytes_per_s), 0)
    return made


def test_without_limits_everything_begins_at_once() -> None:
    free = rates()
    assert not free.is_limited
    assert all(free.enter(10**9, 10**12, now) is None for now in range(5))


def test_a_burst_then_a_wait_then_a_refusal_that_says_what_and_when() -> None:
    limited = rates(operations_per_s=100)
    assert limited.enter(100, 0, 0) is None
    assert limited.enter(20, 0, 0) is None, "it begins while nothing is owed, and the next one pays"
    place = limited.enter(10, 0, 0)
    assert place is not None and limited.due_ns(0) == 200 * MS
    with pytest.raises(ResourceExhaustedError) as caught:
        limited.enter(1, 0, 0)
    error = caught.value
    assert error.reason == "RATE_LIMITED" and error.retry_after_ms == 300
    assert error.metadata == {"tenant": "acme", "rate": "operations_per_s", "limit_operations_per_s": "100"}
    assert limited.advance(199 * MS) == [] and place.is_waiting
    assert limited.advance(200 * MS) == [place] and not place.is_waiting and place.refusal is None
    assert (limited.delayed, limited.refused) == (1, 1)


def test_the_slower_rate_is_named() -> None:
    limited = rates(operations_per_s=100, bytes_per_s=1000)
    assert limited.enter(101, 5000, 0) is None
    with pytest.raises(ResourceExhaustedError) as caught:
        limited.enter(1, 1, 0)
    assert caught.value.metadata["rate"] == "bytes_per_s" and caught.value.retry_after_ms == 4000


def test_who_was_let_in_is_charged_before_the_next() -> None:
    """A get says only after it was let in what it moves: meanwhile nobody else slips through."""
    limited = rates(bytes_per_s=1000)
    assert limited.enter(1, 1100, 0) is None
    first, second = limited.enter(1, 0, 0), limited.enter(1, 0, 0)
    assert first is not None and second is not None
    assert limited.advance(100 * MS) == [first]
    limited.charge(0, 100, 100 * MS)
    assert limited.due_ns(100 * MS) is None
    limited.leave(first)
    assert limited.advance(100 * MS) == [] and limited.due_ns(100 * MS) == 100 * MS
    assert limited.advance(200 * MS) == [second]


def test_who_cannot_begin_in_time_after_all_is_refused() -> None:
    limited = rates(bytes_per_s=1000)
    assert limited.enter(1, 1100, 0) is None
    first, second = limited.enter(1, 0, 0), limited.enter(1, 0, 0)
    assert first is not None and second is not None
    limited.advance(100 * MS)
    limited.charge(0, 10_000, 100 * MS)
    limited.leave(first)
    assert limited.advance(100 * MS) == [second] and second.refusal is not None
    assert second.refusal.reason == "RATE_LIMITED"


def test_who_gives_up_lets_the_next_pass() -> None:
    limited = rates(operations_per_s=100)
    limited.enter(110, 0, 0)
    first, second = limited.enter(10, 0, 0), limited.enter(1, 0, 0)
    assert first is not None and second is not None
    limited.leave(first)
    assert limited.advance(100 * MS) == [second]
    limited.leave(second)
    limited.leave(second)
    assert limited.line.is_empty


def test_new_limits_hold_for_those_who_wait() -> None:
    limited = rates(operations_per_s=100)
    limited.enter(110, 0, 0)
    place = limited.enter(1, 0, 0)
    assert place is not None
    limited.set_limits(RateLimits(), 0)
    assert limited.advance(0) == [place] and place.refusal is None
    limited.leave(place)
    limited.set_limits(RateLimits(operations_per_s=5), 0)
    assert limited.enter(5, 0, 0) is None, "a rate that is new begins with a full second"


def test_a_lower_rate_keeps_the_debt_and_caps_what_is_saved() -> None:
    meter = RateMeter()
    meter.set_rate(1000, 0)
    meter.charge(1500, 0)
    meter.set_rate(100, 0)
    assert meter.owed(0) == 500 and meter.wait_ns(0) == 5 * S
    saver = RateMeter()
    saver.set_rate(1000, 0)
    saver.set_rate(10, 0)
    saver.charge(11, 0)
    assert saver.owed(0) == 1


TIMES = st.lists(st.integers(-2 * S, 2 * S), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(rate=st.integers(1, 10**6), steps=TIMES, costs=st.lists(st.integers(1, 10**7), min_size=1, max_size=60))
def test_never_more_than_the_rate_a_burst_and_one_request(rate: int, steps: list[int], costs: list[int]) -> None:
    """Whatever the clock does: a reading before the last one gives nothing."""
    limited = rates(operations_per_s=rate)
    now, latest, given_total, largest = 0, 0, 0, 0
    waiting: list[tuple[Place, int]] = []
    for step, cost in zip(steps, costs, strict=False):
        now += step
        latest = max(latest, now)
        for place in limited.advance(now):
            if place.refusal is None:
                given_total += dict(waiting)[place]
            limited.leave(place)
        waiting = [(place, amount) for place, amount in waiting if place.is_waiting]
        try:
            entered = limited.enter(cost, 0, now)
        except ResourceExhaustedError as error:
            assert error.retry_after_ms is not None and error.retry_after_ms > 250
        else:
            if entered is None:
                given_total += cost
            else:
                waiting.append((entered, cost))
        largest = max(largest, cost)
        assert given_total <= rate + rate * latest / S + largest
        assert limited.operations.owed(now) <= largest, "debt is one request at most"
        ahead = sum(amount for _, amount in waiting[:-1])
        assert limited.operations.wait_ns(latest, ahead) <= 250 * MS or not waiting


@settings(max_examples=100, deadline=None)
@given(rate=st.integers(1, 10**6), costs=st.lists(st.integers(1, 10**6), min_size=1, max_size=30))
def test_no_starvation_whoever_retries_when_told_gets_in(rate: int, costs: list[int]) -> None:
    limited = rates(operations_per_s=rate)
    now = 0
    for cost in costs:
        for _ in range(2):
            try:
                place = limited.enter(cost, 0, now)
            except ResourceExhaustedError as error:
                assert error.retry_after_ms is not None
                now += error.retry_after_ms * MS
                continue
            if place is not None:
                now += limited.due_ns(now) or 0
                assert limited.advance(now) == [place] and place.refusal is None
                limited.leave(place)
            break
        else:
            raise AssertionError("refused again after waiting as told")
