"""A tenant's rates and the bound on what its transfers hold, over real sockets: it waits, and nobody else does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from dataplane.io.clock import Clock
from saltern import wire
from saltern.cache.v1 import cache_pb2, cache_pb2_grpc
from saltern.errors import ResourceExhaustedError
from saltern.names import TenantId
from saltern.rpc_errors import error_from_rpc
from saltern.wire import Opcode
from tenants.policy import TenantPolicy
from tenants.quota import RateLimits
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, block, connect_tcp, connect_unix, key

S = 1_000_000_000
UNLIMITED = tenant_policy(limit_bytes=64 * MIB)


def limited(operations_per_s: int = 0, bytes_per_s: int = 0) -> TenantPolicy:
    return replace(UNLIMITED, rates=RateLimits(operations_per_s, bytes_per_s))


class SetClock:
    """A node's monotonic clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.clock = Clock(monotonic_ns=lambda: self.now_ns)


@pytest.fixture
def stopped() -> SetClock:
    return SetClock()


@pytest.fixture
def node(stopped: SetClock) -> Iterator[StaticNode]:
    with static_node({"acme": limited(100), "blue": UNLIMITED}, dram_bytes=64 * MIB, clock=stopped.clock) as running:
        yield running
        stopped.now_ns += 60 * S  # who still waits finds its client gone
        wait_until(lambda: running.session_count() == 0)
        running.check_invariants()
        for traffic in running.traffic().values():
            assert traffic.waiting == 0 and traffic.flight.held_bytes == 0


def open_session(node: StaticNode, tenant: str, stack: contextlib.ExitStack) -> WireClient:
    client = stack.enter_context(connect_tcp(node))
    client.hello(node.token(tenant, "chat"))
    return client


def waiting(node: StaticNode, tenant: str) -> int:
    return node.call(lambda: node.traffic()[TenantId(tenant)].waiting)


@pytest.mark.parametrize("connect", [connect_tcp, connect_unix])
def test_above_its_rate_a_tenant_is_delayed_and_its_neighbour_is_not(
    node: StaticNode, stopped: SetClock, connect: object
) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect(node))  # type: ignore[operator]
        client.hello(node.token("acme", "chat"))
        neighbour = open_session(node, "blue", stack)
        client.lookup(*(key(n) for n in range(110)))
        client.send(Opcode.LOOKUP, wire.Lookup(key(1)))
        wait_until(lambda: waiting(node, "acme") == 1)
        for number in range(500):
            neighbour.lookup(key(number))
        assert waiting(node, "acme") == 1
        stopped.now_ns = S // 5
        assert client.answer(wire.LookupReply)[0].found == b"\0"
        traffic = node.traffic()[TenantId("acme")]
        assert traffic.rates.delayed == 1 and traffic.throttled_ns > 0


def test_while_a_session_waits_nothing_is_read_from_it(node: StaticNode) -> None:
    with contextlib.ExitStack() as stack:
        client = open_session(node, "acme", stack)
        client.lookup(*(key(n) for n in range(110)))
        client.send(Opcode.LOOKUP, wire.Lookup(key(1)))
        wait_until(lambda: waiting(node, "acme") == 1)
        client.sock.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < 64 * MIB:
                sent += client.sock.send(bytes(MIB))
        assert sent < 64 * MIB, "its client is held up by the socket's own flow control"


def test_i10_what_would_wait_too_long_is_refused_and_says_when(node: StaticNode) -> None:
    with contextlib.ExitStack() as stack:
        client = open_session(node, "acme", stack)
        client.lookup(*(key(n) for n in range(1000)))
        with pytest.raises(ResourceExhaustedError) as caught:
            client.put({key(1): block(1, 2 * MIB)})
        error = caught.value
        assert error.reason == "RATE_LIMITED" and error.retry_after_ms == 9000
        assert error.metadata == {"tenant": "acme", "rate": "operations_per_s", "limit_operations_per_s": "100"}
        assert error.hint
        client.send(Opcode.REFRESH, wire.Refresh(node.token("acme", "chat")))
        client.answer(wire.RefreshReply)  # the session stays open, its payload was read, and it can live on
        with connect_tcp(node) as another:
            another.hello(node.token("acme", "chat"))


def test_bytes_count_as_they_move(node: StaticNode, stopped: SetClock) -> None:
    """A get is charged for its hits, a put for its bytes; one large request is possible and the next one pays."""
    node.change("acme", rates=RateLimits(bytes_per_s=MIB))
    with contextlib.ExitStack() as stack:
        client = open_session(node, "acme", stack)
        client.put({key(n): block(n, MIB) for n in range(4)})
        with pytest.raises(ResourceExhaustedError) as caught:
            client.get(key(0))
        assert caught.value.metadata["rate"] == "bytes_per_s" and caught.value.retry_after_ms == 3000
        stopped.now_ns = 3 * S
        assert client.get(key(77)) == {}, "a miss moves nothing"
        assert len(client.get(*(key(n) for n in range(4)))) == 4
        with pytest.raises(ResourceExhaustedError) as caught:
            client.lookup(key(0))
        assert caught.value.retry_after_ms == 4000
        assert node.traffic()[TenantId("acme")].served_bytes == 8 * MIB


