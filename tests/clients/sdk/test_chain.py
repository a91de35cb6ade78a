"""Chains over several real nodes: two nodes at most, one copy until found again, nothing lost with one node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from saltern.client import Client
from saltern.errors import InvalidArgumentError, ResourceExhaustedError
from saltern.results import AlreadyStored, ChainLookup, Hit, Miss, Refused, Stored
from tests.support.many_nodes import (
    HEAD,
    block_of,
    client_of,
    endpoints_of,
    grant_for,
    hashes,
    items,
    static_nodes,
)
from tests.support.static_node import MIB, StaticNode, tenant_policy

LENGTH = 20
HASHES = hashes(LENGTH)


@pytest.fixture
def nodes() -> Iterator[list[StaticNode]]:
    with static_nodes(4) as running:
        yield running


@pytest.fixture
def client(nodes: list[StaticNode]) -> Iterator[Client]:
    with client_of(grant_for(nodes[0].token("acme", "chat"), endpoints_of(nodes))) as running:
        yield running


def entries(nodes: Sequence[StaticNode]) -> list[int]:
    """How many entries each node has."""
    return [sum(usage.entries for usage in node.usage().tenants.values()) for node in nodes]


def pair(client: Client, hint: str = "") -> list[int]:
    """The numbers of the chain's nodes, the first one first."""
    placement = client._router.placement(client._router.grant)
    asked = placement.pair_of(placement.anchor_of(HASHES, hint)).asked
    return [int(node.node_id.removeprefix("node-")) for node in asked]


def store(client: Client, upto: int = LENGTH) -> None:
    assert client.chain(HASHES).put_many(items(range(upto))) == [Stored()] * upto


def all_hits(results: Sequence[object], positions: Sequence[int] | range) -> bool:
    return [isinstance(r, Hit) and bytes(r.payload) for r in results] == [block_of(position) for position in positions]


def test_a_new_chain_is_on_one_node_and_read_from_there(nodes: list[StaticNode], client: Client) -> None:
    first, _ = pair(client)
    store(client)
    assert entries(nodes) == [LENGTH if number == first else 0 for number in range(4)]
    chain = client.chain(HASHES)
    assert len(chain) == LENGTH and repr(chain) == "Chain(20 blocks)"
    assert chain.lookup().prefix == LENGTH
    assert all_hits(chain.get_many(range(LENGTH)), range(LENGTH))
    buffers = [bytearray(3000) for _ in range(5)]
    results = chain.get_into(range(3, 8), buffers)
    assert all_hits(results, range(3, 8)) and buffers[0][:2000] == block_of(3)


def test_a_chain_found_again_gets_its_second_copy_and_outlives_either_node(
    nodes: list[StaticNode], client: Client
) -> None:
    first, second = pair(client)
    store(client, 12)
    again = client.chain(HASHES)
    found = again.lookup()
    assert found == ChainLookup(12, tuple(range(12)), None)  # with its whole head: it deserves two
    wanted = [*found.copies_wanted, *range(found.prefix, LENGTH)]
    assert again.put_many(items(wanted)) == [Stored()] * LENGTH
    assert entries(nodes)[first] == entries(nodes)[second] == LENGTH and sum(entries(nodes)) == 2 * LENGTH
    assert client.chain(HASHES).lookup() == ChainLookup(LENGTH, (), None)
    nodes[first].stop()
    for _ in range(2):  # when it is found out, and when it is known
        assert all_hits(client.chain(HASHES).get_many(range(LENGTH)), range(LENGTH))
    more = client.chain([*HASHES, *hashes(2, first=500)])
    assert more.lookup().prefix == LENGTH
    assert more.put_many(items([20, 21])) == [Stored()] * 2, "the node that is left takes what is new"


def test_a_chain_found_again_without_its_whole_head_stays_on_one_node(nodes: list[StaticNode], client: Client) -> None:
    store(client, HEAD - 1)
    again = client.chain(HASHES)
    assert again.lookup() == ChainLookup(HEAD - 1, (), None)
    again.put_many(items(range(HEAD - 1, LENGTH)))
    assert sum(entries(nodes)) == LENGTH


