"""I10 over several node processes: one that is killed, frozen or comes back is felt once, within the deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from saltern.breaker import BreakerPolicy
from saltern.client import Client
from saltern.errors import DeadlineExceededError, UnavailableError
from saltern.pool import OPENING_MAX
from saltern.results import Hit, Miss, Pong, Refused, Stored
from tests.support.many_nodes import client_of, endpoints_of, grant_for, hashes, items, node_processes
from tests.support.node_process import NodeProcess, node_process
from tests.support.static_node import MIB
from tests.support.waiting import wait_until

LENGTH = 12
HASHES = hashes(LENGTH)
#: Far above any deadline given below: a call that takes so long hangs.
HANG_S = 20.0
ONCE = BreakerPolicy(quick_failures=1, backoff_first_s=600.0, backoff_max_s=600.0)
QUICK = BreakerPolicy(backoff_first_s=0.02, backoff_max_s=0.1)


@contextmanager
def three_nodes(breaker: BreakerPolicy, *, deadline_ms: float = 30_000) -> Iterator[tuple[list[NodeProcess], Client]]:
    with node_processes(3) as (nodes, _):
        with client_of(grant_for(nodes[0].token, endpoints_of(nodes)), breaker=breaker, deadline_ms=deadline_ms) as it:
            yield nodes, it


def pair(client: Client) -> list[int]:
    placement = client._router.placement(client._router.grant)
    asked = placement.pair_of(placement.anchor_of(HASHES)).asked
    return [int(node.node_id.removeprefix("node-")) for node in asked]


def hits(client: Client, **options: Any) -> int:
    return sum(isinstance(result, Hit) for result in client.chain(HASHES).get_many(range(LENGTH), **options))


def test_i10_a_killed_node_takes_along_only_what_had_one_copy() -> None:
    with three_nodes(ONCE) as (nodes, client):
        first, second = pair(client)
        assert client.chain(HASHES, reused_blocks=LENGTH).put_many(items(range(8))) == [Stored()] * 8
        assert client.chain(HASHES, reused_blocks=0).put_many([(8, b"one copy")]) == [Stored()]
        nodes[first].kill()
        chain = client.chain(HASHES)
        results = chain.get_many(range(LENGTH))
        assert [isinstance(result, Hit) for result in results] == [True] * 8 + [False] * 4
        assert isinstance(results[8], Miss) and isinstance(results[8].cause, UnavailableError)
        assert (found := chain.lookup()).prefix == 8 and isinstance(found.error, UnavailableError)
        assert chain.put_many(items(range(8, LENGTH))) == [Stored()] * 4, "the other one takes what is new"
        assert hits(client) == LENGTH
        nodes[second].kill()
        [result] = client.chain(HASHES).get_many([0])
        assert isinstance(result, Miss) and result.cause is not None
        [refused] = client.chain(HASHES).put_many(items([0]))
        assert isinstance(refused, Refused)


def test_i10_a_node_killed_between_look_and_call_is_stood_in_for() -> None:
    with three_nodes(ONCE) as (nodes, client):
        first, _ = pair(client)
        assert client.chain(HASHES, reused_blocks=LENGTH).put_many(items(range(8))) == [Stored()] * 8
        reading, writing = client.chain(HASHES), client.chain(HASHES, reused_blocks=0)
        assert reading.lookup().prefix == writing.lookup().prefix == 8
        nodes[first].kill()
        assert all(isinstance(result, Hit) for result in reading.get_many(range(8)))
        assert writing.put_many(items(range(8, LENGTH))) == [Stored()] * 4


def test_i10_a_frozen_node_leaves_time_for_the_other() -> None:
    with three_nodes(ONCE) as (nodes, client):
        first, _ = pair(client)
        assert client.chain(HASHES, reused_blocks=LENGTH).put_many(items(range(LENGTH))) == [Stored()] * LENGTH
        known = client.chain(HASHES)
        assert known.lookup().prefix == LENGTH
        nodes[first].freeze()
        began_s = time.monotonic()
        # Frozen while it is read from, and before it is asked at all.
        assert all(isinstance(result, Hit) for result in known.get_many(range(LENGTH), deadline_ms=4000))
        assert time.monotonic() - began_s < HANG_S
        for _ in range(20):  # nobody waits for it any more
            assert hits(client, deadline_ms=60_000) == LENGTH
        assert time.monotonic() - began_s < HANG_S
        nodes[first].thaw()


def test_i10_a_frozen_node_is_a_miss_within_the_deadline_where_nobody_stands_in() -> None:
    with three_nodes(ONCE) as (nodes, client):
        first, _ = pair(client)
        assert client.chain(HASHES).put_many(items(range(LENGTH))) == [Stored()] * LENGTH
        nodes[first].freeze()
        began_s = time.monotonic()
        results = client.chain(HASHES).get_many(range(LENGTH), deadline_ms=500)
        assert all(isinstance(r, Miss) and isinstance(r.cause, DeadlineExceededError) for r in results)
        assert client.chain(HASHES).lookup(deadline_ms=60_000).error is not None
        assert time.monotonic() - began_s < HANG_S
        nodes[first].thaw()


def test_i7_a_late_node_s_memory_is_not_read_into_by_the_other() -> None:
    """The frozen node may wake up and write where it was asked to: the other one's bytes must not go there."""
    with node_processes(2) as (nodes, _):
        with client_of(grant_for(nodes[0].token, endpoints_of(nodes, shm=True)), breaker=ONCE) as client:
            assert client.chain(HASHES, reused_blocks=LENGTH).put_many(items(range(LENGTH))) == [Stored()] * LENGTH
            buffer = client.allocate(MIB)
            rooms = [buffer[position * 4096 : (position + 1) * 4096] for position in range(LENGTH)]
            for _ in range(2):  # from each of them, so that both know the buffer
                assert all(isinstance(result, Hit) for result in client.chain(HASHES).get_into(range(LENGTH), rooms))
            known, own = client.chain(HASHES), client.chain(HASHES)
            assert (known.lookup().prefix, own.lookup().prefix) == (LENGTH, LENGTH)
            chosen = int(client._router.load.lightest([f"node-{number}" for number in pair(client)])[-1])
            nodes[chosen].freeze()
            results = known.get_into(range(LENGTH), rooms, deadline_ms=1000)
            assert buffer.is_in_doubt
            assert all(isinstance(r, Miss) and isinstance(r.cause, DeadlineExceededError) for r in results)
            assert all(isinstance(result, Hit) for result in own.get_many(range(LENGTH))), "memory of its own"
            nodes[chosen].thaw()


