"""Trimming in the background: what goes, what never does, and that nobody else is looked at."""

from __future__ import annotations

import pytest

from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.usage import EvictionCause
from saltern.names import TenantId
from tests.support.cache_node import Node, Quota, key_of, make_policy, node_of

G = GRANULE_BYTES
PLENTY = 1000 * G


def marked(quotas: dict[str, Quota], percent: int = 75, capacity: int = 64) -> Node:
    return node_of(capacity, quotas, soft_mark_percent=percent)


def trim(node: Node, budget_bytes: int = PLENTY) -> int:
    """Granules evicted."""
    evicted_bytes = node.core.trim(node.tick(), budget_bytes)
    node.core.check_invariants()
    return evicted_bytes // G


def test_own_coldest_leave_down_to_the_mark() -> None:
    node = marked({"a": (0, 8), "b": (0, 8)})
    node.fill("a", range(8))
    node.fill("b", range(5))
    node.core.get_end(node.core.get_start(node.partition("a"), [key_of(0)], node.tick()))
    assert trim(node) == 2
    assert node.there("a", range(8)) == [0, 3, 4, 5, 6, 7]
    assert node.used("b") == 5
    assert trim(node) == 0
    counters = node.core.usage().tenants[TenantId("a")].counters
    assert counters.evictions_by_cause == {EvictionCause.SOFT_MARK: 2}


def test_a_put_below_the_limit_then_evicts_nothing() -> None:
    node = marked({"a": (0, 8)})
    node.fill("a", range(8))
    trim(node)
    node.fill("a", range(8, 10))
    counters = node.core.usage().tenants[TenantId("a")].counters
    assert counters.evictions_by_cause == {EvictionCause.SOFT_MARK: 2}


@pytest.mark.parametrize("reserved", [7, 8])
def test_i5_a_reservation_is_never_trimmed(reserved: int) -> None:
    """Whether the limit is the reservation, or the mark would lie below it."""
    node = marked({"a": (reserved, 8)}, percent=50)
    node.fill("a", range(8))
    assert trim(node) == 8 - reserved
    assert node.used("a") == reserved


def test_i5_an_entry_that_straddles_the_reservation_stays() -> None:
    node = marked({"a": (5, 8)}, percent=50)
    node.fill("a", range(2), granules=4)
    assert trim(node) == 0
    assert node.there("a", range(2)) == [0, 1]


def test_i7_what_somebody_reads_stays() -> None:
    node = marked({"a": (0, 8)}, percent=50)
    node.fill("a", range(8))
    held = node.core.get_start(node.partition("a"), [key_of(number) for number in range(7)], node.tick())
    assert trim(node) == 1
    assert trim(node) == 0
    node.core.get_end(held)
    assert trim(node) == 3


def test_a_call_evicts_no_more_than_its_budget_and_tenants_take_turns() -> None:
    node = marked({"a": (0, 8), "b": (0, 8)}, percent=50)
    node.fill("a", range(8))
    node.fill("b", range(8))
    assert trim(node, 4 * G) == 4
    assert (node.used("a"), node.used("b")) == (6, 6)
    assert trim(node) == 4
    assert trim(node, 0) == 0


def test_an_entry_larger_than_the_budget_goes_by_itself() -> None:
    node = marked({"a": (0, 8)}, percent=50)
    node.fill("a", range(2), granules=4)
    assert trim(node, G) == 4
    assert trim(node, G) == 0


def test_no_mark_trims_nothing() -> None:
    node = marked({"a": (0, 8)}, percent=100)
    node.fill("a", range(20))
    assert trim(node) == 0


def test_a_mark_follows_the_quota_and_a_deleted_tenant_is_forgotten() -> None:
    node = marked({"a": (0, 8), "b": (0, 8)})
    node.fill("a", range(6))
    node.fill("b", range(8))
    assert trim(node, G) == 1
    node.apply(make_policy(2, {"a": (0, 6)}))
    assert trim(node) == 2, "three quarters of 6"
    assert node.used("a") == 4


def test_what_is_trimmed_is_demoted() -> None:
    node = marked({"a": (0, 8)})
    demoted: list[int] = []
    node.core.on_evict(lambda entry: demoted.append(entry.offset))
    node.fill("a", range(8))
    assert trim(node) == len(demoted) == 2