def test_what_is_put_in_pieces_does_not_look_found_again(nodes: list[StaticNode], client: Client) -> None:
    """Chunked prefill: the second piece finds the first, which this same prompt has just stored."""
    chain = client.chain(HASHES)
    for first in range(0, LENGTH, 5):
        assert chain.put_many(items(range(first, first + 5))) == [Stored()] * 5
    assert sum(entries(nodes)) == LENGTH
    # A worker is told what the scheduler found.
    worker = client.chain(hashes(LENGTH), reused_blocks=LENGTH)
    assert worker.put_many(items(range(LENGTH))) == [Stored()] * LENGTH
    assert sum(entries(nodes)) == 2 * LENGTH
    assert worker.put_many(items(range(LENGTH))) == [AlreadyStored()] * LENGTH


def test_both_nodes_of_a_chain_found_again_are_read_from(nodes: list[StaticNode], client: Client) -> None:
    first, second = pair(client)
    client.chain(HASHES, reused_blocks=LENGTH).put_many(items(range(LENGTH)))
    for _ in range(6):
        assert all_hits(client.chain(HASHES).get_many(range(LENGTH)), range(LENGTH))
    served = [client._router.load._blocks.get(f"node-{number}", 0) for number in (first, second)]
    assert served == [3 * LENGTH, 3 * LENGTH]


def test_a_block_that_is_only_on_the_other_node_is_found(nodes: list[StaticNode], client: Client) -> None:
    first, second = pair(client)
    client.chain(HASHES, reused_blocks=LENGTH).put_many(items(range(LENGTH)))
    keys = client.block_keys(HASHES)
    chain = client.chain(HASHES)
    assert chain.lookup().prefix == LENGTH
    # Behind the client's back, after it has looked: what it reads next it must find on the other one.
    for number, gone in ((first, keys[:5]), (second, keys[5:9])):
        client._calls.delete({(f"node-{number}", None): gone}, client.start_deadline())
    assert all_hits(chain.get_many(range(LENGTH)), range(LENGTH))
    found = client.chain(HASHES).lookup()
    assert (found.prefix, found.copies_wanted) == (LENGTH, tuple(range(9)))


def test_absent_blocks_are_misses_and_a_gap_ends_the_prefix(client: Client) -> None:
    chain = client.chain(HASHES)
    assert chain.lookup() == ChainLookup(0, (), None)
    assert chain.get_many([0, 7]) == [Miss(), Miss()]
    chain.put_many(items([0, 1, 3]))
    assert client.chain(HASHES).lookup().prefix == 2
    assert all_hits([chain.get_many([0, 2, 3])[index] for index in (0, 2)], [0, 3])
    assert chain.get_many([2]) == [Miss()]
    assert client.chain([]).lookup() == ChainLookup(0, (), None)
    assert (client.chain([]).get_many([]), client.chain([]).put_many([])) == ([], [])


def test_a_hint_keeps_chains_together_whatever_their_length(nodes: list[StaticNode], client: Client) -> None:
    short, long = (
        client.chain(HASHES[:3], placement_hint="conversation"),
        client.chain(hashes(LENGTH, first=900), placement_hint="conversation"),
    )
    short.put_many(items(range(3)))
    long.put_many(items(range(LENGTH)))
    assert entries(nodes)[pair(client, "conversation")[0]] == LENGTH + 3
    grown = client.chain(HASHES, placement_hint="conversation")
    assert grown.lookup().prefix == 3


def test_a_chain_is_deleted_everywhere(nodes: list[StaticNode], client: Client) -> None:
    client.chain(HASHES, reused_blocks=LENGTH).put_many(items(range(LENGTH)))
    client.chain(HASHES, placement_hint="elsewhere").put_many(items(range(LENGTH)))
    assert client.chain(HASHES).delete().count >= 2 * LENGTH
    assert sum(entries(nodes)) == 0
    assert client.chain(HASHES).lookup().prefix == 0


