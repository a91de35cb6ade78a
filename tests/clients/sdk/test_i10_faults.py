"""I10: whatever happens to a node is a miss with its cause, within the deadline; trust problems are errors."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from saltern import wire
from saltern.breaker import BreakerPolicy
from saltern.credentials import NodeEndpoint
from saltern.errors import (
    DataLossError,
    DeadlineExceededError,
    InvalidArgumentError,
    ProtocolError,
    SalternError,
    UnauthenticatedError,
    UnavailableError,
)
from saltern.results import AlreadyStored, Deleted, Error, GetResult, Hit, Miss, Pong, PutResult, Refused, Stored
from tests.support.clients import block, blocks, node_client, static_client
from tests.support.faulty_peer import PeerSession, faulty_peer
from tests.support.node_process import NodeProcess, node_process
from tests.support.static_node import MIB, static_node

KEY, DATA = block(1, 1000)
#: Far above any deadline given below: a call that takes so long hangs.
HANG_S = 20.0
NO_BREAKER = BreakerPolicy(quick_failures=10**9, backoff_first_s=0.0, backoff_max_s=0.0)


def timed(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


def cause_of(result: GetResult | PutResult) -> SalternError:
    """Why a get missed or a put was refused."""
    match result:
        case Miss(SalternError() as cause) | Refused(cause):
            return cause
    raise AssertionError(f"{result} has no cause")


def process_endpoint(node: NodeProcess) -> NodeEndpoint:
    return NodeEndpoint("node-1", node.wire_endpoint, node.shm_path)


# ---- dead, frozen, restarted, full -------------------------------------------------------------------------------


def test_i10_dead_node_is_a_miss_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = NodeEndpoint("node-1", f"127.0.0.1:{listener.getsockname()[1]}")
    with static_client(endpoint, deadline_ms=2000) as client:
        began_s = time.monotonic()
        assert isinstance(cause_of(client.get_many([KEY])[0]), UnavailableError)
        assert isinstance(cause_of(client.put_many([(KEY, DATA)])[0]), UnavailableError)
        assert isinstance(cause_of(client.get_into([KEY], [bytearray(10)])[0]), UnavailableError)
        assert client.exists([KEY]) == [False]
        assert client.longest_prefix([KEY]) == 0
        assert isinstance(client.lookup([KEY]).error, UnavailableError)
        assert isinstance(client.delete([KEY]).error, UnavailableError)
        assert isinstance(client.ping(), Error)
        assert time.monotonic() - began_s < HANG_S


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_i10_frozen_node_is_a_miss_within_the_deadline_and_is_asked_once_each_backoff(transport: str) -> None:
    policy = BreakerPolicy(backoff_first_s=60.0, backoff_max_s=60.0)
    with node_process() as node:
        with static_client(process_endpoint(node), node.token, transport=transport, breaker=policy) as client:
            assert client.put_many([(KEY, DATA)]) == [Stored()]
            node.freeze()
            [first] = client.get_many([KEY], deadline_ms=300)
            assert isinstance(cause_of(first), DeadlineExceededError)
            # From now on nobody waits, however long the deadline.
            assert timed(lambda: client.get_many([KEY], deadline_ms=60_000)) < HANG_S
            assert cause_of(client.get_many([KEY])[0]).reason == "CIRCUIT_OPEN"
            assert cause_of(client.put_many([(KEY, DATA)])[0]).reason == "CIRCUIT_OPEN"
            node.thaw()


def test_i10_a_node_that_thaws_is_used_again() -> None:
    with node_process() as node:
        with static_client(process_endpoint(node), node.token) as client:
            assert client.put_many([(KEY, DATA)]) == [Stored()]
            node.freeze()
            assert isinstance(client.get_many([KEY], deadline_ms=200)[0], Miss)
            node.thaw()
            assert isinstance(eventually(lambda: client.get_many([KEY])[0], Hit), Hit)


def test_i7_a_late_node_never_writes_over_memory_in_use() -> None:
    """A frozen node that owes a get wakes up: until it has let go, the registered buffer is not used for anything."""
    with node_process() as node:
        with static_client(process_endpoint(node), node.token, transport="shm", breaker=NO_BREAKER) as client:
            assert client.put_many([(KEY, DATA)]) == [Stored()]
            buffer = client.allocate(4096)
            other_key, _ = block(2, 1)
            assert isinstance(client.get_into([KEY], [buffer.view])[0], Hit)
            node.freeze()
            assert isinstance(client.get_into([KEY], [buffer.view], deadline_ms=200)[0], Miss)
            assert buffer.is_in_doubt
            buffer.view[:1000] = bytes(1000)
            assert cause_of(client.put_many([(other_key, buffer[:1000])])[0]).reason == "MEMORY_IN_DOUBT"
            assert cause_of(client.get_into([KEY], [buffer[:1000]])[0]).reason == "MEMORY_IN_DOUBT"
            node.thaw()
            result = eventually(lambda: client.get_into([KEY], [buffer.view])[0], Hit)
            assert isinstance(result, Hit) and result.payload == DATA
            assert not buffer.is_in_doubt
            buffer.view[:1000] = bytes(1000)
            assert client.put_many([(other_key, buffer[:1000])]) == [Stored()]
            [stored] = client.get_many([other_key])
            assert isinstance(stored, Hit) and stored.payload == bytes(1000)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_i10_a_killed_node_is_a_miss(transport: str) -> None:
    with node_process() as node:
        with static_client(process_endpoint(node), node.token, transport=transport) as client:
            assert client.put_many([(KEY, DATA)]) == [Stored()]
            node.kill()
            assert isinstance(cause_of(client.get_many([KEY])[0]), UnavailableError)


def test_i10_a_restarted_node_is_found_without_a_lost_call() -> None:
    """The old session is noticed and replaced: the caller sees a plain miss, not a fault."""
    with static_node() as node:
        client = node_client(node, "tcp")
        assert client.put_many([(KEY, DATA)]) == [Stored()]
        restart_sessions(node.wire_address, client.ping)
        [result] = client.get_many([KEY])
        assert isinstance(result, Hit)
        client.close()


def restart_sessions(address: tuple[str, int], ping: Callable[[], object]) -> None:
    """Break the client's idle connection under it, as a restart of the node does."""
    assert isinstance(ping(), Pong)
    for connection in _connections_to(address):
        connection.shutdown(socket.SHUT_RDWR)
        connection.detach()


