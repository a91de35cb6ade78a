"""Transfers of borrowers must not keep an owner from its reservation (I5): what may be held beyond reservations."""

from __future__ import annotations

import pytest

from dataplane.core.entry import PutRefused
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.held import MARGIN_PARTS
from saltern.errors import ResourceExhaustedError
from saltern.names import TenantId
from tests.support.cache_node import Node, key_of, make_policy, node_of, reason_of

G = GRANULE_BYTES
CAPACITY = 4 * MARGIN_PARTS
MARGIN = CAPACITY // MARGIN_PARTS


def read(node: Node, tenant: str, numbers: range) -> list[bool]:
    """Begin to read, and never end."""
    pins = node.core.get_start(node.partition(tenant), [key_of(number) for number in numbers], node.tick())
    node.core.check_invariants()
    return [pin is not None for pin in pins]


def test_i5_slow_readers_leave_an_owner_all_but_the_margin() -> None:
    node = node_of(CAPACITY, {"owner": (CAPACITY // 2, CAPACITY), "reader": (0, CAPACITY)})
    node.fill("reader", range(CAPACITY))
    served = read(node, "reader", range(CAPACITY))
    assert served == [True] * (CAPACITY // 2 + MARGIN) + [False] * (CAPACITY // 2 - MARGIN)
    for number in range(CAPACITY // 2 - MARGIN):
        assert node.put("owner", number) is None
    assert node.used("owner") == CAPACITY // 2 - MARGIN
    assert node.put("owner", 99) is None
    assert node.used("owner") == CAPACITY // 2 - MARGIN, "the margin is lent to transfers: until then it evicts its own"
    assert node.core.usage().tenants[TenantId("reader")].counters.hits_held_back == CAPACITY // 2 - MARGIN


def test_i5_puts_in_flight_count_as_readers_do() -> None:
    node = node_of(CAPACITY, {"owner": (CAPACITY, CAPACITY), "writer": (0, CAPACITY)})
    tickets = [node.started("writer", number) for number in range(MARGIN)]
    refused = node.start("writer", 99)
    assert reason_of(refused) == "TRANSFERS_FULL"
    error = refused.error  # type: ignore[union-attr]
    assert isinstance(error, ResourceExhaustedError) and error.retry_after_ms
    for number in range(CAPACITY - MARGIN):
        assert node.put("owner", number) is None
    node.core.put_commit(tickets[0], 0, node.tick())
    assert node.put("owner", 98) is None, "what is no longer in transfer goes to the owner at once"


def test_what_is_held_within_a_reservation_is_never_refused() -> None:
    node = node_of(CAPACITY, {"a": (CAPACITY // 2, CAPACITY), "b": (CAPACITY // 2, CAPACITY)})
    for number in range(CAPACITY // 2 + MARGIN):
        node.started("a", number)
    assert reason_of(node.start("a", 99)) == "TRANSFERS_FULL"
    for number in range(CAPACITY // 2 - MARGIN):
        node.started("b", number)


def test_without_reservations_nothing_is_held_back() -> None:
    node = node_of(CAPACITY, {"a": (0, CAPACITY), "b": (0, CAPACITY)})
    node.fill("a", range(CAPACITY))
    assert read(node, "a", range(CAPACITY)) == [True] * CAPACITY


def test_one_entry_beyond_is_let_through_whatever_its_size() -> None:
    node = node_of(CAPACITY, {"owner": (CAPACITY, CAPACITY), "other": (0, CAPACITY)})
    ticket = node.started("other", 1, granules=4 * MARGIN)
    assert reason_of(node.start("other", 2)) == "TRANSFERS_FULL"
    node.core.put_commit(ticket, 0, node.tick())
    assert node.put("other", 2) is None
    assert read(node, "other", range(1, 3)) == [True, False]


def test_a_batch_is_served_from_its_front_and_a_repeated_key_counts_once() -> None:
    node = node_of(CAPACITY, {"owner": (CAPACITY, CAPACITY), "reader": (0, CAPACITY)})
    node.fill("reader", range(MARGIN + 2))
    keys = [key_of(number) for number in (0, 0, 99, 1, 2, 3, 3, 4)]
    pins = node.core.get_start(node.partition("reader"), keys, node.tick())
    assert [pin is not None for pin in pins] == [True, True, False, True, True, True, True, False]
    node.core.get_end(pins)
    assert read(node, "reader", range(2, 6)) == [True] * 4


def test_a_new_policy_moves_the_bound_and_ends_no_transfer() -> None:
    node = node_of(CAPACITY, {"a": (0, CAPACITY), "b": (0, CAPACITY)})
    node.fill("a", range(CAPACITY))
    read(node, "a", range(CAPACITY))
    node.apply(make_policy(2, {"a": (0, CAPACITY), "b": (CAPACITY, CAPACITY)}))
    assert reason_of(node.start("b", 1)) == "NODE_FULL"
    assert read(node, "a", range(1)) == [True], "held already"
    node.apply(make_policy(3, {"b": (CAPACITY, CAPACITY)}))
    node.core.check_invariants()


@pytest.mark.parametrize(("granules", "reason"), [(3, None), (4, "NODE_FULL")])
def test_protected_entries_can_be_spread_so_that_only_short_runs_are_left(granules: int, reason: str | None) -> None:
    """The worst case that docs/eviction.md states: n entries leave no run longer than capacity / (n + 1)."""
    spread = CAPACITY // 4
    node = node_of(CAPACITY, {"spread": (spread, CAPACITY), "owner": (CAPACITY - spread, CAPACITY)})
    node.fill("spread", range(CAPACITY))
    node.core.delete(node.partition("spread"), [key_of(number) for number in range(CAPACITY) if number % 4])
    assert node.used("spread") == spread
    outcome = node.start("owner", 1, granules)
    assert (reason_of(outcome) if isinstance(outcome, PutRefused) else None) == reason
    assert node.evictions() == 0
