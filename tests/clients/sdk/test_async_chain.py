"""Chains from an event loop: the same answers, and cancelling a call on two nodes ends it on both."""

from __future__ import annotations

import asyncio
import contextlib

from saltern.async_client import AsyncClient
from saltern.deadline import Deadline
from saltern.results import ChainLookup, Hit, Miss, Stored
from tests.support.many_nodes import (
    ChangingCredentials,
    block_of,
    endpoints_of,
    grant_for,
    hashes,
    items,
    node_processes,
    static_nodes,
)

LENGTH = 12
HASHES = hashes(LENGTH)


async def test_a_chain_answers_as_it_does_without_a_loop() -> None:
    with static_nodes(3) as nodes:
        grant = grant_for(nodes[0].token("acme", "chat"), endpoints_of(nodes))
        async with AsyncClient.from_credentials(ChangingCredentials(grant), deadline_ms=30_000) as client:
            chain = client.chain(HASHES, reused_blocks=LENGTH)
            assert len(chain) == LENGTH
            assert await chain.put_many(items(range(LENGTH))) == [Stored()] * LENGTH
            assert await chain.lookup() == ChainLookup(LENGTH)
            buffers = [bytearray(4000) for _ in range(2)]
            results = await chain.get_into([3, 5], buffers)
            assert [bytes(r.payload) for r in results if isinstance(r, Hit)] == [block_of(3), block_of(5)]
            assert await client.chain(HASHES, placement_hint="elsewhere").get_many([0]) != []
            assert (await chain.delete()).count == 2 * LENGTH
            assert await chain.get_many([0]) == [Miss()]


async def test_cancelling_a_call_ends_it_on_every_node() -> None:
    with node_processes(2) as (nodes, _):
        grant = grant_for(nodes[0].token, endpoints_of(nodes))
        async with AsyncClient.from_credentials(ChangingCredentials(grant), deadline_ms=600_000) as client:
            assert (await client.chain(HASHES).lookup()).error is None
            for node in nodes:
                node.freeze()
            call = asyncio.create_task(client.chain(HASHES).lookup())
            done, _ = await asyncio.wait([call], timeout=0.1)
            assert not done
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(call, 30)
            assert call.cancelled()
            for node in nodes:
                node.thaw()


def test_a_share_of_a_deadline_ends_with_it_and_is_cancelled_with_it() -> None:
    whole = Deadline(60_000)
    half, interrupted = whole.share(0.5), []
    assert 29 < half.remaining_s() <= 30
    half.on_cancel(lambda: interrupted.append(True))
    whole.cancel()
    assert half.cancelled and whole.share().cancelled and interrupted == [True]
    assert Deadline(-1).share().expired