def test_i10_many_clients_ask_a_dead_node_once_each_and_not_in_every_call() -> None:
    """Counted by a listener in the dead node's place, which hangs up on everybody."""
    with node_processes(2) as (nodes, _), socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        attempts = [0]

        def hang_up() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return
                attempts[0] += 1

        counter = threading.Thread(target=hang_up)
        counter.start()
        _, alive = endpoints_of(nodes)
        dead = type(alive)("node-0", f"127.0.0.1:{listener.getsockname()[1]}")
        clients = [client_of(grant_for(nodes[0].token, (dead, alive)), breaker=ONCE) for _ in range(10)]

        def use(client: Client) -> None:
            for number in range(20):
                client.chain(hashes(LENGTH, first=1000 * number)).put_many(items(range(3)))
                client.get_many(client.block_keys(HASHES))

        try:
            with ThreadPoolExecutor(20) as threads:
                list(threads.map(use, clients * 2))
            # One for each client, and what was on its way when the first of it failed.
            assert 10 <= attempts[0] <= 10 * OPENING_MAX
            assert all(isinstance(client.ping(node="node-1"), Pong) for client in clients)
        finally:
            for client in clients:
                client.close()
            listener.shutdown(socket.SHUT_RDWR)
            counter.join(30)


def test_i10_a_node_that_comes_back_is_met_by_few_connections_at_once() -> None:
    """Many threads of many clients, and sessions that all broke at the same moment."""
    with node_processes(2) as (nodes, key):
        port = int(nodes[0].wire_endpoint.rsplit(":", 1)[1])
        grant = grant_for(nodes[0].token, endpoints_of(nodes))
        clients = [client_of(grant, breaker=QUICK, sessions_max=6) for _ in range(4)]
        peaks = [peak_of_opening(client) for client in clients]
        keys = clients[0].block_keys(hashes(40))

        def all_there(client: Client) -> bool:
            found = client.lookup(keys)
            return found.error is None

        try:
            with ThreadPoolExecutor(24) as threads:
                assert all(threads.map(all_there, clients * 6))
                nodes[0].kill()
                assert not all(threads.map(all_there, clients * 6))
                with node_process(dram_bytes=16 * MIB, node_id="node-0", port=port, signing_key=key):
                    wait_until(lambda: all(threads.map(all_there, clients * 6)), 60)
            assert all(1 <= peak[0] <= OPENING_MAX for peak in peaks)
        finally:
            for client in clients:
                client.close()


def peak_of_opening(client: Client) -> list[int]:
    """One number that grows to the most sessions that the client opens at once with node-0."""
    opening, peak, lock = [0], [0], threading.Lock()
    router = client._router
    original = router._open_session

    def counted(node: Any, grant: Any, deadline: Any) -> Any:
        with lock:
            opening[0] += node.node_id == "node-0"
            peak[0] = max(peak[0], opening[0])
        try:
            return original(node, grant, deadline)
        finally:
            with lock:
                opening[0] -= node.node_id == "node-0"

    router._open_session = counted  # type: ignore[method-assign]
    return peak
