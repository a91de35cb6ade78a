"""A rate with a burst."""

from __future__ import annotations

from dataplane.core.token_bucket import TokenBucket

S = 1_000_000_000


def test_no_rate_permits_everything() -> None:
    bucket = TokenBucket(0, 0)
    assert all(bucket.take(10**12, now) for now in range(5))


def test_a_burst_and_then_the_rate() -> None:
    bucket = TokenBucket(rate_per_s=100, burst=200)
    assert bucket.take(150, 0) and bucket.take(50, 0)
    assert not bucket.take(1, 0)
    assert not bucket.take(60, S // 2)
    assert bucket.take(50, S // 2)
    assert not bucket.take(1, S // 2)
    assert bucket.take(200, 100 * S), "no more than the burst is saved up"
    assert not bucket.take(1, 100 * S)


def test_more_than_the_burst_is_owed() -> None:
    bucket = TokenBucket(rate_per_s=100, burst=100)
    assert bucket.take(300, 0)
    assert not bucket.take(1, 2 * S)
    assert bucket.take(1, 2 * S + S // 10)


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(rate_per_s=100, burst=100)
    assert bucket.take(100, 10 * S)
    assert not bucket.take(1, 10 * S)
    assert not bucket.take(1, 5 * S)
