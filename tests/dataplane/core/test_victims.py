"""Who makes room for whom: reservations, lending, weights, fragmentation."""

from __future__ import annotations

import pytest

from dataplane.core.eviction import Eviction
from tests.support.cache_node import key_of, make_policy, node_of, reason_of


def test_i5_reserved_entries_survive_neighbours_flood() -> None:
    node = node_of(16, {"quiet": (4, 16), "flood": (0, 16)})
    node.fill("quiet", range(4))
    for number in range(200):
        node.put("flood", number)
    assert node.there("quiet", range(4)) == [0, 1, 2, 3]
    assert node.used("flood") == 12


def test_i5_a_flood_of_large_entries_does_not_cut_into_a_reservation() -> None:
    """The neighbour's oldest entry straddles its reservation: growing past one's own does not justify taking it."""
    node = node_of(16, {"quiet": (4, 16), "flood": (0, 16)})
    node.fill("quiet", range(2), granules=3)
    node.fill("flood", range(10))
    assert node.put("flood", 99, granules=3) is None
    assert node.there("quiet", range(2)) == [0, 1]


def test_i5_a_lent_reservation_is_taken_back_at_once() -> None:
    node = node_of(16, {"owner": (8, 16), "borrower": (0, 16)})
    node.fill("borrower", range(16))
    for number in range(8):
        assert node.put("owner", number) is None, "every put within the reservation succeeds, whoever holds the bytes"
    assert (node.used("owner"), node.used("borrower")) == (8, 8)
    assert node.there("borrower", range(16)) == list(range(8, 16)), "the borrower's coldest went"


def test_i5_taking_back_may_displace_an_entry_that_straddles_the_line() -> None:
    node = node_of(16, {"owner": (8, 16), "borrower": (6, 16)})
    node.fill("borrower", range(4), granules=4)
    assert node.put("owner", 1, granules=4) is None
    assert node.put("owner", 2, granules=4) is None
    assert node.there("borrower", range(4)) == [2, 3]
    assert node.put("owner", 3, granules=4) is None
    assert node.there("borrower", range(4)) == [2, 3], "past its reservation the owner displaces itself"
    assert node.there("owner", range(4)) == [2, 3]


def test_idle_reservation_is_lent() -> None:
    node = node_of(16, {"idle": (12, 16), "busy": (0, 16)})
    node.fill("busy", range(16))
    assert node.used("busy") == 16


def test_the_coldest_goes_whoever_owns_it() -> None:
    node = node_of(4, {"a": (0, 4), "b": (0, 4), "c": (0, 4)})
    node.put("a", 1)
    node.put("b", 2)
    node.put("a", 3)
    node.put("b", 4)
    node.core.get_end(node.core.get_start(node.partition("a"), [key_of(1)], node.tick()))
    node.put("c", 5)
    assert (node.there("a", range(6)), node.there("b", range(6))) == ([1, 3], [4])


def test_a_higher_weight_makes_entries_count_as_younger() -> None:
    node = node_of(4, {"light": (0, 4, 50), "heavy": (0, 4, 200), "new": (0, 4)})
    node.fill("heavy", range(2))
    node.fill("light", range(2))
    node.put("new", 1)
    assert (node.there("heavy", range(2)), node.there("light", range(2))) == ([0, 1], [1])


def test_i4_past_its_own_limit_a_tenant_displaces_only_itself() -> None:
    node = node_of(16, {"a": (0, 4), "b": (0, 16)})
    node.fill("b", range(4))
    node.fill("a", range(4))
    node.fill("a", range(4, 10))
    assert node.there("a", range(10)) == [6, 7, 8, 9]
    assert node.there("b", range(4)) == [0, 1, 2, 3]


def test_scattered_free_bytes_are_joined_by_the_coldest_neighbours() -> None:
    """Eight free granules, none next to another: only entries that make one run of three leave, coldest first."""
    node = node_of(16, {"a": (0, 16)})
    node.fill("a", range(16))
    node.core.delete(node.partition("a"), [key_of(number) for number in range(0, 16, 2)])
    assert node.core.usage().largest_free_bytes == 4096
    assert node.put("a", 100, granules=3) is None
    assert node.there("a", range(16)) == [3, 5, 7, 9, 11, 13, 15]


def test_an_entry_outside_the_run_is_not_sacrificed() -> None:
    node = node_of(6, {"a": (0, 12)})
    tickets = [node.started("a", number) for number in range(6)]
    for position in (1, 3, 4, 0, 2, 5):  # coldest first; granule 1 lies between two that stay
        node.core.put_commit(tickets[position], 0, node.tick())
    held = node.core.get_start(node.partition("a"), [key_of(n) for n in (0, 2)], node.tick())
    assert node.put("a", 100, granules=2) is None
    assert node.there("a", range(6)) == [0, 1, 2, 5], "3 and 4 made the run; 1, colder, did not help and stays"
    node.core.get_end(held)
    node.core.check_invariants()


def test_i6_scattered_pins_refuse_and_evict_nothing() -> None:
    node = node_of(8, {"a": (0, 8)})
    node.fill("a", range(8))
    held = node.core.get_start(node.partition("a"), [key_of(number) for number in range(0, 8, 2)], node.tick())
    refused = node.start("a", 100, granules=2)
    assert reason_of(refused) == "NODE_FULL"
    assert node.evictions() == 0 and node.there("a", range(8)) == list(range(8))
    node.core.get_end(held)
    assert node.put("a", 100, granules=2) is None


@pytest.mark.parametrize("tenants", [1, 3, 40])
def test_equal_weights_and_no_reservations_are_one_lru(tenants: int) -> None:
    """Against a plain list of last uses over all tenants."""
    names = [f"t{number}" for number in range(tenants)]
    node = node_of(12, dict.fromkeys(names, (0, 12)), Eviction.LRU)
    model: list[tuple[str, int]] = []
    for step in range(150):
        name, number = names[(step * 7) % tenants], (step * step) % 23
        if (name, number) in model:
            node.core.touch(node.partition(name), [key_of(number)], node.tick())
            model.remove((name, number))
        else:
            assert node.put(name, number) is None
            del model[: max(0, len(model) - 11)]
        model.append((name, number))
        assert {(name, n) for name in names for n in node.there(name, range(23))} == set(model)


def test_i5_a_reservation_lost_by_a_new_policy_protects_no_more() -> None:
    node = node_of(8, {"a": (4, 8), "b": (0, 8)})
    node.fill("a", range(4))
    node.apply(make_policy(2, {"a": (0, 8), "b": (0, 8)}))
    node.fill("b", range(8))
    assert node.there("a", range(4)) == []
