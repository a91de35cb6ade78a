"""A node that is told to stop ends what it has begun, refuses what comes after, and is gone in bounded time."""

from __future__ import annotations

import time

from saltern import wire
from saltern.wire import Opcode
from tests.support.static_node import MIB, StaticNode, static_node
from tests.support.waiting import wait_until
from tests.support.wire_client import Segment, WireClient, block, connect_tcp, connect_unix, key


def begin_put(node: StaticNode, client: WireClient, data: bytes) -> None:
    """Send half of a put and wait until the node has begun it."""
    put = wire.encode_body(wire.Put(key(1), [len(data)], wire.join_sums([wire.checksum(data)])))
    client.sock.sendall(wire.encode_request(Opcode.PUT, 1, put, len(data)) + data[: len(data) // 2])
    wait_until(lambda: node.usage().tenants["acme"].in_flight_bytes == len(data))  # type: ignore[index]


def test_a_put_that_has_begun_is_ended_and_the_next_request_is_refused() -> None:
    data = block(1, MIB)
    with static_node() as node, connect_tcp(node) as client, connect_unix(node) as idle:
        client.hello(node.token("acme", "chat"))
        idle.hello(node.token("acme", "chat"))
        begin_put(node, client, data)
        node.stop()
        assert idle.is_closed()
        ping = wire.encode_request(Opcode.PING, 2, wire.encode_body(wire.Empty()))
        client.sock.sendall(data[MIB // 2 :] + ping)
        reply, _ = client.answer(wire.PutReply)
        assert reply.codes == b"\x00"
        assert client.error().reason == "DRAINING"
        assert client.is_closed()


def test_a_transfer_that_does_not_end_does_not_hold_up_the_node() -> None:
    with static_node(drain_s=0.2) as node, connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        begin_put(node, client, block(1, MIB))
        began_s = time.monotonic()
        node.stop()
        assert client.is_closed()
    assert time.monotonic() - began_s < 20  # bounded; static_node has waited for its thread to end


def test_a_stopped_node_can_be_started_again_at_once() -> None:
    port = 0  # any, and then the same again: connections of the one before are not quite over
    for _ in range(3):
        with static_node(port=port) as node, connect_tcp(node) as client:
            client.hello(node.token("acme", "chat"))
            bound = int(node.wire_endpoint.rsplit(":", 1)[1])
            assert port in (0, bound)
            port = bound
            node.stop()  # before the client: the last packets are for the node to wait for


def test_a_copy_between_region_and_arena_is_cut_short_without_harm() -> None:
    """The node stops while it copies: the ticket is given back and the region unmapped, whatever still points to it."""
    with (
        Segment(48 * MIB) as segment,
        static_node(dram_bytes=64 * MIB, drain_s=0) as node,
        connect_unix(node) as client,
    ):
        client.hello(node.token("acme", "chat"))
        client.register([segment.descriptor], 48 * MIB)
        sums = wire.join_sums([wire.checksum(bytes(8 * MIB))] * 6)
        offsets = [position * 8 * MIB for position in range(6)]
        keys = b"".join(map(key, range(6)))
        for _ in range(20):
            client.send(Opcode.PUT, wire.Put(keys, [8 * MIB] * 6, sums, 0, offsets))
            client.send(Opcode.DELETE, wire.Delete(keys))
        node.stop()
        received = bytearray()
        try:
            while piece := client.sock.recv(65536):
                received += piece
        except ConnectionResetError:
            pass  # cut off in the middle of its requests
    assert len(received) < 20 * 2 * 200
