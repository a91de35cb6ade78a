"""Bytes that no honest client sends: a typed error or a closed session, others unharmed, books exact (see conftest)."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import struct
from multiprocessing.connection import Connection

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saltern import wire
from saltern.errors import InvalidArgumentError, ProtocolError
from saltern.wire import HEADER, Opcode
from tests.support.static_node import MIB, StaticNode
from tests.support.waiting import open_descriptors, wait_until
from tests.support.wire_client import WireClient, block, connect_tcp, connect_unix, key

NO_BODY = wire.encode_body(wire.Empty())


def header(
    *,
    magic: bytes = wire.MAGIC,
    version: int = 1,
    opcode: int = Opcode.PING,
    flags: int = 0,
    body_bytes: int = 0,
    status: int = 0,
    payload_bytes: int = 0,
) -> bytes:
    return HEADER.pack(magic, version, opcode, flags, 5, body_bytes, status, payload_bytes)


BROKEN_HEADERS = {
    "BAD_MAGIC": header(magic=b"HTTP"),
    "UNSUPPORTED_VERSION": header(version=2),
    "UNKNOWN_OPCODE": header(opcode=0x7F),
    "RESERVED_BITS": header(flags=1),
    "BODY_TOO_LARGE": header(body_bytes=2**32 - 1),
    "PAYLOAD_TOO_LARGE": header(opcode=Opcode.PUT, payload_bytes=2**64 - 1),
    "UNEXPECTED_REPLY": header(opcode=Opcode.PING | 0x80),
    "LENGTH_MISMATCH": header(opcode=Opcode.GET, payload_bytes=1),
}


@pytest.mark.parametrize("reason", BROKEN_HEADERS)
def test_a_broken_header_is_answered_and_closes_the_session(client: WireClient, reason: str) -> None:
    client.sock.sendall(BROKEN_HEADERS[reason] + NO_BODY)
    error = client.error()
    assert isinstance(error, ProtocolError | InvalidArgumentError)
    assert error.reason == reason
    assert error.message
    assert client.is_closed()


def test_a_status_in_a_request_is_refused(client: WireClient) -> None:
    client.sock.sendall(header(status=3))
    assert client.error().reason == "RESERVED_BITS"
    assert client.is_closed()


@pytest.mark.parametrize("opcode", [code for code in Opcode if code is not Opcode.HELLO])
def test_nothing_but_hello_opens_a_session(stranger: WireClient, opcode: Opcode) -> None:
    stranger.sock.sendall(header(opcode=opcode, body_bytes=1) + NO_BODY)
    assert stranger.error().reason == "HELLO_REQUIRED"
    assert stranger.is_closed()


def test_limits_are_tighter_before_hello(node: StaticNode) -> None:
    for frame, reason in (
        (header(opcode=Opcode.HELLO, body_bytes=wire.HELLO_BODY_MAX_BYTES + 1), "BODY_TOO_LARGE"),
        (header(opcode=Opcode.HELLO, body_bytes=1, payload_bytes=1), "PAYLOAD_TOO_LARGE"),
    ):
        with connect_tcp(node) as stranger:
            stranger.sock.sendall(frame)
            assert stranger.error().reason == reason
            assert stranger.is_closed()


def test_a_second_hello_is_refused(client: WireClient, node: StaticNode) -> None:
    client.send(Opcode.HELLO, wire.Hello(node.token("blue", "chat"), "chat", 1))
    assert client.error().reason == "ALREADY_OPEN"
    assert client.is_closed()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81\xa5token\xa2\xff\xfe",  # not UTF-8
        msgspec.msgpack.encode({"token": "a\x00b", "namespace": "chat\x00", "epoch": 1}),
        msgspec.msgpack.encode({"token": 7, "namespace": "chat", "epoch": 1}),
        msgspec.msgpack.encode({"token": "x", "namespace": "chat", "epoch": 2**64 - 1}),
        msgspec.msgpack.encode({"token": "x", "namespace": "chat"}),
        b"\x91" * 16000,  # nested deep
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
        b"\xdf\xff\xff\xff\xff",  # a map of 2^32 - 1
    ],
)
def test_a_malformed_hello_opens_nothing(stranger: WireClient, body: bytes) -> None:
    stranger.sock.sendall(header(opcode=Opcode.HELLO, body_bytes=len(body)) + body)
    assert stranger.error().reason in {"MALFORMED_BODY", "TOKEN_MALFORMED"}
    assert stranger.is_closed()


def put_of(**fields: object) -> wire.Put:
    return msgspec.structs.replace(wire.Put(key(1), [4], wire.join_sums([wire.checksum(b"abcd")])), **fields)


@pytest.mark.parametrize(
    ("opcode", "body", "reason"),
    [
        (Opcode.PUT, put_of(keys=b"short"), "MALFORMED_BODY"),
        (Opcode.PUT, put_of(sizes=[]), "MALFORMED_BODY"),
        (Opcode.PUT, put_of(sums=b""), "MALFORMED_BODY"),
        (Opcode.PUT, put_of(sizes=[0]), "ENTRY_SIZE_OUT_OF_RANGE"),
        (Opcode.PUT, put_of(sizes=[-4]), "ENTRY_SIZE_OUT_OF_RANGE"),
        (Opcode.PUT, put_of(sizes=[2**63]), "ENTRY_SIZE_OUT_OF_RANGE"),
        (Opcode.PUT, put_of(offsets=[1]), "MALFORMED_BODY"),
        (Opcode.GET, wire.Get(key(1), []), "MALFORMED_BODY"),
        (Opcode.GET, wire.Get(key(1), [0]), "ENTRY_SIZE_OUT_OF_RANGE"),
        (Opcode.GET, wire.Get(key(1), [4], 0, [0]), "UNKNOWN_REGION"),
        (Opcode.GET, wire.Get(key(1), [4], 0, [-1]), "OUT_OF_REGION"),
        (Opcode.LOOKUP, wire.Lookup(b"x"), "MALFORMED_BODY"),
        (Opcode.LOOKUP, wire.Lookup(bytes(32 * 4097)), "TOO_MANY_KEYS"),
        (Opcode.DELETE, wire.Delete(bytes(32 * 4097)), "TOO_MANY_KEYS"),
        (Opcode.REGISTER, wire.Register(0, 4096), "REGION_DESCRIPTORS"),
        (Opcode.REGISTER, wire.Register(16, 4096), "REGION_OUT_OF_RANGE"),
        (Opcode.UNREGISTER, wire.Unregister(3), "UNKNOWN_REGION"),
        (Opcode.LOOKUP, wire.Empty(), "MALFORMED_BODY"),
    ],
)
def test_a_malformed_request_is_answered_and_the_session_goes_on(
    client: WireClient, opcode: Opcode, body: msgspec.Struct, reason: str
) -> None:
    payload = b"abcd" if opcode is Opcode.PUT and reason != "ENTRY_SIZE_OUT_OF_RANGE" else b""
    client.send(opcode, body, payload)
    assert client.error().reason == reason
    client.ping()
    assert client.lookup(key(1)).found == b"\x00"


def test_sizes_that_do_not_add_up_to_the_payload_close_the_session(client: WireClient) -> None:
    client.send(Opcode.PUT, put_of(sizes=[5]), b"abcd")
    assert client.error().reason == "LENGTH_MISMATCH"
    assert client.is_closed()


def test_a_million_keys_are_refused_before_they_are_read(client: WireClient) -> None:
    client.sock.sendall(header(opcode=Opcode.LOOKUP, body_bytes=32 * 1_000_000))
    assert client.error().reason == "BODY_TOO_LARGE"
    assert client.is_closed()


def test_a_million_sizes_in_one_body_are_refused(client: WireClient) -> None:
    body = b"\x83\xa4keys\xc4\x20" + bytes(32) + b"\xa4sums\xc4\x08" + bytes(8)
    body += b"\xa5sizes\xdd" + struct.pack(">I", 1_000_000) + b"\x01" * 1_000_000
    client.sock.sendall(header(opcode=Opcode.PUT, body_bytes=len(body)) + body)
    assert client.error().reason == "MALFORMED_BODY"
    client.ping()


def test_an_empty_batch_is_fine(client: WireClient) -> None:
    assert client.put({}).codes == b""
    assert client.get() == {}
    assert client.lookup() == wire.LookupReply(0, b"")
    assert client.delete() == 0


def test_a_frame_that_comes_byte_by_byte_is_a_frame(client: WireClient) -> None:
    data = block(1, 200)
    put = wire.encode_body(wire.Put(key(1), [200], wire.join_sums([wire.checksum(data)])))
    for byte in wire.encode_request(Opcode.PUT, 9, put, 200) + data:
        client.sock.send(bytes([byte]))
    assert client.answer(wire.PutReply)[0].codes == b"\x00"
    assert client.get(key(1)) == {key(1): data}


@pytest.mark.parametrize("cut_at", [1, 31, 32, 40, 2000, MIB])
def test_i8_a_client_that_leaves_in_the_middle_leaves_nothing(
    client: WireClient, node: StaticNode, cut_at: int
) -> None:
    data = block(1, 2 * MIB)
    put = wire.encode_body(wire.Put(key(1) + key(2), [MIB, MIB], wire.join_sums([0, 0])))
    client.sock.sendall((wire.encode_request(Opcode.PUT, 1, put, 2 * MIB) + data)[:cut_at])
    client.sock.close()
    wait_until(lambda: node.session_count() == 0)
    assert node.usage().tenants["acme"].used_bytes == 0  # type: ignore[index]


def test_i8_entries_received_before_the_client_died_stay_only_if_their_sum_was_right(node: StaticNode) -> None:
    with connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        first, second = block(1, MIB), block(2, MIB)
        put = wire.Put(key(1) + key(2), [MIB, MIB], wire.join_sums([wire.checksum(first), wire.checksum(second)]))
        frame = wire.encode_request(Opcode.PUT, 1, wire.encode_body(put), 2 * MIB)
        client.sock.sendall(frame + first + second[: MIB // 2])
    wait_until(lambda: node.session_count() == 0)
    with connect_tcp(node) as reader:
        reader.hello(node.token("acme", "chat"))
        assert reader.get(key(1), key(2)) == {key(1): first}


def put_forever(address: tuple[str, int], token: str, pipe: Connection) -> None:
    """A client process that puts until it is killed."""
    with WireClient(socket.create_connection(address)) as client:
        client.hello(token)
        data = block(1, MIB)
        sums = wire.join_sums([wire.checksum(data)] * 4)
        for number in range(10**9):
            keys = b"".join(key(number * 4 + position) for position in range(4))
            client.send(Opcode.PUT, wire.Put(keys, [MIB] * 4, sums), data * 4)
            client.answer(wire.PutReply)
            pipe.send(number)


def test_i8_a_client_process_killed_while_it_puts(node: StaticNode) -> None:
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=put_forever, args=(node.wire_address, node.token("acme", "chat"), sending))
    process.start()
    try:
        for _ in range(10):
            assert receiving.poll(30)
            receiving.recv()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.join()
        receiving.close()
        sending.close()
    wait_until(lambda: node.session_count() == 0)
    books = node.usage().tenants["acme"]  # type: ignore[index]
    assert books.used_bytes == books.resident_bytes == books.entries * MIB


def test_a_client_that_does_not_read_its_replies_holds_only_itself(node: StaticNode) -> None:
    with connect_tcp(node) as greedy, connect_tcp(node) as other:
        greedy.hello(node.token("acme", "chat"))
        other.hello(node.token("blue", "chat"))
        entries = {key(n): block(n, MIB) for n in range(12)}
        greedy.put(entries)
        for _ in range(8):
            greedy.send(Opcode.GET, wire.Get(b"".join(entries), [MIB] * 12))
        other.put({key(1): block(1)})
        assert other.get(key(1)) == {key(1): block(1)}
        for _ in range(8):
            _, payload = greedy.answer(wire.GetReply)
            assert payload == b"".join(entries.values())


def test_requests_behind_a_broken_one_are_not_answered(client: WireClient) -> None:
    client.sock.sendall(header(version=9) + wire.encode_request(Opcode.PING, 1, NO_BODY) * 10)
    assert client.error().reason == "UNSUPPORTED_VERSION"
    assert client.is_closed()


def test_no_descriptor_and_no_memory_is_lost_to_hostile_sessions(node: StaticNode) -> None:
    def abuse() -> None:
        for connect in (connect_tcp, connect_unix):
            with connect(node) as client:
                client.sock.sendall(os.urandom(64))
            with connect(node) as client:
                client.hello(node.token("acme", "chat"))
                client.sock.sendall(
                    header(opcode=Opcode.PUT, body_bytes=MIB, payload_bytes=200 * MIB) + bytes(MIB // 2)
                )
        wait_until(lambda: node.session_count() == 0)

    abuse()
    before, peak_kib = open_descriptors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        abuse()
    assert open_descriptors() <= before  # what is let go is closed a moment later, elsewhere
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 64 * 1024


RAW = st.binary(max_size=300)
FIELDS = ["keys", "sizes", "sums", "max_sizes", "region", "offsets", "token", "region_bytes"]
NUMBERS = st.integers(-(2**63), 2**64 - 1)
VALUES = st.one_of(NUMBERS, RAW, st.lists(NUMBERS, max_size=5), st.text(max_size=9))
BODIES = st.one_of(RAW, st.builds(msgspec.msgpack.encode, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)))


def make_frame(opcode: int, body: bytes, payload: bytes, lie_bytes: int) -> bytes:
    """A frame whose header may lie about the length of its body."""
    lengths = {"body_bytes": max(0, len(body) + lie_bytes), "payload_bytes": len(payload)}
    return header(opcode=opcode, **lengths) + body + payload


FRAMES = st.builds(make_frame, st.integers(0, 255), BODIES, RAW, st.sampled_from([0, 0, 0, -1, 1, 1000]))


@given(st.lists(st.one_of(RAW, FRAMES), max_size=5), st.booleans())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_bytes_are_answered_with_frames_or_a_closed_session(
    node: StaticNode, pieces: list[bytes], is_open: bool
) -> None:
    with connect_unix(node) as client:
        if is_open:
            client.hello(node.token("acme", "chat"))
        try:
            for piece in pieces:
                client.sock.sendall(piece)
            client.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # closed on us: fine
        try:
            while True:
                reply, body, _ = client.receive()
                if reply.status:
                    assert wire.decode_body(wire.ErrorBody, body).reason
        except EOFError:
            pass
    node.check_invariants()
