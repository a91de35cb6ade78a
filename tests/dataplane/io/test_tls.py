"""The wire protocol inside TLS, over real sockets: who gets in, who is told why not, and every byte as it was."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from dataplane.settings import SessionLimits
from saltern import wire
from saltern.client import Client
from saltern.credentials import NodeEndpoint, StaticCredentials
from saltern.deadline import Deadline
from saltern.errors import ProtocolError, SalternError, UnavailableError
from saltern.keys import BlockKey, SaltKey
from saltern.results import Error, Hit, Miss, Pong, Stored
from saltern.tls import ClientTls, ServerTls, client_context
from saltern.transport.tls import TlsDialer
from saltern.wire import Opcode
from tests.support.certificates import Authority
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.wire_client import WireClient, ends_unheard

DEADLINE_MS = 30_000


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@contextmanager
def client_of(
    node: StaticNode,
    tls: ClientTls | None,
    *,
    server_name: str = "127.0.0.1",
    deadline_ms: float = DEADLINE_MS,
    wire_endpoint: str = "",
) -> Iterator[Client]:
    endpoint = NodeEndpoint("node-1", wire_endpoint or node.wire_endpoint, tls_server_name=server_name)
    credentials = StaticCredentials(
        node.token("acme", "chat"), namespace="chat", nodes=(endpoint,), salt_key=SaltKey(bytes(32))
    )
    with Client.from_credentials(credentials, transport="tcp", deadline_ms=deadline_ms, tls=tls) as client:
        yield client


def refusal(client: Client) -> SalternError:
    answer = client.ping()
    assert isinstance(answer, Error), answer
    return answer.error


@contextmanager
def bare(node: StaticNode, tls: ClientTls) -> Iterator[WireClient]:
    """A wire client inside TLS that does exactly what a test says."""
    host, port = node.wire_endpoint.rsplit(":", 1)
    raw = socket.create_connection((host, int(port)), timeout=20)
    with WireClient(client_context(tls).wrap_socket(raw, server_hostname="127.0.0.1")) as client:
        yield client


@pytest.mark.parametrize("size_bytes", [1, 4096, 16384, 16385, 300_001, 8 * MIB])
def test_i7_batches_arrive_byte_for_byte_both_ways(authority: Authority, size_bytes: int) -> None:
    count = max(1, min(700, 24 * MIB // size_bytes))
    items = [(BlockKey(i.to_bytes(32, "big")), random.Random(i).randbytes(size_bytes)) for i in range(count)]
    with static_node(tls=authority.server()) as node, client_of(node, authority.client()) as client:
        assert all(result == Stored() for result in client.put_many(items))
        fetched = client.get_many([key for key, _ in items])
        assert [bytes(hit.payload) for hit in fetched if isinstance(hit, Hit)] == [data for _, data in items]
        buffers = [bytearray(size_bytes) for _ in items]
        client.get_into([key for key, _ in items], buffers)
        assert buffers == [bytearray(data) for _, data in items]


def test_i7_an_entry_of_64_mib_arrives_byte_for_byte_both_ways(authority: Authority) -> None:
    tenants = {"acme": tenant_policy(limit_bytes=128 * MIB, block_bytes=64 * MIB)}
    data, key = random.Random(1).randbytes(64 * MIB), BlockKey(bytes(32))
    with static_node(tenants, dram_bytes=160 * MIB, tls=authority.server()) as node:
        with client_of(node, authority.client()) as client:
            assert client.put_many([(key, data)]) == [Stored()]
            (hit,) = client.get_many([key])
            assert isinstance(hit, Hit) and bytes(hit.payload) == data


def test_requests_that_follow_each_other_in_one_record_are_all_answered(authority: Authority) -> None:
    """What OpenSSL has decrypted raises no event: the node must not wait for one."""
    with static_node(tls=authority.server()) as node, bare(node, authority.client()) as client:
        hello = wire.Hello(node.token("acme", "chat"), "chat", 1, "test")
        frames = wire.encode_request(Opcode.HELLO, 1, wire.encode_body(hello))
        frames += b"".join(wire.encode_request(Opcode.PING, n, wire.encode_body(wire.Empty())) for n in range(2, 400))
        for start in range(0, len(frames), 16_000):
            client.sock.sendall(frames[start : start + 16_000])
        assert [client.receive()[0].request_id for _ in range(1, 400)] == list(range(1, 400))


def test_a_request_in_the_record_that_ends_a_payload_is_answered(authority: Authority) -> None:
    """The payload is read to its last byte and not beyond: what follows in its record is held back by OpenSSL."""
    data = random.Random(3).randbytes(300_000)
    with static_node(tls=authority.server()) as node, bare(node, authority.client()) as client:
        client.send(Opcode.HELLO, wire.Hello(node.token("acme", "chat"), "chat", 1, "test"))
        client.receive()
        put = wire.Put(bytes(32), [len(data)], wire.join_sums([wire.checksum(memoryview(data))]))
        frames = wire.encode_request(Opcode.PUT, 2, wire.encode_body(put), len(data)) + data
        frames += wire.encode_request(Opcode.PING, 3, wire.encode_body(wire.Empty()))
        client.sock.sendall(frames)
        assert [client.receive()[0].request_id for _ in range(2)] == [2, 3]


def test_frames_cut_into_records_of_one_byte_are_understood(authority: Authority) -> None:
    with static_node(tls=authority.server()) as node, bare(node, authority.client()) as client:
        hello = wire.Hello(node.token("acme", "chat"), "chat", 1, "test")
        for byte in wire.encode_request(Opcode.HELLO, 1, wire.encode_body(hello)):
            client.sock.sendall(bytes([byte]))
        assert client.receive()[0].status == 0


def test_only_tls_1_3_is_spoken(authority: Authority) -> None:
    with static_node(tls=authority.server()) as node:
        with bare(node, authority.client()) as client:
            assert isinstance(client.sock, ssl.SSLSocket) and client.sock.version() == "TLSv1.3"
        old = client_context(authority.client())
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        host, port = node.wire_endpoint.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=20) as raw, pytest.raises(ssl.SSLError):
            old.wrap_socket(raw, server_hostname="127.0.0.1")


def test_i10_a_certificate_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    with static_node(tls=other.server()) as node, client_of(node, authority.client()) as client:
        error = refusal(client)
        assert (error.reason, type(error)) == ("TLS_CERTIFICATE_REFUSED", UnavailableError)
        assert client.get_many([BlockKey(bytes(32))])[0].cause is not None  # type: ignore[union-attr]


def test_i10_a_certificate_for_another_host_is_refused(authority: Authority) -> None:
    with static_node(tls=authority.server()) as node:
        with client_of(node, authority.client(), server_name="elsewhere.example") as client:
            error = refusal(client)
        assert error.reason == "TLS_CERTIFICATE_REFUSED" and "elsewhere.example" in error.message
        with client_of(node, authority.client(), server_name="localhost") as client:
            assert isinstance(client.ping(), Pong)


def test_i10_an_expired_certificate_is_refused(authority: Authority) -> None:
    # The node itself would not start with it: so it is one that expires while the node serves.
    pair = authority.issue("short", lifetime=timedelta(seconds=2))
    with static_node(tls=ServerTls(pair.certificate, pair.private_key)) as node:
        expires_at = x509.load_pem_x509_certificate(pair.certificate.read_bytes()).not_valid_after_utc.timestamp()
        threading.Event().wait(max(0.0, expires_at - time.time()) + 1.1)
        with client_of(node, authority.client()) as client:
            error = refusal(client)
    assert error.reason == "TLS_CERTIFICATE_REFUSED" and "expired" in error.message


def test_with_a_client_ca_nobody_gets_in_without_a_certificate_of_it(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    with static_node(tls=authority.server(client_ca=authority.ca)) as node:
        with client_of(node, authority.client()) as client:
            error = refusal(client)
            assert error.reason == "TLS_CLIENT_CERTIFICATE_REQUIRED" and "--tls-client-ca" in error.hint
        stranger = replace(other.client("mallory"), ca=authority.ca)
        with client_of(node, stranger) as client:
            assert refusal(client).reason == "TLS_CLIENT_CERTIFICATE_REFUSED"
        with client_of(node, authority.client("engine")) as client:
            assert isinstance(client.ping(), Pong)


def test_i1_a_certificate_opens_no_session_without_a_token(authority: Authority) -> None:
    with static_node(tls=authority.server(client_ca=authority.ca)) as node:
        with bare(node, authority.client("acme")) as client:
            client.send(Opcode.HELLO, wire.Hello("not.a.token", "chat", 1, "test"))
            assert client.receive()[0].status == 16  # UNAUTHENTICATED


def test_a_plain_client_at_a_tls_port_is_told_so_at_once(authority: Authority) -> None:
    with static_node(tls=authority.server()) as node:
        host, port = node.wire_endpoint.rsplit(":", 1)
        with WireClient(socket.create_connection((host, int(port)))) as client:
            client.send(Opcode.HELLO, wire.Hello(node.token("acme", "chat"), "chat", 1, "test"))
            header, body, _ = client.receive()
            error = wire.error_from_body(wire.decode_body(wire.ErrorBody, body), header.status)
            assert error.reason == "TLS_REQUIRED" and isinstance(error, ProtocolError | SalternError)
        # Our own client has read in the registry that the node speaks TLS, and does not even connect.
        with client_of(node, None) as plain:
            assert refusal(plain).reason == "TLS_REQUIRED"
        with client_of(node, None, server_name="") as misled:
            assert refusal(misled).reason == "TLS_REQUIRED"


def test_a_client_that_was_told_to_use_tls_never_falls_back(authority: Authority) -> None:
    with static_node() as node:
        with client_of(node, authority.client()) as client:
            assert refusal(client).reason == "TLS_NOT_SPOKEN"
        with client_of(node, authority.client(), server_name="") as client:  # the registry says: plain text
            assert refusal(client).reason == "TLS_NOT_OFFERED"
        assert node.session_count() == 0


def test_half_a_handshake_ends_with_the_deadline_and_holds_no_place_of_a_tenant(authority: Authority) -> None:
    limits = SessionLimits(hello_s=0.5, sweep_s=0.05, tenant_sessions_max=1)
    with static_node(tls=authority.server(), limits=limits) as node:
        host, port = node.wire_endpoint.rsplit(":", 1)
        stuck = [socket.create_connection((host, int(port)), timeout=20) for _ in range(4)]
        try:
            for sock, first in zip(stuck, (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"\x16\x03\x01"), strict=True):
                sock.sendall(first)
            with client_of(node, authority.client()) as client:
                assert isinstance(client.ping(), Pong)
                for sock in stuck:
                    assert ends_unheard(sock)
                assert isinstance(client.ping(), Pong)
        finally:
            for sock in stuck:
                sock.close()


def test_a_node_that_never_answers_the_handshake_is_a_miss_within_the_deadline(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, static_node(tls=authority.server()) as node:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with client_of(node, authority.client(), wire_endpoint=address, deadline_ms=300) as client:
            (result,) = client.get_many([BlockKey(bytes(32))])
            assert isinstance(result, Miss) and result.cause is not None


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\xff\xff" + bytes(70_000),  # a record longer than records may be
        b"\x16\x03\x01\x00\x04\x01\x00\x00\x00",  # a hello that ends at once
        b"\x16" * 5000,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(5000),
    ],
    ids=["huge-record", "empty-hello", "noise", "http", "zeros"],
)
def test_garbage_ends_its_own_connection_and_no_other(authority: Authority, garbage: bytes) -> None:
    with static_node(tls=authority.server()) as node, client_of(node, authority.client()) as client:
        assert isinstance(client.ping(), Pong)
        host, port = node.wire_endpoint.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            try:
                sock.sendall(garbage)
                while sock.recv(4096):
                    pass
            except ConnectionError:
                pass
        assert isinstance(client.ping(), Pong)


def test_garbage_inside_an_open_session_ends_that_session(authority: Authority) -> None:
    with static_node(tls=authority.server()) as node, bare(node, authority.client()) as client:
        client.send(Opcode.HELLO, wire.Hello(node.token("acme", "chat"), "chat", 1, "test"))
        assert client.receive()[0].status == 0
        # Below TLS: a record that no key of the session has made.
        socket.socket.sendall(client.sock, b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises((EOFError, OSError)):
            client.receive()


def test_i8_a_client_killed_in_the_middle_of_a_put_leaves_nothing(authority: Authority) -> None:
    with static_node(tls=authority.server()) as node:
        with bare(node, authority.client()) as client:
            client.send(Opcode.HELLO, wire.Hello(node.token("acme", "chat"), "chat", 1, "test"))
            client.receive()
            put = wire.Put(bytes(32), [4 * MIB], bytes(8))
            client.sock.sendall(wire.encode_request(Opcode.PUT, 2, wire.encode_body(put), 4 * MIB) + bytes(MIB))
        with client_of(node, authority.client()) as other:
            assert isinstance(other.ping(), Pong)
            assert not other.lookup([BlockKey(bytes(32))]).found[0]
        node.check_invariants()


def test_a_node_killed_under_a_client_is_a_miss(authority: Authority) -> None:
    with static_node(tls=authority.server()) as node:
        client_context_manager = client_of(node, authority.client(), deadline_ms=2_000)
        client = client_context_manager.__enter__()
        assert isinstance(client.ping(), Pong)
    try:
        (result,) = client.get_many([BlockKey(bytes(32))])
        assert isinstance(result, Miss) and result.cause is not None
    finally:
        client_context_manager.__exit__(None, None, None)


def test_a_slow_reader_of_a_large_reply_gets_every_byte(authority: Authority) -> None:
    """The node's sends meet a full socket: the record that was encrypted already must be the one that goes on."""
    items = [(BlockKey(i.to_bytes(32, "big")), random.Random(i).randbytes(70_000 + i)) for i in range(200)]
    with static_node(tls=authority.server()) as node:
        with client_of(node, authority.client()) as client:
            assert all(result == Stored() for result in client.put_many(items))
        host, port = node.wire_endpoint.rsplit(":", 1)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        raw.connect((host, int(port)))
        with WireClient(client_context(authority.client()).wrap_socket(raw, server_hostname="127.0.0.1")) as slow:
            slow.send(Opcode.HELLO, wire.Hello(node.token("acme", "chat"), "chat", 1, "test"))
            slow.receive()
            get = wire.Get(b"".join(key for key, _ in items), [len(data) for _, data in items])
            slow.send(Opcode.GET, get, request_id=2)
            _, _, payload = slow.receive()
            assert payload == b"".join(data for _, data in items)


