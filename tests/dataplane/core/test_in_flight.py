"""What transfers hold: bounded for each tenant and in all, nobody waits for another tenant's slow clients."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataplane.core.in_flight import InFlight, TenantFlight
from dataplane.core.lines import Place

SIZES = st.integers(1, 100)


def test_beyond_its_bound_a_tenant_waits_for_its_own() -> None:
    node, tenant = InFlight(1000), TenantFlight(100)
    assert node.enter(tenant) is None
    node.hold(tenant, 99)
    assert node.enter(tenant) is None
    node.hold(tenant, 99)
    first, second = node.enter(tenant), node.enter(tenant)
    assert first is not None and second is not None and node.advance() == []
    node.release(tenant, 99)
    assert node.advance() == [first] and node.advance() == [], "one at a time: only then is known what it holds"
    node.hold(tenant, 50)
    node.leave(tenant, first)
    assert node.advance() == []
    node.release(tenant, 99)
    assert node.advance() == [second]
    node.leave(tenant, second)
    assert not node.is_waited_for


def test_a_tenant_that_holds_nothing_never_waits_for_others() -> None:
    node, slow, victim = InFlight(100), TenantFlight(100), TenantFlight(10)
    node.hold(slow, 5000)
    assert node.enter(victim) is None
    node.hold(victim, 1)
    waiting = node.enter(victim)
    assert waiting is not None and node.advance() == []
    node.release(victim, 1)
    assert node.advance() == [waiting]


def test_who_gives_up_is_not_waited_for() -> None:
    node, tenant = InFlight(100), TenantFlight(10)
    node.hold(tenant, 10)
    first, second = node.enter(tenant), node.enter(tenant)
    assert first is not None and second is not None
    node.leave(tenant, first)
    node.release(tenant, 10)
    assert node.advance() == [second]
    node.leave(tenant, second)
    assert node.enter(tenant) is None and not node.is_waited_for


@settings(max_examples=200, deadline=None)
@example(bounds=[1, 76], bound_bytes=76, steps=[("begin", 1, 75), ("begin", 0, 1), ("begin", 0, 1), ("begin", 1, 1)])
@given(
    bounds=st.lists(SIZES, min_size=1, max_size=4),
    bound_bytes=SIZES,
    steps=st.lists(st.tuples(st.sampled_from(["begin", "end", "give up"]), st.integers(0, 3), SIZES), max_size=100),
)
def test_bounds_hold_nobody_is_forgotten(
    bounds: list[int], bound_bytes: int, steps: list[tuple[str, int, int]]
) -> None:
    node = InFlight(bound_bytes)
    tenants = [TenantFlight(bound) for bound in bounds]
    held: list[tuple[TenantFlight, int]] = []
    waiting: dict[Place, tuple[TenantFlight, int]] = {}

    def begin(tenant: TenantFlight, size: int) -> None:
        held.append((tenant, size))
        node.hold(tenant, size)

    def settle() -> None:
        while True:
            held_bytes = node.held_bytes
            admitted = node.advance()  # one of each tenant, all judged at this moment
            if not admitted:
                return
            for place in admitted:
                tenant, size = waiting.pop(place)
                assert not tenant.held_bytes or (tenant.held_bytes < tenant.bound_bytes and held_bytes < bound_bytes)
                begin(tenant, size)
                node.leave(tenant, place)

    for what, number, size in steps:
        tenant = tenants[number % len(tenants)]
        if what == "begin":
            place = node.enter(tenant)
            if place is None:
                begin(tenant, size)
            else:
                waiting[place] = (tenant, size)
        elif what == "end" and held:
            owner, amount = held.pop(number % len(held))
            node.release(owner, amount)
        elif what == "give up" and waiting:
            place = next(iter(waiting))
            node.leave(waiting.pop(place)[0], place)
        settle()
        assert node.held_bytes == sum(amount for _, amount in held)
        for one in tenants:
            assert one.held_bytes == sum(amount for owner, amount in held if owner is one)
            assert one.held_bytes < one.bound_bytes + 100
            assert one.held_bytes or not one.line, "work-conserving: who holds nothing does not wait"
    while held:
        node.release(*held.pop())
        settle()
    assert not waiting and not node.is_waited_for