def test_a_node_that_is_emptied_is_read_and_what_is_used_moves_off_it(nodes: list[StaticNode], client: Client) -> None:
    first, second = pair(client)
    store(client, 10)
    token = nodes[0].token("acme", "chat")
    with client_of(grant_for(token, endpoints_of(nodes, read_only=[first]))) as other:
        chain = other.chain(HASHES)
        found = chain.lookup()
        assert (found.prefix, found.copies_wanted) == (10, tuple(range(10)))
        assert all_hits(chain.get_many(range(10)), range(10))
        chain.put_many(items([*found.copies_wanted, *range(10, LENGTH)]))
        assert (entries(nodes)[first], entries(nodes)[second]) == (10, LENGTH)


def test_plain_keys_are_spread_and_found_one_by_one(nodes: list[StaticNode], client: Client) -> None:
    keys = client.block_keys(hashes(200))
    payloads = [block_of(number, 400) for number in range(200)]
    assert client.put_many(zip(keys, payloads, strict=True)) == [Stored()] * 200
    assert all(count > 20 for count in entries(nodes)) and sum(entries(nodes)) == 200
    assert [bytes(result.payload) for result in client.get_many(keys) if isinstance(result, Hit)] == payloads
    shuffled = [*keys[100:], client.block_key(hashes(1, first=999)[0]), *keys[:100]]
    found = client.lookup(shuffled)
    assert (found.prefix, found.found.count(False), found.found[100], found.error) == (100, 1, False, None)
    assert client.delete(keys).count == 200
    assert client.longest_prefix(keys) == 0


def test_i6_a_full_node_refuses_with_its_books_and_the_other_copy_still_counts() -> None:
    tenants = {"acme": tenant_policy(limit_bytes=1 * MIB)}
    with static_nodes(2, tenants) as nodes:
        with client_of(grant_for(nodes[0].token("acme", "chat"), endpoints_of(nodes))) as client:
            huge = bytes(2 * MIB)
            [refused] = client.chain(HASHES[:1]).put_many([(0, huge)])
            assert isinstance(refused, Refused) and isinstance(refused.error, ResourceExhaustedError)
            assert refused.error.metadata["limit_bytes"] == str(1 * MIB)
            first, _ = pair(client)
            nodes[first].apply({"acme": tenant_policy(limit_bytes=4096)})
            results = client.chain(HASHES, reused_blocks=LENGTH).put_many([(0, bytes(8000))])
            assert results == [Stored()]


def test_one_node_costs_no_lookup_and_no_thread() -> None:
    with static_nodes(1) as [node]:
        with client_of(grant_for(node.token("acme", "chat"), endpoints_of([node]))) as client:
            chain = client.chain(HASHES)
            assert chain.put_many(items(range(LENGTH))) == [Stored()] * LENGTH
            assert all_hits(chain.get_many(range(LENGTH)), range(LENGTH))
            assert client._router._executor is None
            [session] = client._router._nodes[endpoints_of([node])[0]].current._idle
            before = session.replies
            assert client.chain(HASHES).get_many([3])[0] == Hit(memoryview(block_of(3)))
            assert client.chain(HASHES).put_many(items([3])) == [AlreadyStored()]
            assert session.replies == before + 2  # GET, PUT
            assert chain.lookup().prefix == LENGTH and chain.lookup().copies_wanted == ()


def test_wrong_use_is_said_before_anything_is_sent(client: Client) -> None:
    chain = client.chain(HASHES)
    for positions in ([-1], [LENGTH], [3, 3]):
        with pytest.raises(InvalidArgumentError):
            chain.get_many(positions)
        with pytest.raises(InvalidArgumentError):
            chain.put_many(items([abs(position) + 20 * (position < 0) for position in positions]))
    with pytest.raises(InvalidArgumentError):
        chain.get_into([0], [])
    with pytest.raises(InvalidArgumentError):
        chain.put_many([(0, b"")])
    with pytest.raises(InvalidArgumentError):
        client.chain([b""])  # type: ignore[list-item]
