"""Victims come from heaps kept between puts; they must be those that one look at every tenant would choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core import borrowers as borrowers_module
from dataplane.core import pool as pool_module
from dataplane.core.borrowers import Borrowers
from dataplane.core.entry import Pin, PutTicket
from dataplane.core.eviction import Eviction
from dataplane.core.reservations import Reservations
from dataplane.core.victims import Room, choose_room
from tests.support.cache_node import Node, key_of, make_policy, node_of
from tests.support.plain_victims import plain_victims

TENANTS = [f"t{number}" for number in range(6)]
CAPACITY = 20

tenants = st.sampled_from(TENANTS)
numbers = st.integers(0, 12)
quotas = st.fixed_dictionaries(
    {
        name: st.tuples(
            st.sampled_from([0, 0, 2, 3]), st.sampled_from([8, 20, 20]), st.sampled_from([100, 100, 50, 333])
        )
        for name in TENANTS
    }
)
commands = st.lists(
    st.one_of(
        st.tuples(st.just("put"), tenants, numbers, st.sampled_from([1, 1, 1, 2, 3, 7])),
        st.tuples(st.just("put"), tenants, numbers, st.just(1)),
        st.tuples(st.just("get"), tenants, numbers, st.integers(1, 6)),
        st.tuples(st.just("hold"), tenants, numbers, st.integers(1, 6)),
        st.tuples(st.just("begin"), tenants, numbers, st.integers(1, 2)),
        st.tuples(st.sampled_from(["release", "end"]), tenants, numbers, st.just(0)),
        st.tuples(st.sampled_from(["delete", "touch", "wait"]), tenants, numbers, st.integers(1, 4)),
    ),
    min_size=20,
    max_size=100,
)


@pytest.fixture
def judged() -> Iterator[list[int]]:
    """Every choice of the core is compared with the oracle's; yields how many victims each choice had."""
    chosen: list[int] = []

    def choose(extents: Any, requester: Any, borrowers: Borrowers, extent_bytes: int, now_ns: int, **_: Any) -> Any:
        owners = CURRENT[-1].core._pool.tenants.values()
        expected = plain_victims(extents, requester, owners, extent_bytes, now_ns)
        room = choose_room(extents, requester, borrowers, extent_bytes, now_ns)
        assert room == (None if expected is None else Room(expected, []))
        chosen.append(0 if room is None else len(room.victims))
        return room

    with patch.object(pool_module, "choose_room", choose):
        yield chosen


CURRENT: list[Node] = []


def run(node: Node, wanted: list[tuple[str, str, int, int]]) -> None:
    CURRENT[:] = [node]
    for tenant in TENANTS:
        node.fill(tenant, range(4))
    pins: list[Pin | None] = []
    tickets: list[PutTicket] = []
    for command, tenant, number, count in wanted:
        partition = node.partition(tenant)
        keys = [key_of(n) for n in range(number, number + count)]
        if command == "put":
            node.put(tenant, number, count)
        elif command == "begin":
            started = node.start(tenant, number, count)
            if isinstance(started, PutTicket):
                tickets.append(started)
        elif command == "end" and tickets:
            node.core.put_commit(tickets.pop(number % len(tickets)), 0, node.tick())
        elif command == "get":
            node.core.get_end(node.core.get_start(partition, keys, node.tick()))
        elif command == "hold":
            pins += node.core.get_start(partition, keys, node.tick())
        elif command == "release":
            node.core.get_end(pins[: len(pins) // 2])
            del pins[: len(pins) // 2]
        elif command == "delete":
            node.core.delete(partition, keys)
        elif command == "touch":
            node.core.touch(partition, keys, node.tick())
        elif command == "wait":
            node.now_ns += number * 10**9
        node.core.check_invariants()


@pytest.mark.parametrize("noted_max", [1, 64])
@pytest.mark.parametrize(
    ("eviction", "reservations"),
    [
        (Eviction.LRU, Reservations.STRICT),
        (Eviction.FIFO, Reservations.STRICT),
        (Eviction.TWO_QUEUE, Reservations.STRICT),
        (Eviction.TWO_QUEUE, Reservations.EARNING),
    ],
)
def test_i5_victims_are_those_of_one_look_at_every_tenant(
    judged: list[int], eviction: Eviction, reservations: Reservations, noted_max: int
) -> None:
    @given(quotas, commands)
    @settings(max_examples=25, deadline=None)
    def compare(wanted_quotas: dict[str, tuple[int, int, int]], wanted: list[tuple[str, str, int, int]]) -> None:
        reserved = sum(quota[0] for quota in wanted_quotas.values())
        assert reserved <= CAPACITY
        run(node_of(CAPACITY, wanted_quotas, eviction, reservations), wanted)

    with patch.object(borrowers_module, "NOTED_MAX", noted_max):
        compare()
    assert sum(judged) > 100, "it chose victims at all"


def test_a_put_looks_at_few_tenants_however_many_borrow() -> None:
    names = [f"t{number}" for number in range(500)]
    node = node_of(500, dict.fromkeys(names, (0, 500)))
    for name in names:
        node.put(name, 1)
    looked_at = 0
    original = borrowers_module._next_victim

    def count(owner: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return original(owner)

    with patch.object(borrowers_module, "_next_victim", count):
        for number in range(20):
            partition = node.partition(names[number])
            ticket = node.core.put_start(partition, key_of(2), 4096, node.tick())
            assert isinstance(ticket, PutTicket)
            node.core.put_commit(ticket, 0, node.tick())
    assert looked_at < borrowers_module.NOTED_MAX + 20 * 4
    assert [node.there(name, range(3)) for name in names[:22]] == [[2]] * 20 + [[1], [1]]


def test_heaps_do_not_grow_with_what_tenants_do() -> None:
    """Records that are out of force are swept, though nobody puts anything that would need them."""
    names = [f"t{number}" for number in range(100)]
    node = node_of(1000, dict.fromkeys(names, (0, 500)))
    for name in names:
        node.fill(name, range(2))
    for number in range(2_000):
        node.core.touch(node.partition(names[number % 100]), [key_of(number // 100 % 2)], node.tick())
    queues = node.core._pool.borrowers._queues
    assert sum(len(queue.heap) for queue in queues.values()) <= 2 * 100 + 64
    node.core.check_invariants()


def test_a_tenant_that_is_gone_is_forgotten() -> None:
    node = node_of(8, {"a": (0, 8), "b": (0, 8)})
    node.fill("a", range(4))
    node.apply(make_policy(2, {"b": (0, 8)}))
    node.fill("b", range(20))
    assert node.used("b") == 8
    node.core.check_invariants()
