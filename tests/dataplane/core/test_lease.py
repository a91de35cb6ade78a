"""I9 in the core: when the lease runs out what is there stays and is served, and nothing grows, until it is renewed."""

from __future__ import annotations

import pytest

from dataplane.core.lease import Lease
from tests.support.cache_node import Node, make_policy, node_of, reason_of


def lease_for(node: Node, ns: int, version: int = 0) -> None:
    node.core.renew(Lease(node.now_ns + ns, version), node.now_ns)
    node.core.check_invariants()


def test_i9_an_expired_lease_keeps_what_is_there_and_stops_growth() -> None:
    node = node_of(100, {"a": (2, 20), "b": (0, 20)})
    node.fill("a", range(5))
    lease_for(node, 10_000_000)
    node.fill("a", range(5, 8))
    node.now_ns += 10_000_000
    assert node.there("a", range(8)) == list(range(8))
    assert node.put("a", 100) is None  # in place of the coldest of its own
    assert node.core.is_frozen
    assert node.used("a") == 8
    assert node.there("a", range(8)) == list(range(1, 8))
    refused = node.put("b", 0)
    assert reason_of(refused) == "LEASE_EXPIRED"
    assert refused is not None and refused.error.retry_after_ms
    assert node.used("b") == 0


def test_i9_a_renewed_lease_lets_it_grow_again() -> None:
    node = node_of(100, {"a": (5, 20)})
    lease_for(node, 0)
    assert reason_of(node.put("a", 0)) == "LEASE_EXPIRED"
    lease_for(node, 1_000_000_000)
    assert not node.core.is_frozen
    node.fill("a", range(20))
    assert node.used("a") == 20


def test_i4_a_lease_of_a_later_policy_opens_nothing_under_an_earlier_one() -> None:
    """What an old policy grants may be somebody else's since: the answer to a report alone does not bring it back."""
    node = node_of(100, {"a": (0, 20)})
    lease_for(node, 1_000_000_000, version=7)
    assert reason_of(node.put("a", 0)) == "LEASE_EXPIRED"
    node.apply(make_policy(6, {"a": (0, 20)}))
    assert reason_of(node.put("a", 0)) == "LEASE_EXPIRED"
    node.apply(make_policy(7, {"a": (0, 3)}))
    node.fill("a", range(9))
    assert node.used("a") == 3


@pytest.mark.parametrize("limit", [3, 12])
def test_i9_a_policy_that_comes_after_the_lease_grants_nothing_more(limit: int) -> None:
    node = node_of(100, {"a": (2, 10)})
    node.fill("a", range(6))
    lease_for(node, 0)
    node.apply(make_policy(2, {"a": (1, limit), "b": (0, 10)}))
    assert node.used("a") == min(6, limit)
    assert node.put("a", 50) is None
    assert node.used("a") == min(6, limit)
    assert reason_of(node.put("b", 0)) == "LEASE_EXPIRED"


def test_i9_the_soft_mark_does_not_empty_what_is_frozen() -> None:
    node = node_of(100, {"a": (0, 10)}, soft_mark_percent=50)
    node.fill("a", range(5))
    lease_for(node, 0)
    assert reason_of(node.put("a", 99, granules=6)) == "LEASE_EXPIRED"
    assert node.core.trim(node.tick(), 1 << 20) == 0
    assert node.used("a") == 5


def test_i4_a_lowered_limit_is_settled_when_nothing_is_above_it() -> None:
    node = node_of(100, {"a": (0, 10)})
    assert node.core.settled_version == 1
    node.fill("a", range(8))
    writing = node.started("a", 50, granules=2)
    node.apply(make_policy(2, {"a": (0, 1)}))
    assert (node.used("a"), node.core.settled_version) == (2, 1)
    node.core.put_abort(writing)
    assert (node.used("a"), node.core.settled_version) == (0, 2)
