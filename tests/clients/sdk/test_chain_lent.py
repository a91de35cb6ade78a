"""Blocks that are lent: taken once each, after their checksum, in memory that is taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from saltern.client import Client
from saltern.errors import DataLossError, EntryTooLargeError, InvalidArgumentError
from saltern.results import Hit, Miss
from saltern.transport import regional, tcp
from tests.support.many_nodes import block_of, client_of, endpoints_of, grant_for, hashes, items, static_nodes
from tests.support.static_node import StaticNode

LENGTH = 20
HASHES = hashes(LENGTH)
ROOM_BYTES = 4096


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[StaticNode]]:
    with static_nodes(2) as running:
        yield running


@pytest.fixture(params=["shm", "tcp"])
def client(nodes: list[StaticNode], request: pytest.FixtureRequest) -> Iterator[Client]:
    grant = grant_for(nodes[0].token("acme", "chat"), endpoints_of(nodes, shm=request.param == "shm"))
    with client_of(grant) as running:
        running.chain(HASHES).put_many(items(range(LENGTH)))
        yield running


class Taken:
    """What was taken, copied while it was lent."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.views: list[memoryview] = []
        self._lock = threading.Lock()

    def __call__(self, position: int, payload: memoryview) -> None:
        with self._lock:
            assert position not in self.blocks, "taken twice"
            self.blocks[position] = bytes(payload)
            self.views.append(payload)


def test_each_block_is_lent_once_and_taken_back(client: Client) -> None:
    taken = Taken()
    results = client.chain(HASHES).get_each(range(LENGTH), taken, room_bytes=ROOM_BYTES)
    assert all(isinstance(result, Hit) and result.size_bytes == 0 for result in results)
    assert taken.blocks == {position: block_of(position) for position in range(LENGTH)}
    for view in taken.views:
        with pytest.raises(ValueError, match="released"):
            view.nbytes  # noqa: B018


def test_what_is_not_there_or_too_long_is_not_taken(client: Client) -> None:
    taken = Taken()
    longer = [*HASHES[:3], *hashes(5, 1000)]
    results = client.chain(longer).get_each(range(8), taken, room_bytes=ROOM_BYTES)
    assert [isinstance(result, Hit) for result in results] == [True] * 3 + [False] * 5
    assert sorted(taken.blocks) == [0, 1, 2]
    short = Taken()
    [result] = client.chain(HASHES).get_each([4], short, room_bytes=100)
    assert isinstance(result, Miss) and isinstance(result.cause, EntryTooLargeError)
    assert not short.blocks


def test_i7_what_does_not_match_its_checksum_is_never_lent(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = {block_of(position): position for position in range(LENGTH)}
    for module in (regional, tcp):
        honest = module.checksum
        monkeypatch.setattr(module, "checksum", lambda data, of=honest: of(data) ^ (sums.get(bytes(data)) == 7))
    taken = Taken()
    results = client.chain(HASHES).get_each(range(LENGTH), taken, room_bytes=ROOM_BYTES)
    assert [p for p, result in enumerate(results) if not isinstance(result, Hit)] == [7]
    assert isinstance(results[7], Miss) and isinstance(results[7].cause, DataLossError)
    assert sorted(taken.blocks) == [position for position in range(LENGTH) if position != 7]


def test_positions_are_checked_before_anything_is_asked(client: Client) -> None:
    chain = client.chain(HASHES)
    for positions in ([LENGTH], [1, 1], [-1]):
        with pytest.raises(InvalidArgumentError):
            chain.get_each(positions, Taken(), room_bytes=ROOM_BYTES)
