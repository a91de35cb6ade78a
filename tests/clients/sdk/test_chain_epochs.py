"""Salt epochs under chains: reads fall back to the older one, writes go to the newest, one exchange when it is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from saltern import wire
from saltern.client import Client
from saltern.credentials import Grant
from saltern.errors import PermissionDeniedError
from saltern.results import ChainLookup, Hit, Miss, Refused, Stored
from tests.support.many_nodes import (
    ChangingCredentials,
    block_of,
    client_of,
    endpoints_of,
    grant_for,
    hashes,
    items,
    static_nodes,
)
from tests.support.static_node import MIB, StaticNode, tenant_policy

LENGTH = 12
HASHES = hashes(LENGTH)


def policy(*epochs: int) -> dict[str, object]:
    return {"acme": tenant_policy(limit_bytes=8 * MIB, epochs=epochs)}


@pytest.fixture(params=[1, 3], ids=["one node", "three nodes"])
def nodes(request: pytest.FixtureRequest) -> Iterator[list[StaticNode]]:
    with static_nodes(request.param, policy(1)) as running:  # type: ignore[arg-type]
        yield running


def rotate(nodes: list[StaticNode], *epochs: int) -> None:
    for node in nodes:
        node.apply(policy(*epochs))  # type: ignore[arg-type]


@pytest.fixture
def credentials(nodes: list[StaticNode]) -> ChangingCredentials:
    return ChangingCredentials(grant_for(nodes[0].token("acme", "chat"), endpoints_of(nodes)))


@pytest.fixture
def client(credentials: ChangingCredentials) -> Iterator[Client]:
    with client_of(credentials) as running:
        yield running


def with_epochs(credentials: ChangingCredentials, *epochs: int) -> Grant:
    grant = grant_for("", (), epochs=epochs)
    return replace(credentials._grant, salts=grant.salts, epoch=grant.epoch)


def payloads(results: list[object]) -> list[bytes | None]:
    return [bytes(result.payload) if isinstance(result, Hit) else None for result in results]


def older_sessions(client: Client) -> list[int]:
    return [len(node.older._open) for node in client._router._nodes.values()]


def test_blocks_of_the_old_epoch_are_read_and_new_ones_go_to_the_newest(
    nodes: list[StaticNode], credentials: ChangingCredentials, client: Client
) -> None:
    client.chain(HASHES).put_many(items(range(6)))
    assert sum(older_sessions(client)) == 0
    rotate(nodes, 1, 2)
    credentials.change(with_epochs(credentials, 1, 2))
    chain = client.chain(HASHES)
    found = chain.lookup()
    # What is only under the epoch that ends is worth storing anew.
    assert found == ChainLookup(6, tuple(range(6)), None)
    assert payloads(chain.get_many(range(7))) == [*(block_of(number) for number in range(6)), None]
    assert chain.put_many(items([*found.copies_wanted[:3], 6])) == [Stored()] * 4
    assert max(older_sessions(client)) == 1, "at most one session more with each node"
    again = client.chain(HASHES)
    assert again.lookup() == ChainLookup(7, (3, 4, 5), None)
    assert payloads(again.get_many(range(7))) == [block_of(number) for number in range(7)]
    # The old epoch is purged on the nodes; the client is told a little later.
    rotate(nodes, 2)
    late = client.chain(HASHES)
    assert late.lookup() == ChainLookup(3, (), None)
    assert payloads(late.get_many([2, 4])) == [block_of(2), None]
    credentials.change(with_epochs(credentials, 2))
    assert client.chain(HASHES).lookup() == ChainLookup(3, (), None)
    assert sum(older_sessions(client)) == 0, "given back with the epoch"


def test_sessions_of_the_older_epoch_are_closed_when_a_grant_no_longer_has_it(
    nodes: list[StaticNode], credentials: ChangingCredentials, client: Client
) -> None:
    rotate(nodes, 1, 2)
    credentials.change(with_epochs(credentials, 1, 2))
    assert client.chain(HASHES).lookup().error is None
    assert max(older_sessions(client)) == 1
    credentials.change(with_epochs(credentials, 2))
    assert client.chain(HASHES).lookup().error is None
    assert sum(older_sessions(client)) == 0


def test_an_epoch_that_is_gone_costs_one_exchange_and_no_call(
    nodes: list[StaticNode], credentials: ChangingCredentials, client: Client
) -> None:
    """A rotation without grace: the client finds out from a node."""
    chain, other = client.chain(HASHES), client.chain(HASHES)
    chain.put_many(items(range(6)))
    rotate(nodes, 2)
    credentials.next = with_epochs(credentials, 2)
    assert other.lookup() == ChainLookup(0, (), None)
    assert (credentials.exchanges, client.epoch) == (1, 2)
    assert chain.put_many(items(range(6))) == [Stored()] * 6
    assert payloads(client.chain(HASHES).get_many(range(6))) == [block_of(number) for number in range(6)]
    assert credentials.exchanges == 1


@pytest.mark.parametrize("first_call", ["get", "put"])
def test_each_call_finds_out_by_itself(
    nodes: list[StaticNode], credentials: ChangingCredentials, client: Client, first_call: str
) -> None:
    chain = client.chain(HASHES)
    chain.put_many(items(range(6)))
    rotate(nodes, 2)
    credentials.next = with_epochs(credentials, 2)
    if first_call == "get":
        assert chain.get_many(range(6)) == [Miss()] * 6
    else:
        assert chain.put_many(items(range(6))) == [Stored()] * 6
        assert payloads(chain.get_many(range(6))) == [block_of(number) for number in range(6)]
    assert (credentials.exchanges, client.epoch) == (1, 2)


def test_i6_more_blocks_than_a_node_puts_into_words_go_to_the_new_epoch_too(
    nodes: list[StaticNode], credentials: ChangingCredentials, client: Client
) -> None:
    """A put reply explains 16 refusals in words; the others of their code were refused for the same reason."""
    many = range(wire.PUT_ERRORS_MAX + 24)
    chain = client.chain(hashes(len(many)))
    assert chain.lookup().error is None
    rotate(nodes, 1, 2)
    credentials.next = with_epochs(credentials, 1, 2)
    assert chain.put_many(items(many)) == [Stored()] * len(many)
    assert client.chain(hashes(len(many))).lookup().prefix == len(many)


def test_i10_a_node_that_does_not_know_the_new_epoch_yet_is_a_miss_and_no_alarm(
    nodes: list[StaticNode], credentials: ChangingCredentials, client: Client
) -> None:
    credentials.change(with_epochs(credentials, 1, 2))
    chain = client.chain(HASHES)
    [refused] = chain.put_many(items([0]))
    assert isinstance(refused, Refused) and isinstance(refused.error, PermissionDeniedError)
    assert refused.error.reason == "EPOCH_NOT_AVAILABLE"
    [missed] = chain.get_many([0])
    assert isinstance(missed, Miss) and missed.cause is not None
    rotate(nodes, 1, 2)
    assert client.chain(HASHES).put_many(items([0])) == [Stored()]


def test_plain_keys_are_of_one_epoch(nodes: list[StaticNode], credentials: ChangingCredentials, client: Client) -> None:
    keys = client.block_keys(HASHES)
    assert client.put_many([(keys[0], b"old")]) == [Stored()]
    rotate(nodes, 2)
    credentials.next = with_epochs(credentials, 2)
    assert client.get_many(keys[:1]) == [Miss()]
    assert (credentials.exchanges, client.epoch) == (1, 2)
    renewed = client.block_keys(HASHES)
    assert not set(renewed) & set(keys)
    assert client.put_many([(renewed[0], b"new")]) == [Stored()]


def test_i12_a_namespace_made_anew_with_the_same_epoch_has_other_keys(
    nodes: list[StaticNode], credentials: ChangingCredentials, client: Client
) -> None:
    before = client.block_keys(HASHES)
    salts = grant_for("", (), epochs=(7,)).salts
    credentials.change(replace(credentials._grant, salts=(replace(salts[0], epoch=1),)))
    client.lookup(before)
    assert not set(client.block_keys(HASHES)) & set(before)
