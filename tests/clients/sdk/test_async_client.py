"""The asyncio client: same answers, a loop that never stops, cancellation that leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from saltern.async_client import AsyncClient
from saltern.client import Client
from saltern.credentials import Grant, NodeEndpoint, RenewingCredentials, StaticCredentials
from saltern.deadline import Deadline
from saltern.results import AlreadyStored, Deleted, Error, Hit, Lookup, Miss, Pong, Stored
from tests.support.clients import DEADLINE_MS, blocks, endpoint_of
from tests.support.faulty_peer import PeerSession, faulty_peer
from tests.support.node_process import node_process
from tests.support.static_node import MIB, static_node


def async_client(endpoint: NodeEndpoint, token: str = "no-token", *, transport: str = "auto") -> AsyncClient:
    credentials = StaticCredentials(token, namespace="chat", nodes=(endpoint,))
    return AsyncClient.from_credentials(credentials, transport=transport, deadline_ms=DEADLINE_MS, sessions_max=4)


async def test_every_call_answers_as_the_synchronous_client_does() -> None:
    items = blocks(20, 50_000)
    keys = [key for key, _ in items]
    with static_node() as node:
        async with async_client(endpoint_of(node), node.token("acme", "chat")) as client:
            assert await client.put_many(items) == [Stored()] * 20
            assert await client.put_many(items[:1]) == [AlreadyStored()]
            results = await client.get_many(keys)
            assert [result.payload for result in results if isinstance(result, Hit)] == [data for _, data in items]
            buffer = client.allocate(MIB)
            [result] = await client.get_into(keys[:1], [buffer.view])
            assert isinstance(result, Hit) and result.payload == items[0][1]
            assert await client.lookup(keys) == Lookup(20, (True,) * 20)
            assert await client.exists([bytes(31) + b"?"]) == [False]
            assert await client.longest_prefix(keys) == 20
            assert isinstance(await client.ping(), Pong)
            assert await client.delete(keys) == Deleted(20)
            assert await client.get_many(keys[:1]) == [Miss()]
            assert (client.namespace, client.transport, client.epoch) == ("chat", "shm", 1)


async def test_calls_run_side_by_side() -> None:
    with static_node() as node:
        async with async_client(endpoint_of(node), node.token("acme", "chat")) as client:
            batches = [blocks(10, 10_000, first=number * 100) for number in range(30)]
            await asyncio.gather(*(client.put_many(batch) for batch in batches))
            answers = await asyncio.gather(*(client.get_many([key for key, _ in batch]) for batch in batches))
            for batch, results in zip(batches, answers, strict=True):
                assert [r.payload for r in results if isinstance(r, Hit)] == [data for _, data in batch]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_i10_a_frozen_node_does_not_stop_the_event_loop(transport: str) -> None:
    [(key, data)] = blocks(1, 1000)
    with node_process() as node:
        endpoint = NodeEndpoint("node-1", node.wire_endpoint, node.shm_path)
        async with async_client(endpoint, node.token, transport=transport) as client:
            assert await client.put_many([(key, data)]) == [Stored()]
            await asyncio.to_thread(node.freeze)
            call = asyncio.create_task(client.get_many([key], deadline_ms=500))
            turns = 0
            while not call.done():
                await asyncio.sleep(0.001)
                turns += 1
            assert turns > 20, "the loop went on turning while the node was frozen"
            assert isinstance((await call)[0], Miss)
            node.thaw()


async def test_cancelling_interrupts_the_session_and_no_other_call_sees_it() -> None:
    silent = threading.Event()

    def behave(session: PeerSession) -> None:
        session.hello()
        session.read()
        silent.set()
        session.wait_for_end()

    with faulty_peer(behave) as peer:
        async with async_client(peer.endpoint) as client:
            room = bytearray(1000)
            call = asyncio.create_task(client.get_into([bytes(32)], [room], deadline_ms=3_600_000))
            await asyncio.to_thread(silent.wait)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(call, 30)
            assert peer.connections == 1
            silent.clear()
            second = asyncio.create_task(client.get_many([bytes(32)], deadline_ms=3_600_000))
            await asyncio.to_thread(silent.wait)
            assert peer.connections == 2, "the interrupted session was not used again"
            second.cancel()
            await asyncio.wait([second], timeout=30)
            assert second.cancelled()


async def test_cancelling_a_call_that_waits_for_a_session_or_a_token_ends_it_at_once() -> None:
    asked, renewing = threading.Event(), threading.Event()

    def behave(session: PeerSession) -> None:
        session.hello()
        session.read()
        asked.set()
        session.wait_for_end()

    with faulty_peer(behave) as peer:
        credentials = StaticCredentials("no-token", namespace="chat", nodes=(peer.endpoint,))
        grant = credentials.grant(Deadline(DEADLINE_MS))
        held = threading.Event()

        def exchange(timeout_ms: int) -> Grant:
            if asked.is_set():
                renewing.set()
                held.wait(60)
            return grant

        source = RenewingCredentials(exchange, source="the control plane")
        client = AsyncClient(Client.from_credentials(source, sessions_max=1), threads_max=4)
        holder = asyncio.create_task(client.ping(deadline_ms=3_600_000))
        await asyncio.to_thread(asked.wait)
        queued = asyncio.create_task(client.ping(deadline_ms=3_600_000))
        await asyncio.sleep(0.05)
        source.reject(grant.access_token)
        without_token = asyncio.create_task(client.ping(deadline_ms=3_600_000))
        await asyncio.to_thread(renewing.wait)
        for call in (without_token, queued, holder):
            call.cancel()
            await asyncio.wait([call], timeout=30)
            assert call.cancelled()
        held.set()
        await client.close()


async def test_cancelled_calls_of_a_busy_client_leave_it_whole() -> None:
    items = blocks(8, MIB)
    keys = [key for key, _ in items]
    with static_node() as node:
        async with async_client(endpoint_of(node), node.token("acme", "chat")) as client:
            await client.put_many(items)
            for round_ in range(10):
                calls = [asyncio.create_task(client.get_many(keys)) for _ in range(6)]
                for _ in range(round_):
                    await asyncio.sleep(0)
                for call in calls[::2]:
                    call.cancel()
                for answer in await asyncio.gather(*calls, return_exceptions=True):
                    if not isinstance(answer, asyncio.CancelledError):
                        assert [r.payload for r in answer if isinstance(r, Hit)] == [d for _, d in items]
        node.check_invariants()


async def test_closing_ends_calls_in_progress() -> None:
    asked = threading.Event()

    def behave(session: PeerSession) -> None:
        session.hello()
        session.read()
        asked.set()
        session.wait_for_end()

    with faulty_peer(behave) as peer:
        client = async_client(peer.endpoint)
        call = asyncio.create_task(client.ping(deadline_ms=3_600_000))
        await asyncio.to_thread(asked.wait)
        await client.close()
        assert isinstance(await asyncio.wait_for(call, 30), Error)
