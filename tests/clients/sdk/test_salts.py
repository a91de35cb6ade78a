"""What narrower salts and rotations are to a client: over the real control plane, database and node."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from saltern.admin.v1 import credentials_pb2, salt_policies_pb2
from saltern.client import Client
from saltern.errors import FailedPreconditionError
from saltern.keys import BlockHash
from saltern.results import Hit, Miss, Stored
from tests.clients.sdk.test_stack import control_with_tenants, real_node
from tests.conftest import SessionPostgres
from tests.support.clients import DEADLINE_MS

HASHES = [BlockHash(bytes([number]) * 32) for number in range(4)]
PAYLOADS = [bytes([number]) * 5_000 for number in range(4)]
STORED, FOUND, MISSED = [Stored()] * 4, [True] * 4, [False] * 4


def put(client: Client) -> list[object]:
    return list(client.chain(HASHES).put_many(enumerate(PAYLOADS)))


def new_block(client: Client) -> bool:
    """Store a block that nobody has stored."""
    return client.chain([BlockHash(os.urandom(32))]).put_many([(0, b"new")]) == [Stored()]


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s


def hits(client: Client) -> list[bool]:
    results = client.chain(HASHES).get_many(range(4))
    assert all(isinstance(result, Hit | Miss) for result in results), results
    return [isinstance(result, Hit) for result in results]


async def test_i2_i12_who_finds_what_by_scope_and_by_epoch(postgres: SessionPostgres, tmp_path: Path) -> None:
    async with control_with_tenants(postgres, tmp_path) as control:
        endpoint = str(control.plane.endpoint)
        free = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "free")
        anns = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "ann", user_id="ann")
        node_key = await control.add_api_key(credentials_pb2.ROLE_NODE)
        loop = asyncio.get_running_loop()

        def rotate(grace_s: int) -> None:
            asyncio.run_coroutine_threadsafe(control.rotate_salt("acme", grace_s=grace_s), loop).result(30)

        def client(api_key: str, **narrowing: str) -> Client:
            return Client(control=endpoint, api_key=api_key, namespace="chat", deadline_ms=DEADLINE_MS, **narrowing)

        def use() -> None:
            with (
                real_node(endpoint, node_key, tmp_path),
                client(free) as wide,
                client(anns) as ann,
                client(free, user="bob") as bob,
            ):
                assert put(ann) == STORED
                with client(free, user="ann") as another_of_ann, client(anns, session="s") as narrower:
                    assert (hits(another_of_ann), hits(narrower)) == (FOUND, MISSED)
                assert (hits(wide), hits(bob)) == (MISSED, MISSED)

                rotate(3600)
                with client(anns) as later:
                    assert later.epoch == 2
                    assert hits(later) == FOUND, "the epoch before is read for the grace"
                    assert hits(ann) == FOUND, "and who was there before goes on"
                    until(lambda: new_block(ann) and ann.epoch == 2)  # and moves over to write

                rotate(0)
                with client(anns) as last:
                    assert last.epoch == 3
                    until(lambda: new_block(last))  # the policy is on its way to the node
                    assert hits(last) == MISSED
                    assert put(last) == STORED and hits(last) == FOUND

        await asyncio.to_thread(use)
        await control.set_salt("acme", scope=salt_policies_pb2.SaltPolicy.SCOPE_USER)
        with pytest.raises(FailedPreconditionError, match="scope user"):
            await asyncio.to_thread(client, free)
        (await asyncio.to_thread(client, anns)).close()
