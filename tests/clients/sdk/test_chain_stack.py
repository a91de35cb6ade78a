"""Chains against the real control plane and two node processes: rotated, cordoned, and read all the way through."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from saltern.admin.v1 import credentials_pb2, nodes_pb2
from saltern.client import Client
from saltern.keys import BlockHash
from saltern.results import Hit, Stored
from tests.conftest import SessionPostgres
from tests.support.clients import DEADLINE_MS
from tests.support.control import Control, control_plane, migrate
from tests.support.real_node import real_node
from tests.support.waiting import wait_until

LENGTH = 10
HASHES = [BlockHash(bytes([number]) * 32) for number in range(LENGTH)]
ITEMS = [(number, bytes([number]) * 5000) for number in range(LENGTH)]


def payloads(client: Client) -> list[bytes | None]:
    results = client.chain(HASHES).get_many(range(LENGTH))
    return [bytes(result.payload) if isinstance(result, Hit) else None for result in results]


async def test_a_chain_is_read_through_rotation_and_cordoning(postgres: SessionPostgres, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path / "control") as control:
            await control.redeem()
            await control.add_tenant("acme", "chat", limit_bytes=16 << 20)
            secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
            node_key = await control.add_api_key(credentials_pb2.ROLE_NODE)
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(use, control, loop, secret, node_key, tmp_path)


def use(control: Control, loop: asyncio.AbstractEventLoop, secret: str, node_key: str, folder: Path) -> None:
    endpoint = str(control.plane.endpoint)
    written = [payload for _, payload in ITEMS]

    def new_client() -> Client:
        return Client(control=endpoint, api_key=secret, namespace="chat", deadline_ms=DEADLINE_MS)

    with ExitStack() as stack:
        for node_id in ("node-1", "node-2"):
            stack.enter_context(real_node(endpoint, node_key, folder / node_id, node_id=node_id))
        early = stack.enter_context(new_client())
        assert early.chain(HASHES, reused_blocks=10**6).put_many(ITEMS) == [Stored()] * LENGTH
        placement = early._router.placement(early._router.grant)
        asked = placement.pair_of(placement.anchor_of(HASHES)).asked
        assert len(asked) == 2 and payloads(early) == written

        asyncio.run_coroutine_threadsafe(control.rotate_salt("acme"), loop).result(30)
        late = stack.enter_context(new_client())
        assert (early.epoch, late.epoch) == (1, 2)
        # Two clients of two epochs, and nothing that was stored is lost to either.
        wait_until(lambda: late.chain(HASHES).lookup().error is None, 30)
        found = late.chain(HASHES).lookup()
        assert (found.prefix, found.copies_wanted) == (LENGTH, tuple(range(LENGTH)))
        assert payloads(late) == payloads(early) == written
        assert late.chain(HASHES, reused_blocks=0).put_many(ITEMS) == [Stored()] * LENGTH

        async def cordon(node_id: str) -> None:
            request = nodes_pb2.CordonNodeRequest(name=f"nodes/{node_id}")
            await control.nodes.CordonNode(request, metadata=await control.bearer(control.admin_key))

        asyncio.run_coroutine_threadsafe(cordon(asked[0].node_id), loop).result(30)
        after = stack.enter_context(new_client())
        again = after.chain(HASHES)
        assert payloads(after) == written
        assert again.lookup().copies_wanted == tuple(range(LENGTH)), "what is used moves off a cordoned node"
        assert again.put_many(ITEMS) == [Stored()] * LENGTH
        assert after.chain(HASHES).lookup().copies_wanted == ()
