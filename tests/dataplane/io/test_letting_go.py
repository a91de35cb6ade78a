"""Descriptors whose closing blocks: the client that sent one waits, nobody else does."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from saltern import wire
from saltern.wire import Opcode
from tests.support.static_node import StaticNode
from tests.support.wire_client import WireClient, connect_tcp, connect_unix

#: Longer than any receive of a test waits.
LINGER_S = 120


@contextlib.contextmanager
def lingering_socket() -> Iterator[socket.socket]:
    """A TCP socket with unsent bytes: whoever closes it last waits for the peer, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
        with right:
            left.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(1000):
                    left.send(bytes(1024 * 1024))
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
            yield left
            # What reads nothing and goes sends a reset: every close that waits returns.


def before_hello(client: WireClient, node: StaticNode, descriptors: list[int]) -> None:
    socket.send_fds(client.sock, [b"S"], descriptors)


def with_a_request(client: WireClient, node: StaticNode, descriptors: list[int]) -> None:
    client.hello(node.token("acme", "chat"))
    socket.send_fds(client.sock, [wire.encode_request(Opcode.PING, 1, b"\x80")], descriptors)


def as_a_region(client: WireClient, node: StaticNode, descriptors: list[int]) -> None:
    client.hello(node.token("acme", "chat"))
    body = wire.encode_body(wire.Register(0, 4096))
    socket.send_fds(client.sock, [wire.encode_request(Opcode.REGISTER, 1, body)], descriptors)


def inside_a_payload(client: WireClient, node: StaticNode, descriptors: list[int]) -> None:
    client.hello(node.token("acme", "chat"))
    body = wire.encode_body(wire.Put(bytes(32), [4096], bytes(8)))
    client.sock.sendall(wire.encode_request(Opcode.PUT, 1, body, 4096) + bytes(100))
    socket.send_fds(client.sock, [bytes(100)], descriptors)


def behind_a_broken_frame(client: WireClient, node: StaticNode, descriptors: list[int]) -> None:
    client.sock.sendall(b"X" * wire.HEADER_BYTES)
    assert client.error().reason == "BAD_MAGIC"
    socket.send_fds(client.sock, [b"X"], descriptors)


@pytest.mark.parametrize("count", [1, 3, 200])
@pytest.mark.parametrize("send", [before_hello, with_a_request, as_a_region, inside_a_payload, behind_a_broken_frame])
def test_i2_a_descriptor_that_takes_long_to_close_holds_up_nobody_else(
    node: StaticNode, send: Callable[[WireClient, StaticNode, list[int]], None], count: int
) -> None:
    with lingering_socket() as lingering:
        with connect_unix(node) as client:
            with lingering:
                send(client, node, [lingering.fileno()] * count)
        for connect in (connect_tcp, connect_unix):
            with connect(node) as other:
                other.hello(node.token("blue", "chat"))
                other.ping()
