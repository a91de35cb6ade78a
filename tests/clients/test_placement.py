"""The placement rules: everybody agrees, membership moves only what it must, load is even, tenants are apart."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern.credentials import NodeEndpoint
from saltern.errors import UnavailableError
from saltern.keys import BlockHash
from saltern.names import NamespaceId, TenantId
from saltern.placement import Placement, ReadLoad

NAMES = [f"node-{number}" for number in range(16)]
ANCHORS = [number.to_bytes(8, "little") for number in range(2000)]
node_sets = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)


def placement(names: list[str], *, read_only: tuple[str, ...] = (), tenant: str = "acme") -> Placement:
    nodes = [NodeEndpoint(name, read_only=name in read_only) for name in names]
    return Placement(TenantId(tenant), NamespaceId("chat"), nodes, block_tokens=512)


def pair_ids(rule: Placement, anchor: bytes) -> list[str]:
    return [node.node_id for node in rule.pair_of(anchor).asked]


def hashes(count: int, first: int = 0) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(8, "little")) for number in range(first, first + count)]


@given(names=node_sets, anchor=st.binary(min_size=1, max_size=40), order=st.randoms(use_true_random=False))
def test_clients_agree_whatever_order_they_learn_the_nodes_in(names: list[str], anchor: bytes, order: object) -> None:
    shuffled = list(names)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert pair_ids(placement(names), anchor) == pair_ids(placement(shuffled), anchor)
    assert placement(names).home_of(anchor) == placement(shuffled).home_of(anchor)
    assert len(pair_ids(placement(names), anchor)) == min(2, len(names))


@given(names=st.lists(st.sampled_from(NAMES), min_size=3, unique=True), anchor=st.binary(min_size=1, max_size=40))
def test_a_node_that_goes_moves_only_what_it_had(names: list[str], anchor: bytes) -> None:
    before = pair_ids(placement(names), anchor)
    for gone in names:
        after = pair_ids(placement([name for name in names if name != gone]), anchor)
        if gone in before:
            [stays] = [name for name in before if name != gone]
            assert after[0] == stays  # the other copy becomes the first
        else:
            assert after == before
        home = placement(names).home_of(anchor).node_id
        if gone != home:
            assert placement([name for name in names if name != gone]).home_of(anchor).node_id == home


@given(names=st.lists(st.sampled_from(NAMES[:15]), min_size=2, unique=True), anchor=st.binary(min_size=1, max_size=40))
def test_a_node_that_joins_takes_only_its_share(names: list[str], anchor: bytes) -> None:
    """Never a chain from one old node to another."""
    before, after = pair_ids(placement(names), anchor), pair_ids(placement([*names, NAMES[15]]), anchor)
    assert [name for name in after if name != NAMES[15]] == before[: 2 - (NAMES[15] in after)]


@pytest.mark.parametrize("count", [2, 3, 5, 8, 16])
def test_anchors_are_spread_evenly(count: int) -> None:
    rule = placement(NAMES[:count])
    firsts = Counter(pair_ids(rule, anchor)[0] for anchor in ANCHORS)
    homes = Counter(rule.home_of(anchor).node_id for anchor in ANCHORS)
    for spread in (firsts, homes):
        assert len(spread) == count
        assert max(spread.values()) < 1.35 * len(ANCHORS) / count


def test_i2_the_same_prompt_of_two_tenants_is_not_on_the_same_nodes() -> None:
    moved = sum(
        pair_ids(placement(NAMES), anchor) != pair_ids(placement(NAMES, tenant="bravo"), anchor) for anchor in ANCHORS
    )
    assert moved > 0.9 * len(ANCHORS)


def test_the_anchor_is_the_session_or_the_block_behind_the_head_or_the_first_block() -> None:
    rule = placement(NAMES)
    assert rule.head_blocks == 8  # 4096 tokens
    short, long = hashes(8), hashes(9)
    assert rule.anchor_of(short) == rule.anchor_of(hashes(1))
    assert rule.anchor_of(long) == rule.anchor_of([*hashes(8, first=50), long[8], *hashes(5, first=80)])
    assert rule.anchor_of(short, "s") == rule.anchor_of(hashes(3, first=9), "s") != rule.anchor_of(short, "t")
    # A session cannot be made to look like a block.
    assert rule.anchor_of(hashes(1), hashes(1)[0].decode()) != rule.anchor_of(hashes(1))


@given(names=st.lists(st.sampled_from(NAMES), min_size=2, unique=True), anchor=st.binary(min_size=1, max_size=40))
def test_a_node_that_is_emptied_is_read_and_gets_nothing_new(names: list[str], anchor: bytes) -> None:
    first, second = pair_ids(placement(names), anchor)
    emptied = placement(names, read_only=(first,)).pair_of(anchor)
    assert [node.node_id for node in emptied.asked] == [first, second]
    assert [node.node_id for node in emptied.writable] == [second]
    assert placement(names, read_only=(first,)).home_of(anchor).node_id != first
    both = placement(names, read_only=(first, second)).pair_of(anchor)
    assert both.asked[0].node_id == first and len(both.asked) == 2
    if len(names) > 2:
        assert [node.read_only for node in both.asked] == [True, False]
    else:  # nobody else is there: serving on is what emptying does not end
        assert both.writable == both.asked


def test_without_nodes_there_is_no_placement() -> None:
    with pytest.raises(UnavailableError) as refused:
        placement([])
    assert refused.value.reason == "NO_LIVE_NODE"


def test_reads_go_to_the_lighter_node_and_a_node_that_joins_is_not_flooded() -> None:
    load = ReadLoad()
    assert load.lightest(["a", "b"]) == "a"
    load.note("a", 10)
    assert load.lightest(["a", "b"]) == "b"
    for _ in range(2000):
        load.note(load.lightest(["a", "b"]), 1000)
    chosen = Counter[str]()
    for _ in range(400):
        node = load.lightest(["a", "b", "c"])
        chosen[node] += 1
        load.note(node, 100)
    assert chosen["c"] < 300, "what was read long ago still counts in full"
