"""Reservations that earn (I5), and clients that look a chain up and get no more than what was found."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import pytest

from dataplane.core.reservations import Reservations
from saltern.client import Client
from saltern.keys import BlockKey
from saltern.results import Hit, Stored
from tests.support.clients import node_client
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy

SIZE = 32 * 1024
POOL = 256  # entries
RESERVED = POOL // 2


@pytest.fixture
def node() -> Iterator[StaticNode]:
    tenants = {
        "acme": tenant_policy(limit_bytes=POOL * SIZE, reserved_bytes=RESERVED * SIZE),
        "blue": tenant_policy(limit_bytes=POOL * SIZE),
    }
    with static_node(tenants, dram_bytes=POOL * SIZE, reservations=Reservations.EARNING) as running:
        assert POOL * SIZE == 8 * MIB
        yield running


def items_of(numbers: range) -> list[tuple[BlockKey, bytes]]:
    """Keys of any bytes, as real ones are: the account follows half of them."""
    return [
        (BlockKey(sha256(number.to_bytes(8, "big")).digest()), number.to_bytes(8, "big") * (SIZE // 8))
        for number in numbers
    ]


def turn(client: Client, numbers: range) -> int:
    """What an engine does with a prompt: look it up, read what is there, compute and store the rest; how many hit."""
    items = items_of(numbers)
    prefix = client.longest_prefix([key for key, _ in items])
    results = client.get_many([key for key, _ in items[:prefix]])
    assert all(isinstance(result, Hit) for result in results)
    client.put_many(items[prefix:])
    return prefix


def flood(client: Client, numbers: range) -> None:
    for number in numbers:
        assert client.put_many(items_of(range(10**6 + number, 10**6 + number + 1))) == [Stored()]


def test_i5_whoever_looks_up_before_it_reads_gets_its_reservation_back(node: StaticNode) -> None:
    """It has a lead while there is room for all; then a neighbour takes what was lent, and has to give it back."""
    with node_client(node, tenant="acme") as acme, node_client(node, tenant="blue") as blue:
        for _ in range(4):  # more prompts than its reservation holds: alone it would hit none of them
            for first in range(0, POOL - 16, 16):
                turn(acme, range(first, first + 16))
        flood(blue, range(POOL))
        rounds = []
        for number in range(6):  # now as many as its reservation holds
            rounds.append(sum(turn(acme, range(first, first + 16)) for first in range(0, RESERVED - 16, 16)))
            flood(blue, range((number + 1) * POOL, (number + 2) * POOL))
        assert rounds[-1] == RESERVED - 16, f"hits in each round: {rounds}"
        node.check_invariants()