def test_a_replaced_certificate_is_shown_to_the_next_client_and_sessions_go_on(authority: Authority) -> None:
    tls = authority.server()
    with static_node(tls=tls) as node, bare(node, authority.client()) as before:
        before.send(Opcode.HELLO, wire.Hello(node.token("acme", "chat"), "chat", 1, "test"))
        before.receive()
        first = serial_shown(before)
        second = authority.issue("server").serial
        assert first != second
        wait_until_shown(node, authority, second)
        # A broken file changes nothing.
        tls.certificate.write_text("-----BEGIN CERTIFICATE-----\nnot one\n-----END CERTIFICATE-----\n")
        threading.Event().wait(1.2)  # longer than the node leaves its files alone
        with bare(node, authority.client()) as client:
            assert serial_shown(client) == second
        third = authority.issue("server").serial
        wait_until_shown(node, authority, third)
        before.send(Opcode.PING, wire.Empty(), request_id=2)
        assert before.receive()[0].status == 0


def test_a_client_takes_up_its_own_new_certificate_and_keeps_the_old_while_the_new_is_broken(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other").client("engine")
    mine = authority.client("engine")
    assert mine.certificate and mine.private_key and other.certificate and other.private_key
    good = mine.certificate.read_bytes(), mine.private_key.read_bytes()
    dialer = TlsDialer(mine)
    with static_node(tls=authority.server(client_ca=authority.ca)) as node:

        def ping() -> str:
            host, port = node.wire_endpoint.rsplit(":", 1)
            connection = dialer.dial((host, int(port)), Deadline(DEADLINE_MS), peer="node", server_name="127.0.0.1")
            try:
                request_id = connection.send(Opcode.PING, wire.Empty(), Deadline(DEADLINE_MS))
                connection.receive_whole(Opcode.PING, request_id, Deadline(DEADLINE_MS))
            except SalternError as error:
                return error.reason
            finally:
                connection.close()
            return ""

        assert ping() == "HELLO_REQUIRED"
        mine.private_key.write_text("broken")
        assert ping() == "HELLO_REQUIRED"
        mine.certificate.write_bytes(other.certificate.read_bytes())
        mine.private_key.write_bytes(other.private_key.read_bytes())
        assert ping() == "TLS_CLIENT_CERTIFICATE_REFUSED"
        mine.certificate.write_bytes(good[0])
        mine.private_key.write_bytes(good[1])
        assert ping() == "HELLO_REQUIRED"


def serial_shown(client: WireClient) -> int:
    assert isinstance(client.sock, ssl.SSLSocket)
    certificate = client.sock.getpeercert(binary_form=True)
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).serial_number


def wait_until_shown(node: StaticNode, authority: Authority, serial: int) -> None:
    deadline_s = time.monotonic() + 20
    while True:
        with bare(node, authority.client()) as client:
            if serial_shown(client) == serial:
                return
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.1)
