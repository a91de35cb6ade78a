from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.quota_split import split_bytes, split_rate, split_rates, split_reserved
from saltern.errors import InvalidArgumentError
from saltern.names import NodeId
from tenants.quota import BYTES_MAX, RATE_MAX, RateLimits, TierQuota

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


@given(st.integers(0, BYTES_MAX), st.integers(0, BYTES_MAX), capacities)
def test_i5_a_part_of_a_reservation_fits_the_part_of_its_limit(
    a_bytes: int, b_bytes: int, nodes: dict[NodeId, int]
) -> None:
    quota = TierQuota(reserved_bytes=min(a_bytes, b_bytes), limit_bytes=max(a_bytes, b_bytes))
    reserved, limits = split_reserved(quota, nodes), split_bytes(quota.limit_bytes, nodes)
    assert sum(reserved.values()) <= quota.reserved_bytes
    assert all(reserved[node] <= limits[node] for node in nodes)


@given(capacities, st.lists(st.integers(0, 1000), min_size=1, max_size=5), st.integers(0, 1000))
def test_i5_reservations_that_fit_the_cluster_fit_every_node(
    nodes: dict[NodeId, int], parts: list[int], free: int
) -> None:
    capacity_bytes, whole = sum(nodes.values()), sum(parts) + free
    quotas = [capacity_bytes * part // whole if whole else 0 for part in parts]
    reserved = [split_reserved(TierQuota(min(q, BYTES_MAX), BYTES_MAX), nodes) for q in quotas]
    for node, own_bytes in nodes.items():
        assert sum(shares[node] for shares in reserved) <= own_bytes


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


@given(st.integers(1, RATE_MAX), capacities)
def test_i4_shares_of_a_rate_sum_to_it_and_none_of_them_lifts_it(rate_per_s: int, nodes: dict[NodeId, int]) -> None:
    shares = split_rate(rate_per_s, nodes)
    assert shares.keys() == nodes.keys()
    assert all(share >= 1 for share in shares.values())  # 0 would be no limit
    if rate_per_s >= len(nodes) and sum(nodes.values()):
        assert sum(shares.values()) == rate_per_s
    else:
        assert set(shares.values()) <= {1}


@given(st.integers(0, RATE_MAX), capacities)
def test_a_share_of_a_rate_is_proportional_to_within_one_for_each_node(
    rate_per_s: int, nodes: dict[NodeId, int]
) -> None:
    capacity_bytes = sum(nodes.values())
    if rate_per_s >= len(nodes) and capacity_bytes:
        for node, share in split_rate(rate_per_s, nodes).items():
            assert abs(share * capacity_bytes - rate_per_s * nodes[node]) <= len(nodes) * capacity_bytes


@given(st.integers(0, RATE_MAX), capacities)
def test_a_larger_node_never_gets_less_of_a_rate(rate_per_s: int, nodes: dict[NodeId, int]) -> None:
    shares = split_rate(rate_per_s, nodes)
    for node, own_bytes in nodes.items():
        assert all(shares[other] <= shares[node] for other in nodes if nodes[other] < own_bytes)


def test_no_limit_is_no_limit_on_every_node() -> None:
    assert split_rate(0, {NodeId("a"): 1, NodeId("b"): 0}) == {"a": 0, "b": 0}
    assert split_rate(0, {}) == {}


def test_equal_nodes_share_a_rate_equally_and_one_has_all_of_it() -> None:
    assert split_rate(1000, dict.fromkeys(map(NodeId, "abcd"), 64)) == dict.fromkeys("abcd", 250)
    assert split_rate(1000, {NodeId("only"): 0}) == {"only": 1}  # a node that can hold nothing
    assert split_rate(1000, {NodeId("only"): 5}) == {"only": 1000}


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        split_rate(-1, {NodeId("a"): 1})


def test_writes_to_ssd_follow_the_ssd_capacities() -> None:
    dram = {NodeId("a"): 1, NodeId("b"): 3}
    shares = split_rates(RateLimits(400, 800, 1000), dram, {NodeId("a"): 7, NodeId("b"): 0})
    assert shares == {"a": RateLimits(100, 200, 999), "b": RateLimits(300, 600, 1)}
