"""Turns between flows: shares by weight, no starvation, no credit for idleness, no gain by numbers."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.fair_queue import FairQueue, Flow

WEIGHTS = st.integers(1, 1000)
COSTS = st.integers(1, 4096)


def test_one_flow_is_served_in_order() -> None:
    queue, flow = FairQueue[int](), Flow[int](1)
    for item in range(5):
        queue.push(flow, item)
    assert [queue.pop() for _ in range(5)] == [(flow, item) for item in range(5)]
    assert not len(queue) and flow.turns == 5


def test_an_empty_queue_has_nothing_to_give() -> None:
    queue, flow = FairQueue[int](), Flow[int](1)
    with pytest.raises(IndexError):
        queue.pop()
    queue.push(flow, 1)
    assert queue.pop() == (flow, 1)
    with pytest.raises(IndexError):
        queue.pop()


def test_a_thousand_items_of_one_flow_are_one_flow() -> None:
    queue, crowd, loner = FairQueue[int](), Flow[int](100), Flow[int](100)
    for item in range(1000):
        queue.push(crowd, item)
    queue.push(loner, -1)
    for _ in range(400):
        flow, item = queue.pop()
        queue.charge(flow, 1000)
        queue.push(flow, item)
    assert abs(crowd.work - loner.work) <= 1000


def test_whoever_comes_back_is_next_and_has_saved_up_nothing() -> None:
    queue, busy, sleeper = FairQueue[str](), Flow[str](100), Flow[str](100)
    queue.push(busy, "busy")
    for _ in range(1000):
        flow, item = queue.pop()
        queue.push(flow, item)
        queue.charge(flow, 500)
    queue.push(sleeper, "sleeper")
    served = []
    for _ in range(100):
        flow, item = queue.pop()
        served.append(item)
        queue.push(flow, item)
        queue.charge(flow, 500)
    assert served.index("sleeper") <= 1
    assert Counter(served)["sleeper"] <= 51


def test_whoever_left_its_share_unused_is_answered_whole_before_those_who_did_not() -> None:
    queue, light = FairQueue[str](head_start=20), Flow[str](100)
    crowd = [Flow[str](100) for _ in range(3)]
    for flow in crowd:
        queue.push(flow, "busy")
    for _ in range(100):
        flow, item = queue.pop()
        queue.push(flow, item)
        queue.charge(flow, 500)
    for answer in range(3):
        # Four turns of 500 are 20 of virtual time at weight 100: the head start.
        served = []
        queue.push(light, f"light {answer}")
        for _ in range(5):
            flow, item = queue.pop()
            queue.charge(flow, 500)
            served.append(item)
            if flow is not light or len(served) < 4:
                queue.push(flow, item)
        assert served == [f"light {answer}"] * 4 + ["busy"]
        for _ in range(3 * 8):  # the others have their share, and the light one saves up again
            flow, item = queue.pop()
            queue.charge(flow, 500)
            queue.push(flow, item)


def test_a_head_start_is_saved_up_once_and_no_more() -> None:
    queue, busy, sleeper = FairQueue[str](head_start=20), Flow[str](100), Flow[str](100)
    queue.push(busy, "busy")
    for _ in range(1000):
        flow, item = queue.pop()
        queue.push(flow, item)
        queue.charge(flow, 500)
    queue.push(sleeper, "sleeper")
    served = Counter[str]()
    for _ in range(100):
        flow, item = queue.pop()
        served[item] += 1
        queue.push(flow, item)
        queue.charge(flow, 500)
    assert 52 <= served["sleeper"] <= 53


def test_others_wait_tells_whether_a_turn_may_be_long() -> None:
    queue, one, other = FairQueue[int](), Flow[int](1), Flow[int](1)
    queue.push(one, 1)
    queue.push(one, 2)
    assert not queue.others_wait(one) and queue.others_wait(other)
    queue.push(other, 3)
    assert queue.others_wait(one)


@settings(max_examples=200, deadline=None)
@given(
    flows=st.lists(st.tuples(WEIGHTS, st.integers(1, 5)), min_size=2, max_size=6),
    costs=st.lists(COSTS, min_size=50, max_size=300),
    head_start=st.sampled_from([0, 100]),
)
def test_shares_of_backlogged_flows_stay_within_one_turn_of_each(
    flows: list[tuple[int, int]], costs: list[int], head_start: int
) -> None:
    """The fairness bound of start-time fair queueing, at every moment and for every pair of flows."""
    queue = FairQueue[int](head_start)
    names = count()
    members = [Flow[int](weight) for weight, _ in flows]
    for flow, (_, items) in zip(members, flows, strict=True):
        for _ in range(items):
            queue.push(flow, next(names))
    longest = max(costs)
    for cost in costs:
        flow, item = queue.pop()
        queue.push(flow, item)
        queue.charge(flow, cost)
        for one in members:
            for other in members:
                bound = longest / one.weight + longest / other.weight
                rounding = (one.turns + other.turns) / 1024
                assert abs(one.work / one.weight - other.work / other.weight) <= bound + rounding


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["push", "pop", "charge"]), st.integers(0, 4), COSTS), max_size=200),
    weights=st.lists(WEIGHTS, min_size=5, max_size=5),
    head_start=st.sampled_from([0, 100]),
)
def test_work_conserving_and_nothing_is_lost(
    steps: list[tuple[str, int, int]], weights: list[int], head_start: int
) -> None:
    """Whatever happens, as long as something waits something is served, each item once, and time does not go back."""
    queue = FairQueue[int](head_start)
    flows = [Flow[int](weight) for weight in weights]
    waiting: dict[int, Flow[int]] = {}
    names = count()
    latest = 0
    for what, number, cost in steps:
        flow = flows[number]
        if what == "push":
            item = next(names)
            queue.push(flow, item)
            waiting[item] = flow
        elif what == "pop" and waiting:
            flow, item = queue.pop()
            assert waiting.pop(item) is flow
            queue.charge(flow, cost)
            assert queue._now >= latest
            latest = queue._now
        elif what == "charge":
            queue.charge(flow, cost)
        assert len(queue) == len(waiting)
        assert sum(flow.waiting for flow in flows) == len(waiting)
    while waiting:
        flow, item = queue.pop()
        assert waiting.pop(item) is flow


@settings(max_examples=100, deadline=None)
@given(weight=WEIGHTS, others=st.lists(WEIGHTS, min_size=1, max_size=8))
def test_no_starvation_whatever_the_weights(weight: int, others: list[int]) -> None:
    """A flow that arrives beside backlogged ones is served after at most one turn of each."""
    queue = FairQueue[int]()
    crowd = [Flow[int](other) for other in others]
    for number, flow in enumerate(crowd):
        queue.push(flow, number)
    for _ in range(50):
        flow, item = queue.pop()
        queue.push(flow, item)
        queue.charge(flow, 1000)
    late = Flow[int](weight)
    queue.push(late, -1)
    served = []
    while not late.turns:
        flow, item = queue.pop()
        served.append(item)
        queue.push(flow, item)
        queue.charge(flow, 1000)
    assert len(served) <= len(crowd) + 1
