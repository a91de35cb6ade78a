"""What tenants have under way on an RDMA device: bounded, in shares of their weights, nobody held up by another."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.device_share import REQUEST_COST, Claim, DeviceShare, Sharer, cost_of

COSTS = st.integers(1, 100)


def nobody() -> None:
    """Nobody waits for the claim."""


def test_what_a_chain_costs_grows_with_its_requests_and_bytes() -> None:
    assert cost_of(1, 1) == REQUEST_COST + 1
    assert cost_of(3, 100) == 3 * REQUEST_COST + 100
    assert cost_of(0, 0) == 1


def test_a_tenant_that_holds_nothing_is_let_in_whatever_others_hold() -> None:
    share, flood, victim = DeviceShare(100), Sharer(100), Sharer(1)
    stuck = [share.enter(flood, 80, nobody) for _ in range(50)]
    assert [claim.is_waiting for claim in stuck[:2]] == [False, True]
    assert not share.enter(victim, 60, nobody).is_waiting


def test_one_tenant_takes_three_quarters_of_the_device_and_one_claim_more_at_most() -> None:
    share, tenant = DeviceShare(100), Sharer(100)
    claims = [share.enter(tenant, 20, nobody) for _ in range(10)]
    assert [claim.is_waiting for claim in claims] == [False] * 4 + [True] * 6
    assert share.leave(claims[0]) == [claims[4]]


def test_who_gives_up_is_not_waited_for() -> None:
    share, tenant = DeviceShare(100), Sharer(100)
    first, second, third = (share.enter(tenant, 100, nobody) for _ in range(3))
    assert share.leave(second) == [] and share.leave(second) == []
    assert share.leave(first) == [third] and share.leave(first) == []
    assert share.leave(third) == [] and share.held == tenant.held == tenant.waiting == 0


def test_i5_backlogged_tenants_share_by_weight() -> None:
    share, heavy, light = DeviceShare(40), Sharer(300), Sharer(100)
    device: deque[tuple[Sharer, Claim]] = deque()
    owner: dict[Claim, Sharer] = {}
    for _ in range(1000):
        for sharer in (light, heavy):
            claim = share.enter(sharer, 1, nobody)
            owner[claim] = sharer
            if not claim.is_waiting:
                device.append((sharer, claim))
    served = {heavy: 0, light: 0}
    for _ in range(1000):  # the device works in order
        sharer, claim = device.popleft()
        served[sharer] += 1
        device.extend((owner[each], each) for each in share.leave(claim))
    assert 2.5 < served[heavy] / served[light] < 3.5, served


Step = tuple[str, int, int]


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=4),
    bound=COSTS,
    steps=st.lists(st.tuples(st.sampled_from(["enter", "leave", "leave"]), st.integers(0, 99), COSTS), max_size=80),
)
def test_i5_books_are_exact_and_bounds_hold(weights: list[int], bound: int, steps: list[Step]) -> None:
    share = DeviceShare(bound)
    sharers = [Sharer(weight) for weight in weights]
    live: list[tuple[int, Claim]] = []
    for what, number, cost in steps:
        if what == "enter":
            whose = number % len(sharers)
            idle = not sharers[whose].held
            claim = share.enter(sharers[whose], cost, nobody)
            assert not (idle and claim.is_waiting), "who holds nothing waited"
            live.append((whose, claim))
        elif live:
            _, claim = live.pop(number % len(live))
            let_in = share.leave(claim)
            assert all(not each.is_waiting for each in let_in)
        held = [
            sum(claim.cost for owner, claim in live if owner == at and not claim.is_waiting)
            for at in range(len(sharers))
        ]
        assert [sharer.held for sharer in sharers] == held and share.held == sum(held)
        largest = max((claim.cost for _, claim in live), default=0)
        assert all(each <= bound * 3 // 4 + largest for each in held), "more than one claim above its part"
        for at, sharer in enumerate(sharers):
            line = [claim for owner, claim in live if owner == at and claim.is_waiting]
            assert sharer.waiting == len(line)
            assert not (line and not sharer.held), "a tenant that holds nothing waits"
    for _, claim in live:
        share.leave(claim)
    assert share.held == 0 and all(not sharer.held and not sharer.waiting for sharer in sharers)
