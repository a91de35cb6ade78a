"""I4 for limits of namespaces over several nodes: shares follow the quota, and never together pass the limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core import leases
from controlplane.core.leases import NOTHING, Holding, Member
from controlplane.core.namespace_leases import lease_namespace, share_before_leased
from saltern.names import NodeId

NODES = [NodeId(name) for name in "abc"]
A, B, C = NODES


class Books:
    """A quota and a limit within it, and what each node goes by: it may be any policy from its settled one on."""

    def __init__(self, quota: int, limit: int) -> None:
        self.quota, self.limit, self.version = quota, limit, 0
        self.members = {node: Member(1, 0) for node in NODES}
        self.placed: dict[NodeId, Holding] = {}
        self.held: dict[NodeId, Holding] = {}
        self.policies: list[dict[NodeId, int]] = [{}]
        self.limits = [limit]  # by version
        self.goes_by = dict.fromkeys(NODES, 0)

    def step(self) -> None:
        self.version += 1
        self.placed.update(leases.lease(self.quota, self.placed, self.members, self.version, {}))
        placed_bytes = {node: holding.target_bytes for node, holding in self.placed.items()}
        self.held.update(lease_namespace(self.limit, self.held, self.members, self.version, placed_bytes))
        self.policies.append({node: holding.granted_bytes for node, holding in self.held.items()})
        self.limits.append(self.limit)

    def hear(self, node: NodeId, version: int) -> None:
        """A node gets a policy; they come in order, and some are never heard of."""
        self.goes_by[node] = max(self.goes_by[node], version)

    def settle(self, node: NodeId) -> None:
        old = self.members[node]
        self.members[node] = Member(old.capacity_bytes, self.goes_by[node], old.takes_leases)

    def in_force(self) -> int:
        """The sum of what nodes may hold by the policies that they go by."""
        return sum(self.policies[version].get(node, 0) for node, version in self.goes_by.items())

    def highest_limit(self) -> int:
        """The highest that a policy had which somebody may still go by."""
        return max(self.limits[min(self.goes_by.values()) :])


def test_a_limit_lies_where_the_quota_lies() -> None:
    books = Books(quota=900, limit=300)
    books.step()
    assert books.policies[-1] == {A: 100, B: 100, C: 100}
    books.placed = {A: Holding(600, 600, 600, 1), B: Holding(300, 300, 300, 1)}
    books.members.pop(C)
    books.held.pop(C)
    for node in (A, B):
        books.hear(node, 1)
        books.settle(node)
    books.step()
    assert books.policies[-1] == {A: 200, B: 100}


def test_i4_what_one_node_gains_another_has_given_back() -> None:
    books = Books(quota=900, limit=300)
    books.step()
    books.members[A] = Member(1, 0, takes_leases=False)  # is to be drained
    books.step()
    assert books.policies[-1] == {A: 0, B: 100, C: 100}, "nobody knows yet that A goes by less"
    books.hear(A, books.version)
    books.settle(A)
    books.step()
    assert books.policies[-1] == {A: 0, B: 150, C: 150}


def test_without_a_quota_there_is_nothing_to_share() -> None:
    books = Books(quota=0, limit=300)
    books.step()
    assert not any(books.policies[-1].values())
    assert share_before_leased(300, 0, 0) == 0


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
def test_i4_shares_before_the_first_step_are_within_the_limit(limit: int, granted: list[int]) -> None:
    quota = sum(granted)
    assert sum(share_before_leased(limit, own, quota) for own in granted) <= limit


COMMANDS = st.one_of(
    st.tuples(st.just("step"), st.just(A), st.just(0)),
    st.tuples(st.just("hear"), st.sampled_from(NODES), st.integers(0, 3)),
    st.tuples(st.just("settle"), st.sampled_from(NODES), st.just(0)),
    st.tuples(st.just("quota"), st.just(A), st.integers(0, 1000)),
    st.tuples(st.just("limit"), st.just(A), st.integers(0, 1000)),
    st.tuples(st.just("drain"), st.sampled_from(NODES), st.integers(0, 1)),
    st.tuples(st.just("demand"), st.just(A), st.integers(0, 1000)),
)


@given(st.integers(0, 1000), st.integers(0, 1000), st.lists(COMMANDS, max_size=60))
def test_i4_policies_of_any_age_together_never_pass_the_limit(
    quota: int, limit: int, commands: list[tuple[str, NodeId, int]]
) -> None:
    """However limit and quota change and move meanwhile, whatever nodes hear late or never."""
    books = Books(quota, limit)
    books.step()
    for what, node, value in commands:
        if what == "step":
            books.step()
        elif what == "hear":
            books.hear(node, max(books.goes_by[node], books.version - value))
        elif what == "settle":
            books.settle(node)
        elif what == "quota":
            books.quota = value
        elif what == "limit":
            books.limit = value
        elif what == "drain":
            old = books.members[node]
            books.members[node] = Member(old.capacity_bytes, old.settled_version, takes_leases=bool(value))
        else:
            total = sum(holding.target_bytes for holding in books.placed.values())
            part = total * value // 1000
            targets = {A: part, B: total - part, C: 0}
            books.placed = {
                name: Holding(old.granted_bytes, old.believed_bytes, targets[name], old.version)
                for name, old in ((name, books.placed.get(name, NOTHING)) for name in NODES)
            }
        assert books.in_force() <= books.highest_limit()
        believed = sum(leases.believed_bytes(books.held.get(name, NOTHING), books.members[name]) for name in NODES)
        assert books.in_force() <= believed <= max(books.limits)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_limit_arrives_where_it_should_when_everybody_follows(quota: int, limit: int) -> None:
    books = Books(quota, limit)
    for _ in range(4):
        books.step()
        for node in NODES:
            books.hear(node, books.version)
            books.settle(node)
    assert books.in_force() == (limit if quota else 0)
