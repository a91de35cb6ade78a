"""I2, I7: what a freed entry has left in memory is never readable by anyone, at any door.

The arena is not wiped. Each test first proves that the old bytes are still there, right behind the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from saltern import wire
from saltern.wire import Opcode
from tests.dataplane.io.conftest import wait_until
from tests.dataplane.io.test_grpc_door import GrpcClient, as_tenant
from tests.dataplane.io.test_grpc_door import channel as channel
from tests.support.static_node import MIB, StaticNode
from tests.support.wire_client import Segment, WireClient, connect_tcp, connect_unix, key

MARK = b"blue's own words"
SECRET = MARK * (MIB // len(MARK))
SHORT_BYTES = 100
SENTINEL = b"\xa5"


@pytest.fixture
def memory(node: StaticNode) -> Iterator[Callable[[int], bytes]]:
    """Leaves SECRET of tenant blue, deleted, all over the memory that is given out next; returns what lies there."""

    def read(size_bytes: int) -> bytes:
        return node.call(lambda: bytes(node._node._arena.view(offset, size_bytes)))

    with connect_tcp(node) as blue:
        blue.hello(node.token("blue", "chat"))
        names = [key(1000 + n) for n in range(8)]
        blue.put(dict.fromkeys(names, SECRET))
        pools = node._node._core._pool
        offset = node.call(lambda: min(e.offset for t in pools.tenants.values() for e in t.order))
        assert blue.delete(*names) == 8
    assert read(MIB) == SECRET
    yield read


def offset_of_short(node: StaticNode) -> int:
    """Where the one entry of acme lies."""
    (entry,) = node.call(lambda: list(node._node._core._pool.tenants["acme"].order))  # type: ignore[index]
    return entry.offset


def behind(node: StaticNode) -> bytes:
    """What lies in the rest of its granule: the predecessor's bytes."""
    offset = offset_of_short(node)
    return node.call(lambda: bytes(node._node._arena.view(offset + SHORT_BYTES, 4096 - SHORT_BYTES)))


@pytest.mark.parametrize("connect", [connect_tcp, connect_unix])
def test_an_inline_get_ends_where_the_entry_ends(
    node: StaticNode, memory: Callable[[int], bytes], connect: Callable[[StaticNode], WireClient]
) -> None:
    value = SENTINEL * SHORT_BYTES
    with connect(node) as acme:
        acme.hello(node.token("acme", "chat"))
        assert acme.put({key(1): value}).codes == b"\0"
        assert MARK in behind(node), "the test would prove nothing"
        acme.send(Opcode.GET, wire.Get(key(1), [64 * MIB]))
        header, body, payload = acme.receive()
        assert payload == value and header.payload_bytes == SHORT_BYTES
        assert MARK not in body


def test_a_get_into_a_region_writes_the_entrys_bytes_and_no_more(
    node: StaticNode, memory: Callable[[int], bytes]
) -> None:
    with Segment(MIB) as segment, connect_unix(node) as acme:
        acme.hello(node.token("acme", "chat"))
        acme.register([segment.descriptor], MIB)
        segment.memory[:SHORT_BYTES] = b"x" * SHORT_BYTES
        sums = wire.join_sums([wire.checksum(b"x" * SHORT_BYTES)])
        acme.send(Opcode.PUT, wire.Put(key(1), [SHORT_BYTES], sums, 0, [0]))
        assert acme.answer(wire.PutReply)[0].codes == b"\0"
        assert MARK in behind(node)
        segment.memory[:] = SENTINEL * MIB
        acme.send(Opcode.GET, wire.Get(key(1), [MIB // 2], 0, [4096]))
        assert acme.answer(wire.GetReply)[0].sizes == [SHORT_BYTES]
        wait_until(lambda: segment.memory[4096] == ord("x"))
        whole = bytes(segment.memory)
        assert whole == SENTINEL * 4096 + b"x" * SHORT_BYTES + SENTINEL * (MIB - 4096 - SHORT_BYTES)


def test_grpc_answers_the_entrys_bytes_and_no_more(
    node: StaticNode, memory: Callable[[int], bytes], channel: object
) -> None:
    acme: GrpcClient = as_tenant(channel, node, "acme")  # type: ignore[arg-type]
    acme.put({key(1): SENTINEL * SHORT_BYTES})
    assert MARK in behind(node)
    assert acme.get(key(1)) == {key(1): SENTINEL * SHORT_BYTES}


def test_an_entry_whose_bytes_never_came_is_never_there(node: StaticNode, memory: Callable[[int], bytes]) -> None:
    """A put that claims the predecessor's sum, sends half and goes; and one whose bytes do not have the sum."""
    put = wire.Put(key(1), [MIB], wire.join_sums([wire.checksum(SECRET)]))
    with connect_tcp(node) as acme, connect_tcp(node) as reader:
        acme.hello(node.token("acme", "chat"))
        reader.hello(node.token("acme", "chat"))
        frame = wire.encode_request(Opcode.PUT, 1, wire.encode_body(put), MIB)
        acme.sock.sendall(frame + bytes(MIB // 2))
        wait_until(lambda: node.usage().tenants["acme"].in_flight_bytes == MIB)  # type: ignore[index]
        assert reader.get(key(1)) == {}
        acme.sock.close()
        wait_until(lambda: node.usage().tenants["acme"].in_flight_bytes == 0)  # type: ignore[index]
        assert reader.get(key(1)) == {}
        reader.send(Opcode.PUT, put, bytes(MIB))
        assert reader.answer(wire.PutReply)[0].codes != b"\0"
        assert reader.get(key(1)) == {}


def test_a_wrong_sized_buffer_gets_nothing(node: StaticNode, memory: Callable[[int], bytes]) -> None:
    with connect_tcp(node) as acme:
        acme.hello(node.token("acme", "chat"))
        acme.put({key(1): SENTINEL * SHORT_BYTES})
        acme.send(Opcode.GET, wire.Get(key(1), [SHORT_BYTES - 1]))
        reply, payload = acme.answer(wire.GetReply)
        assert reply.codes == b"\x09" and payload == b""