def _connections_to(address: tuple[str, int]) -> list[socket.socket]:
    import gc

    return [
        found
        for found in gc.get_objects()
        if isinstance(found, socket.socket) and found.fileno() >= 0 and _peer_of(found) == address
    ]


def _peer_of(connection: socket.socket) -> object:
    try:
        return connection.getpeername()
    except OSError:
        return None


def test_i10_a_full_node_refuses_puts_and_serves_gets() -> None:
    with static_node(dram_bytes=4 * MIB) as node, node_client(node) as client:
        items = blocks(40, MIB // 4)
        results = client.put_many(items)
        assert all(isinstance(result, Stored) for result in results[:8])
        gets = client.get_many([key for key, _ in items])
        assert all(isinstance(get, Hit | Miss) for get in gets)
        assert any(isinstance(get, Hit) for get in gets)
        assert all(get.cause is None for get in gets if isinstance(get, Miss))


def eventually(call: Callable[[], object], wanted: type) -> object:
    """Call until the answer is of the type ``wanted``; every call that does not meet it waits for the node itself."""
    end_s = time.monotonic() + HANG_S
    while True:
        result = call()
        if isinstance(result, wanted) or time.monotonic() > end_s:
            return result
        threading.Event().wait(0.02)


# ---- faults that no healthy node commits -------------------------------------------------------------------------


def truncated_header(session: PeerSession) -> None:
    session.hello()
    session.read()
    session.send_raw(wire.MAGIC)


def truncated_body(session: PeerSession) -> None:
    session.hello()
    request = session.read()
    session.send_raw(wire.HEADER.pack(wire.MAGIC, 1, 0x84, 0, request.header.request_id, 100, 0, 0) + b"x")


def truncated_payload(session: PeerSession) -> None:
    session.hello()
    request = session.read()
    sums = wire.join_sums([wire.checksum(DATA)])
    body = wire.encode_body(wire.GetReply(bytes(1), [len(DATA)], sums))
    session.send_raw(wire.encode_reply(wire.Opcode.GET, request.header.request_id, body, len(DATA)) + DATA[:10])


def garbage(session: PeerSession) -> None:
    session.hello()
    session.read()
    session.send_raw(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def wrong_request_id(session: PeerSession) -> None:
    session.hello()
    request = session.read()
    head = request.header
    session.reply(request._replace(header=wire.Header(head.opcode, head.request_id + 1, 0, 0)), wire.Empty())


def wrong_opcode(session: PeerSession) -> None:
    session.hello()
    request = session.read()
    header = wire.Header(wire.Opcode.PING, request.header.request_id, 0, 0)
    session.reply(request._replace(header=header), wire.Empty())


def malformed_body(session: PeerSession) -> None:
    session.hello()
    session.reply(session.read(), wire.Empty())


def too_few_results(session: PeerSession) -> None:
    session.hello()
    session.reply(session.read(), wire.GetReply(b"", [], b""))


def huge_entry(session: PeerSession) -> None:
    session.hello()
    session.reply(session.read(), wire.GetReply(bytes(1), [2**62], bytes(8)))


def negative_entry(session: PeerSession) -> None:
    session.hello()
    session.reply(session.read(), wire.GetReply(bytes(1), [-1], bytes(8)))


def payload_does_not_add_up(session: PeerSession) -> None:
    session.hello()
    session.reply(session.read(), wire.GetReply(bytes(1), [10], bytes(8)), b"x" * 11)


def closes_at_once(session: PeerSession) -> None:
    pass


def garbage_for_hello(session: PeerSession) -> None:
    session.read()
    session.send_raw(b"220 mail.example.org ESMTP\r\n" * 8)


@pytest.mark.parametrize(
    ("behave", "expected"),
    [
        (truncated_header, UnavailableError),
        (truncated_body, UnavailableError),
        (truncated_payload, UnavailableError),
        (garbage, ProtocolError),
        (wrong_request_id, ProtocolError),
        (wrong_opcode, ProtocolError),
        (malformed_body, ProtocolError),
        (too_few_results, ProtocolError),
        (huge_entry, ProtocolError),
        (negative_entry, ProtocolError),
        (payload_does_not_add_up, ProtocolError),
        (closes_at_once, UnavailableError),
        (garbage_for_hello, ProtocolError),
    ],
)
def test_i10_a_broken_reply_is_a_miss_and_its_session_is_never_used_again(
    behave: Callable[[PeerSession], None], expected: type[SalternError]
) -> None:
    with faulty_peer(behave) as peer, static_client(peer.endpoint, breaker=NO_BREAKER) as client:
        for connections in (1, 2):
            [result] = client.get_many([KEY])
            assert isinstance(cause_of(result), expected)
            assert peer.connections == connections


@pytest.mark.parametrize("where", ["before hello", "after hello", "inside a reply"])
def test_i10_a_silent_peer_costs_one_deadline(where: str) -> None:
    def behave(session: PeerSession) -> None:
        if where != "before hello":
            session.hello()
            request = session.read()
            if where == "inside a reply":
                session.send_raw(wire.HEADER.pack(wire.MAGIC, 1, 0x84, 0, request.header.request_id, 100, 0, 0))
        session.wait_for_end()

    with faulty_peer(behave) as peer, static_client(peer.endpoint, deadline_ms=200) as client:
        [result] = client.get_many([KEY])
        assert isinstance(cause_of(result), DeadlineExceededError)
        assert client.get_many([KEY], deadline_ms=60_000)[0] != Miss()
        assert peer.connections == 1


def test_i10_a_slow_peer_cannot_stretch_the_deadline() -> None:
    """A byte now and then keeps every single wait short; the sum still ends at the deadline."""

    def trickle(session: PeerSession) -> None:
        session.hello()
        request = session.read()
        head = wire.HEADER.pack(wire.MAGIC, 1, 0x84, 0, request.header.request_id, wire.BODY_MAX_BYTES, 0, 0)
        session.send_raw(head)
        while not session.stopping.wait(0.02):
            session.send_raw(b"x")

    with faulty_peer(trickle) as peer, static_client(peer.endpoint, deadline_ms=300) as client:
        assert timed(lambda: client.get_many([KEY])) < HANG_S
        assert peer.connections == 1


def test_i10_a_peer_that_never_reads_cannot_hold_a_put() -> None:
    def behave(session: PeerSession) -> None:
        session.hello(entry_max_bytes=64 * MIB)
        session.stopping.wait()

    with faulty_peer(behave) as peer, static_client(peer.endpoint, deadline_ms=300) as client:
        results = client.put_many([(key, bytes(32 * MIB)) for key, _ in blocks(3, 1)])
        assert all(isinstance(cause_of(result), DeadlineExceededError) for result in results)


def test_i7_wrong_bytes_are_never_a_hit() -> None:
    def behave(session: PeerSession) -> None:
        session.hello()
        good, bad = wire.checksum(DATA), wire.checksum(DATA) ^ 1
        while True:
            request = session.read()
            if request.header.opcode == wire.Opcode.DELETE:
                session.reply(request, wire.DeleteReply(2))
                continue
            reply = wire.GetReply(bytes(3), [len(DATA)] * 3, wire.join_sums([good, bad, good]))
            session.reply(request, reply, DATA * 2 + DATA[:-1] + b"!")

    with faulty_peer(behave) as peer, static_client(peer.endpoint) as client:
        first, second, third = client.get_many([KEY] * 3)
        assert isinstance(first, Hit) and first.payload == DATA
        assert isinstance(cause_of(second), DataLossError) and isinstance(cause_of(third), DataLossError)
        first, second, third = client.get_into([KEY] * 3, [bytearray(1000) for _ in range(3)])
        assert isinstance(first, Hit) and first.payload == DATA
        assert isinstance(cause_of(second), DataLossError) and isinstance(cause_of(third), DataLossError)
        assert peer.connections == 1  # every byte was read: the session is fine


def test_codes_of_entries_become_results() -> None:
    def behave(session: PeerSession) -> None:
        session.hello()
        request = session.read()
        session.reply(request, wire.GetReply(bytes([5, 15, 14]), [0] * 3, bytes(24)))
        request = session.read()
        explained = wire.PutError(2, wire.error_body(UnavailableError("being written", reason="WRITE_IN_PROGRESS")))
        session.reply(request, wire.PutReply(bytes([0, 6, 14, 8, 15]), [explained]))

    with faulty_peer(behave) as peer, static_client(peer.endpoint) as client:
        absent, damaged, busy = client.get_many([KEY] * 3)
        assert absent == Miss()
        assert isinstance(cause_of(damaged), DataLossError)
        assert isinstance(cause_of(busy), UnavailableError)
        stored, already, writing, full, lost = client.put_many([(KEY, DATA)] * 5)
        assert (stored, already) == (Stored(), AlreadyStored())
        assert cause_of(writing).reason == "WRITE_IN_PROGRESS"
        assert cause_of(full).code == 8
        assert isinstance(cause_of(lost), DataLossError)


def test_what_was_answered_before_a_fault_is_kept() -> None:
    """Two frames of a put; the connection breaks after the first reply."""

    def behave(session: PeerSession) -> None:
        session.hello(entry_max_bytes=8 * MIB)
        request = session.read()
        session.read()
        session.reply(request, wire.PutReply(bytes(1)))

    with faulty_peer(behave) as peer, static_client(peer.endpoint, breaker=NO_BREAKER) as client:
        items = [(key, bytes(8 * MIB)) for key, _ in blocks(2, 1)]
        first, second = client.put_many(items)
        assert first == Stored()
        assert isinstance(cause_of(second), UnavailableError)


def test_an_old_session_that_breaks_is_retried_once_on_a_new_one() -> None:
    def behave(session: PeerSession) -> None:
        session.hello()
        session.reply(session.read(), wire.DeleteReply(1))
        session.read()  # and the connection closes

    with faulty_peer(behave) as peer, static_client(peer.endpoint, breaker=NO_BREAKER) as client:
        assert client.delete([KEY]) == Deleted(1)
        assert client.delete([KEY]) == Deleted(1)
        assert peer.connections == 2


def test_a_request_that_the_node_calls_malformed_is_still_a_miss() -> None:
    def behave(session: PeerSession) -> None:
        session.hello()
        session.refuse(session.read(), InvalidArgumentError("no", reason="MALFORMED_BODY"))
        session.reply(session.read(), wire.Empty())

    with faulty_peer(behave) as peer, static_client(peer.endpoint) as client:
        assert cause_of(client.get_many([KEY])[0]).reason == "MALFORMED_BODY"
        assert isinstance(client.ping(), Pong)
        assert peer.connections == 1


# ---- trust -------------------------------------------------------------------------------------------------------


def test_i10_a_refused_token_is_an_error_not_a_miss() -> None:
    with static_node() as node:
        with static_client(NodeEndpoint("node-1", node.wire_endpoint), "not.a.token") as client:
            [get] = client.get_many([KEY])
            [put] = client.put_many([(KEY, DATA)])
    assert isinstance(get, Error) and isinstance(get.error, UnauthenticatedError)
    assert isinstance(put, Error) and isinstance(put.error, UnauthenticatedError)


def test_i10_a_namespace_that_is_gone_is_an_error() -> None:
    with static_node() as node, node_client(node) as client:
        assert client.put_many([(KEY, DATA)]) == [Stored()]
        node.change("acme", namespaces={})
        [result] = client.get_many([KEY])
        assert isinstance(result, Error)
        assert result.error.reason == "NAMESPACE_NOT_AVAILABLE"
        node.check_invariants()
