from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.quota_split import split_bytes, split_quota
from saltern.errors import InvalidArgumentError
from saltern.names import NodeId
from tenants.quota import BYTES_MAX, TierQuota

capacities = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9]{0,3}", fullmatch=True).map(NodeId), st.integers(0, BYTES_MAX), max_size=12
)


@given(st.integers(0, BYTES_MAX), capacities)
def test_i4_shares_sum_to_the_quota_and_never_past_it(total_bytes: int, nodes: dict[NodeId, int]) -> None:
    shares = split_bytes(total_bytes, nodes)
    assert shares.keys() == nodes.keys()
    assert all(share >= 0 for share in shares.values())
    assert sum(shares.values()) == (total_bytes if sum(nodes.values()) else 0)


@given(st.integers(0, BYTES_MAX), capacities)
def test_a_share_is_within_one_byte_of_proportional(total_bytes: int, nodes: dict[NodeId, int]) -> None:
    capacity_bytes = sum(nodes.values())
    for node, share in split_bytes(total_bytes, nodes).items():
        if capacity_bytes:
            assert abs(share * capacity_bytes - total_bytes * nodes[node]) < capacity_bytes


@given(st.integers(0, BYTES_MAX), st.integers(0, BYTES_MAX), st.integers(1, 1000), capacities)
def test_i5_a_share_is_a_valid_quota(a_bytes: int, b_bytes: int, weight: int, nodes: dict[NodeId, int]) -> None:
    quota = TierQuota(reserved_bytes=min(a_bytes, b_bytes), limit_bytes=max(a_bytes, b_bytes), weight=weight)
    shares = split_quota(quota, nodes)
    assert sum(share.limit_bytes for share in shares.values()) <= quota.limit_bytes
    assert sum(share.reserved_bytes for share in shares.values()) <= quota.reserved_bytes
    assert all(share.weight == weight for share in shares.values())


@given(capacities, st.lists(st.integers(0, 1000), min_size=1, max_size=5), st.integers(0, 1000))
def test_i5_reservations_that_fit_the_cluster_fit_every_node(
    nodes: dict[NodeId, int], parts: list[int], free: int
) -> None:
    capacity_bytes, whole = sum(nodes.values()), sum(parts) + free
    quotas = [capacity_bytes * part // whole if whole else 0 for part in parts]
    reserved = [split_quota(TierQuota(min(q, BYTES_MAX), BYTES_MAX), nodes) for q in quotas]
    for node, own_bytes in nodes.items():
        assert sum(shares[node].reserved_bytes for shares in reserved) <= own_bytes


@given(st.integers(0, BYTES_MAX), capacities)
def test_the_split_does_not_depend_on_the_order_of_nodes(total_bytes: int, nodes: dict[NodeId, int]) -> None:
    assert split_bytes(total_bytes, dict(reversed(nodes.items()))) == split_bytes(total_bytes, nodes)


def test_one_node_gets_all_of_it() -> None:
    assert split_bytes(1023, {NodeId("only"): 7}) == {NodeId("only"): 1023}


def test_leftover_bytes_go_to_the_largest_remainders() -> None:
    nodes = {NodeId("a"): 1, NodeId("b"): 1, NodeId("c"): 2}
    assert split_bytes(10, nodes) == {"a": 3, "b": 2, "c": 5}


@pytest.mark.parametrize(("total_bytes", "capacity_bytes"), [(-1, 1), (1, -1)])
def test_negative_bytes_are_refused(total_bytes: int, capacity_bytes: int) -> None:
    with pytest.raises(InvalidArgumentError):
        split_bytes(total_bytes, {NodeId("a"): capacity_bytes})
