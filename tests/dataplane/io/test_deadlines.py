"""Clients that take their time: the deadlines of WIRE.md section 8 and the limits on sessions, shortened for tests."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dataplane.settings import SessionLimits
from saltern import wire
from saltern.errors import ResourceExhaustedError
from saltern.wire import Opcode
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, block, connect_tcp, connect_unix, key

LIMITS = SessionLimits(
    hello_s=0.3,
    stall_s=0.3,
    frame_s=0.6,
    payload_bytes_per_s=64 * MIB,
    idle_s=1.2,
    lapsed_s=0.3,
    sweep_s=0.05,
    sessions_max=12,
    unopened_max=4,
    tenant_sessions_max=3,
)


@pytest.fixture(scope="module")
def hasty() -> Iterator[StaticNode]:
    tenants = {name: tenant_policy(limit_bytes=32 * MIB) for name in ("acme", "blue", "cyan", "dune", "ebon")}
    with static_node(tenants, dram_bytes=64 * MIB, limits=LIMITS) as node:
        yield node


@pytest.fixture(autouse=True)
def exact_books(hasty: StaticNode) -> Iterator[None]:
    """I8: after each test no session and nothing held is left, and the books are exact."""
    yield
    wait_until(lambda: hasty.session_count() == 0)
    hasty.check_invariants()
    assert all(books.held_bytes == 0 for books in hasty.usage().tenants.values())


@pytest.mark.parametrize("connect", [connect_tcp, connect_unix])
@pytest.mark.parametrize("sent", [b"", b"SL", wire.encode_request(Opcode.HELLO, 1, b"\x83\xa5token")])
def test_a_connection_without_a_hello_is_closed(hasty: StaticNode, connect: object, sent: bytes) -> None:
    with connect(hasty) as client:  # type: ignore[operator]
        client.sock.sendall(sent[:-1])
        assert client.is_closed()


def test_hello_byte_by_byte_gains_no_time(hasty: StaticNode) -> None:
    with connect_tcp(hasty) as client:
        frame = wire.encode_request(Opcode.HELLO, 1, bytes(4000))
        with pytest.raises(OSError):
            for byte in frame:
                client.sock.send(bytes([byte]))
                time.sleep(0.01)


def test_an_idle_session_is_closed(hasty: StaticNode) -> None:
    with connect_tcp(hasty) as client:
        client.hello(hasty.token("acme", "chat"))
        assert client.is_closed()


@pytest.mark.parametrize("sent_bytes", [10, 60, 200, MIB])
def test_i8_a_put_that_stalls_is_closed_and_gives_back_its_bytes(hasty: StaticNode, sent_bytes: int) -> None:
    with connect_tcp(hasty) as client, connect_tcp(hasty) as other:
        client.hello(hasty.token("acme", "chat"))
        other.hello(hasty.token("blue", "chat"))
        put = wire.encode_body(wire.Put(key(1), [2 * MIB], wire.join_sums([0])))
        frame = wire.encode_request(Opcode.PUT, 1, put, 2 * MIB)
        client.sock.sendall((frame + bytes(2 * MIB))[:sent_bytes])
        other.ping()
        assert client.is_closed()
        wait_until(lambda: hasty.usage().tenants["acme"].used_bytes == 0)  # type: ignore[index]


def test_a_put_that_trickles_is_closed(hasty: StaticNode) -> None:
    with connect_tcp(hasty) as client:
        client.hello(hasty.token("acme", "chat"))
        put = wire.encode_body(wire.Put(key(1), [2 * MIB], wire.join_sums([0])))
        client.sock.sendall(wire.encode_request(Opcode.PUT, 1, put, 2 * MIB))
        with pytest.raises(OSError):
            for _ in range(300):
                client.sock.sendall(bytes(100))
                time.sleep(0.01)


def test_a_client_that_never_reads_is_closed_and_its_pins_are_given_back(hasty: StaticNode) -> None:
    with connect_tcp(hasty) as client:
        client.hello(hasty.token("acme", "chat"))
        entries = {key(n): block(n, 4 * MIB) for n in range(6)}
        client.put(entries)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(4):
            client.send(Opcode.GET, wire.Get(b"".join(entries), [4 * MIB] * 6))
        wait_until(lambda: hasty.usage().tenants["acme"].held_bytes > 0)  # type: ignore[index]
        wait_until(lambda: hasty.usage().tenants["acme"].held_bytes == 0)  # type: ignore[index]


@pytest.mark.parametrize("connect", [connect_tcp, connect_unix])
def test_i2_connections_that_say_nothing_keep_nobody_out(connect: Callable[[StaticNode], WireClient]) -> None:
    """The oldest gives way, long before its time to say HELLO is over."""
    patient = replace(LIMITS, hello_s=3600.0, idle_s=3600.0)
    with static_node(dram_bytes=16 * MIB, limits=patient) as node, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect_tcp(node)) for _ in range(LIMITS.unopened_max)]
        wait_until(lambda: node.session_count() == LIMITS.unopened_max)
        late = stack.enter_context(connect(node))
        late.hello(node.token("acme", "chat"))
        assert silent[0].is_closed()
        assert node.session_count() == LIMITS.unopened_max
        late.ping()


@pytest.mark.parametrize("connect", [connect_tcp, connect_unix])
def test_i2_what_is_deleted_gives_its_places_back(
    hasty: StaticNode, connect: Callable[[StaticNode], WireClient]
) -> None:
    """Sessions that nothing is allowed any more end, however busy they are: else a later tenant finds no place."""
    tenants = hasty.tenants
    with connect(hasty) as client:
        client.hello(hasty.token("acme", "chat"))
        hasty.apply({str(name): policy for name, policy in tenants.items() if name != "acme"})
        try:
            with pytest.raises((EOFError, OSError)):
                for _ in range(10_000):
                    client.send(Opcode.PING, wire.Empty())
                    assert client.error().reason == "NAMESPACE_NOT_AVAILABLE"
                    time.sleep(0.01)  # a busy client, not a flood
        finally:
            hasty.apply({str(name): policy for name, policy in tenants.items()})


def test_one_tenant_cannot_take_every_session(hasty: StaticNode) -> None:
    clients = [connect_tcp(hasty) for _ in range(LIMITS.tenant_sessions_max)]
    try:
        for client in clients:
            client.hello(hasty.token("acme", "chat"))
        with connect_tcp(hasty) as one_more, pytest.raises(ResourceExhaustedError) as caught:
            one_more.hello(hasty.token("acme", "chat"))
        assert caught.value.reason == "TOO_MANY_SESSIONS"
        with connect_tcp(hasty) as other:
            other.hello(hasty.token("blue", "chat"))
            other.ping()
    finally:
        for client in clients:
            client.sock.close()


def test_the_node_has_a_limit_on_sessions_in_all(hasty: StaticNode) -> None:
    clients = []
    try:
        for tenant in ("acme", "blue", "cyan", "dune"):
            for _ in range(3):
                clients.append(connect_tcp(hasty))
                clients[-1].hello(hasty.token(tenant, "chat"))
        with connect_tcp(hasty) as late:
            assert late.error().reason == "TOO_MANY_SESSIONS"
    finally:
        for client in clients:
            client.sock.close()
