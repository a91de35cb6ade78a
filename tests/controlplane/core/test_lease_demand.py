"""A quota moves to where it earns more: only for hits, never below a floor, never for nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.lease_demand import FLOOR_PARTS, Demand, rebalance
from saltern.names import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
EVEN = {A: 1000, B: 1000}
CAPACITIES = {A: 1, B: 1}
NONE = {A: 0, B: 0}
PRESSED = Demand(used_bytes=1000, hit_bytes=5000, pressed=10)


def test_idle_room_moves_to_who_needs_it_and_earns_by_it() -> None:
    moved = rebalance(EVEN, {A: PRESSED, B: Demand(used_bytes=100)}, CAPACITIES, NONE)
    assert moved is not None and moved[A] > 1000 and sum(moved.values()) == 2000


def test_a_scan_gains_nothing() -> None:
    assert rebalance(EVEN, {A: Demand(1000, 0, pressed=500), B: Demand()}, CAPACITIES, NONE) is None


def test_nothing_moves_where_nothing_presses_or_everything_does() -> None:
    assert rebalance(EVEN, {A: Demand(1000, 10), B: Demand()}, CAPACITIES, NONE) is None
    assert rebalance(EVEN, {A: PRESSED, B: PRESSED}, CAPACITIES, NONE) is None


def test_what_earns_about_as_much_stays() -> None:
    assert rebalance(EVEN, {A: PRESSED, B: Demand(1000, 4000)}, CAPACITIES, NONE) is None
    assert rebalance(EVEN, {A: PRESSED, B: Demand(1000, 2000)}, CAPACITIES, NONE) is not None


def test_i5_a_node_keeps_its_part_of_the_reservation_and_a_floor() -> None:
    targets = dict(EVEN)
    for _ in range(100):
        moved = rebalance(targets, {A: PRESSED, B: Demand()}, CAPACITIES, {A: 0, B: 700})
        if moved is None:
            break
        targets = moved
    assert 700 <= targets[B] < 850, "what is left is not worth a move"
    targets = dict(EVEN)
    for _ in range(100):
        targets = rebalance(targets, {A: PRESSED, B: Demand()}, CAPACITIES, NONE) or targets
    assert targets[B] >= 1000 // FLOOR_PARTS


demands = st.builds(Demand, st.integers(0, 500), st.integers(0, 500), st.integers(0, 2))


@given(
    st.lists(st.integers(0, 500), min_size=3, max_size=3),
    st.lists(demands, min_size=3, max_size=3),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
)
def test_a_move_neither_makes_nor_loses_a_byte(targets: list[int], wanted: list[Demand], capacities: list[int]) -> None:
    nodes = (A, B, C)
    before = dict(zip(nodes, targets, strict=True))
    moved = rebalance(
        before,
        dict(zip(nodes, wanted, strict=True)),
        dict(zip(nodes, capacities, strict=True)),
        dict.fromkeys(nodes, 0),
    )
    if moved is not None:
        assert sum(moved.values()) == sum(before.values())
        assert min(moved.values()) >= 0
        assert moved != before
