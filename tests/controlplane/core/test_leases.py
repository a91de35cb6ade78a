"""I4 over several nodes: what one gains another has given back first; nobody loses by a member that leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core import leases
from controlplane.core.leases import NOTHING, Holding, Member
from saltern.names import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


class Book:
    """Holdings of one quota, as a database keeps them."""

    def __init__(self, quota: int, **capacities: int) -> None:
        self.quota = quota
        self.version = 0
        self.reserved: dict[NodeId, int] = {}
        self.members = {NodeId(node): Member(capacity, 0) for node, capacity in capacities.items()}
        self.held: dict[NodeId, Holding] = {}
        self.step()

    def step(self) -> int:
        """One step; returns the version of the policy that carries it."""
        self.version += 1
        changed = leases.lease(self.quota, self.held, self.members, self.version, self.reserved)
        # The short way for what is at rest gives what the long one gives.
        targets = leases.place(self.quota, self.held, self.members, self.reserved)
        assert changed == leases.step(self.quota, self.held, self.members, targets, self.version)
        self.held.update(changed)
        return self.version

    def settle(self, node: NodeId, version: int | None = None) -> None:
        old = self.members[node]
        self.members[node] = Member(old.capacity_bytes, version or self.version, old.takes_leases)

    def granted(self) -> dict[str, int]:
        return {node: holding.granted_bytes for node, holding in self.held.items() if holding.granted_bytes}

    def believed(self) -> int:
        return sum(leases.believed_bytes(self.held.get(node, NOTHING), self.members[node]) for node in self.members)


def test_a_single_node_has_the_whole_quota_at_once() -> None:
    assert Book(1000, a=7).granted() == {"a": 1000}


def test_nodes_that_are_there_share_by_capacity_at_once() -> None:
    assert Book(1000, a=1, b=3).granted() == {"a": 250, "b": 750}


def test_i4_a_node_that_joins_gets_its_share_when_the_others_have_given_it_back() -> None:
    book = Book(1000, a=1)
    book.members[B] = Member(1, 0)
    shrunk = book.step()
    assert book.granted() == {"a": 500}
    assert book.step() and book.granted() == {"a": 500}, "an unsettled shrink frees nothing"
    book.settle(A, shrunk)
    book.step()
    assert book.granted() == {"a": 500, "b": 500}


def test_i4_a_raised_quota_grows_at_once_and_a_lowered_one_shrinks_first() -> None:
    book = Book(1000, a=1, b=1)
    book.quota = 2000
    book.step()
    assert book.granted() == {"a": 1000, "b": 1000}
    book.quota = 400
    book.step()
    assert book.granted() == {"a": 200, "b": 200}
    book.quota = 600
    book.step()
    assert book.granted() == {"a": 200, "b": 200}, "2000 may still be in force"
    book.settle(A)
    book.settle(B)
    book.step()
    assert book.granted() == {"a": 300, "b": 300}


def test_who_leaves_is_followed_in_proportion_and_nobody_shrinks_for_it() -> None:
    book = Book(1200, a=1, b=2, c=3)
    book.members[C] = Member(3, book.version, takes_leases=False)
    drained = book.step()
    assert book.granted() == {"a": 200, "b": 400}
    book.settle(C, drained)
    book.step()
    assert book.granted() == {"a": 400, "b": 800}


def test_a_quota_that_nobody_could_take_stays_where_it_is() -> None:
    book = Book(1000, a=1, b=1)
    for node in (A, B):
        book.members[node] = Member(1, book.version, takes_leases=False)
    book.step()
    assert book.granted() == {"a": 500, "b": 500}
    book.quota = 600
    book.step()
    assert book.granted() == {"a": 300, "b": 300}


def test_a_quota_change_keeps_the_proportions_that_demand_has_made() -> None:
    book = Book(1000, a=1, b=1)
    book.held = {A: Holding(900, 900, 900, 1), B: Holding(100, 100, 100, 1)}
    book.quota = 2000
    book.step()
    assert book.granted() == {"a": 1800, "b": 200}


def test_i5_a_reservation_that_demand_has_left_no_room_for_takes_it_back() -> None:
    book = Book(1000, a=1, b=1)
    book.held = {A: Holding(900, 900, 900, 1), B: Holding(100, 100, 100, 1)}
    book.reserved = {A: 100, B: 100}
    book.step()
    assert book.granted() == {"a": 900, "b": 100}
    book.reserved = {A: 300, B: 300}
    book.settle(A, book.step())
    book.step()
    assert book.granted() == {"a": 500, "b": 500}


actions = st.lists(
    st.one_of(
        st.tuples(st.just("quota"), st.integers(0, 50)),
        st.tuples(st.just("settle"), st.integers(0, 3)),
        st.tuples(st.just("late"), st.integers(0, 3)),
        st.tuples(st.just("drain"), st.integers(0, 3)),
        st.tuples(st.just("reserve"), st.integers(0, 50)),
        st.tuples(st.just("rest"), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(st.integers(0, 50), st.lists(st.integers(0, 9), min_size=1, max_size=4), actions)
def test_i4_beliefs_fit_the_quota_whatever_happens(
    quota: int, capacities: list[int], steps: list[tuple[str, int]]
) -> None:
    nodes = [NodeId(f"n{number}") for number in range(len(capacities))]
    book = Book(quota, **dict(zip(nodes, capacities, strict=True)))
    for what, number in steps:
        node = nodes[number % len(nodes)]
        before = book.believed()
        if what == "quota":
            book.quota = number
        elif what == "settle":
            book.settle(node)
        elif what == "late":
            book.settle(node, max(book.members[node].settled_version, book.version - 2))
        elif what == "reserve":
            book.reserved = leases.split_bytes(
                min(number, book.quota), {n: book.members[n].capacity_bytes for n in nodes}
            )
        elif what == "rest":
            for every in nodes:
                book.settle(every)
        else:
            old = book.members[node]
            book.members[node] = Member(old.capacity_bytes, old.settled_version, not old.takes_leases)
        book.step()
        assert book.believed() <= max(book.quota, before)
        assert sum(holding.target_bytes for holding in book.held.values()) <= book.quota
    for _ in range(3):
        for node in nodes:
            book.settle(node)
        book.step()
    if any(member.takes_leases and member.capacity_bytes for member in book.members.values()):
        assert sum(book.granted().values()) == book.quota
    for node in nodes:
        book.settle(node)
    settled = dict(book.held)
    book.step()
    assert book.held == settled, "nothing moves where nothing has happened"