def test_a_new_rate_counts_for_open_sessions_and_for_those_who_wait(node: StaticNode) -> None:
    with contextlib.ExitStack() as stack:
        client, other = open_session(node, "acme", stack), open_session(node, "blue", stack)
        client.lookup(*(key(n) for n in range(110)))
        client.send(Opcode.LOOKUP, wire.Lookup(key(1)))
        wait_until(lambda: waiting(node, "acme") == 1)
        node.change("acme", rates=RateLimits())
        client.answer(wire.LookupReply)
        node.change("blue", rates=RateLimits(operations_per_s=10))
        other.lookup(*(key(n) for n in range(100)))
        with pytest.raises(ResourceExhaustedError):
            other.lookup(key(1))


def test_a_session_that_leaves_its_place_holds_up_nobody(node: StaticNode, stopped: SetClock) -> None:
    with contextlib.ExitStack() as stack:
        first, second = open_session(node, "acme", stack), open_session(node, "acme", stack)
        second.lookup(*(key(n) for n in range(110)))
        for count, client in ((1, first), (2, second)):
            client.send(Opcode.LOOKUP, wire.Lookup(key(1)))
            wait_until(lambda expected=count: waiting(node, "acme") == expected)  # type: ignore[misc]
        first.sock.close()
        stopped.now_ns = S // 5
        second.answer(wire.LookupReply)


def test_the_grpc_door_has_the_same_rates(node: StaticNode, stopped: SetClock) -> None:
    with grpc.insecure_channel(node.grpc_endpoint) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        metadata = [("authorization", f"Bearer {node.token('acme', 'chat')}")]

        def lookup(count: int) -> grpc.Future:
            request = cache_pb2.LookupBlocksRequest(namespace_id="chat", epoch=1, keys=[key(n) for n in range(count)])
            return stub.LookupBlocks.future(request, metadata=metadata, timeout=20)

        lookup(110).result()
        delayed = [lookup(1)]
        wait_until(lambda: waiting(node, "acme") == 1)
        delayed.append(lookup(50))
        wait_until(lambda: waiting(node, "acme") == 2)
        with pytest.raises(grpc.RpcError) as caught:
            lookup(1).result()
        error = error_from_rpc(caught.value)
        assert isinstance(error, ResourceExhaustedError) and error.reason == "RATE_LIMITED"
        assert error.metadata["tenant"] == "acme" and error.retry_after_ms == 610
        stopped.now_ns = S // 5
        assert [len(call.result().found) for call in delayed] == [1, 50]


# ---- what transfers hold


@pytest.fixture
def small() -> Iterator[StaticNode]:
    tenants = {"acme": tenant_policy(limit_bytes=64 * MIB), "blue": tenant_policy(limit_bytes=64 * MIB)}
    with static_node(tenants, dram_bytes=64 * MIB) as running:
        yield running
        wait_until(lambda: running.session_count() == 0)
        running.check_invariants()
        assert all(traffic.flight.held_bytes == 0 for traffic in running.traffic().values())


def ask_for(client: WireClient, *numbers: int) -> None:
    client.send(Opcode.GET, wire.Get(b"".join(key(n) for n in numbers), [8 * MIB] * len(numbers)))


def test_slow_readers_of_one_tenant_hold_a_bounded_part_and_nobody_else_up(small: StaticNode) -> None:
    """Its bound is a quarter of the arena, 16 MiB: readers that do not read hold that, not 6 x 8 MiB."""
    with contextlib.ExitStack() as stack:
        writer = open_session(small, "acme", stack)
        writer.put({key(n): block(n, 8 * MIB) for n in range(6)})
        slow = [open_session(small, "acme", stack) for _ in range(6)]
        for number, client in enumerate(slow):
            ask_for(client, number)
        wait_until(lambda: waiting(small, "acme") == 4)
        assert small.usage().tenants[TenantId("acme")].held_bytes == 16 * MIB
        neighbour = open_session(small, "blue", stack)
        entries = {key(n): block(n, 8 * MIB) for n in range(2)}
        assert neighbour.put(entries).codes == bytes(2)
        assert neighbour.get(*entries) == entries
        assert small.usage().tenants[TenantId("acme")].held_bytes <= 16 * MIB
        # Questions that hold nothing are answered meanwhile, and whoever reads lets the next one in, in order.
        assert writer.lookup(key(99)).found == b"\0"
        for number, client in enumerate(slow):
            reply, payload = client.answer(wire.GetReply)
            assert reply.codes in (b"\0", b"\x05") and (not payload or payload == block(number, 8 * MIB))


def test_a_reader_that_is_cut_off_lets_the_next_in(small: StaticNode) -> None:
    with contextlib.ExitStack() as stack:
        writer = open_session(small, "acme", stack)
        writer.put({key(n): block(n, 8 * MIB) for n in range(3)})
        slow = [open_session(small, "acme", stack) for _ in range(3)]
        for client in slow:
            ask_for(client, 0, 1, 2)
        wait_until(lambda: waiting(small, "acme") == 2)
        slow[1].sock.close()  # while it waits
        slow[0].sock.close()  # while it is served
        reply, payload = slow[2].answer(wire.GetReply)
        assert reply.codes == bytes(3) and len(payload) == 24 * MIB
