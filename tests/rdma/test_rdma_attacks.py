"""What a hostile or broken client can do over RDMA: it gets an error, every other session is served, nothing is
published, and the node's books are exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from dataplane.io.rdma import TENANT_LINKS_MAX, Link
from saltern import wire
from saltern.errors import SalternError, StatusCode, UnavailableError
from saltern.names import TenantId
from saltern.rdma import CompletionStatus, Endpoint, Gid, Read, RemoteSpan, Write
from saltern.wire import Opcode
from tests.rdma.attacker import TENANTS, RdmaClient, fabric_holds, rdma_node
from tests.rdma.other_process import OtherProcess
from tests.rdma.sides import shared_device
from tests.support.static_node import MIB, StaticNode, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, block, connect_tcp, key

ENTRY = {key(1): block(1)}
ACME, TINY = TenantId("acme"), TenantId("tiny")
#: Of a transfer that is to be caught on its way: several chains.
LONG_MIB = 12


@pytest.fixture(scope="module")
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def shared_node(other: OtherProcess) -> Iterator[StaticNode]:
    with rdma_node(48 * MIB, {**TENANTS, "tiny": tenant_policy(limit_bytes=MIB)}) as node:
        yield node


@pytest.fixture
def node(shared_node: StaticNode) -> Iterator[StaticNode]:
    """The node with one innocent session; afterwards that one is still served, and books are exact (I2, I8)."""
    with RdmaClient(shared_node, "blue") as innocent:
        assert innocent.put({key(5): block(5)}).codes in (b"\0", b"\6")
        yield shared_node
        assert innocent.get(key(5), 4096) == block(5)
        wait_until(lambda: shared_node.session_count() == 1)
        for books in shared_node.usage().tenants.values():
            assert books.in_flight_bytes == books.held_bytes == 0
        shared_node.check_invariants()
    wait_until(lambda: shared_node.session_count() == 0)
    assert shared_node.call(lambda: fabric_holds(shared_node)) == (0, 0)


def links(node: StaticNode) -> list[Link]:
    """The node's ends of the queue pairs that are open; on its loop."""
    fabric = node._node._state.fabric
    assert fabric is not None
    return list(fabric._links.values())


def refusal(client: RdmaClient) -> SalternError:
    """The error that ends the session, whose connection is closed after it."""
    error = client.wire.error()
    assert client.wire.is_closed()
    return error


#: What a client may claim of its memory, from what it really has: (address, length, key).
LIES: dict[str, Callable[[RdmaClient], tuple[int, int, int]]] = {
    "forged rkey": lambda me: (me.region.address, MIB, me.region.remote_key ^ 0x5A),
    "rkey 0": lambda me: (me.region.address, MIB, 0),
    "before the region": lambda me: (me.region.address - 4096, MIB, me.region.remote_key),
    "after the region": lambda me: (me.region.address + MIB - 4095, 4096, me.region.remote_key),
    "up to 2^64": lambda me: (2**64 - 4096, 4096, me.region.remote_key),
}


@pytest.mark.parametrize("lie", LIES)
def test_i3_a_false_description_ends_its_own_session(node: StaticNode, lie: str) -> None:
    with RdmaClient(node) as attacker:
        attacker.put(ENTRY)
        attacker.register(*LIES[lie](attacker))
        attacker.send_get([key(1)], 4096)
        assert refusal(attacker).reason == "RDMA_REMOTE_ACCESS"
    with RdmaClient(node) as attacker:
        attacker.register(*LIES[lie](attacker))
        attacker.send_put({key(66): block(66)}, offsets=[0])
        assert refusal(attacker).reason == "RDMA_REMOTE_ACCESS"
    with RdmaClient(node) as again:
        assert again.get(key(66), 4096) is None, "nothing was published"
        assert again.get(key(1), 4096) == block(1)


def test_i3_what_wraps_or_leaves_the_region_is_refused_before_the_device_sees_it(node: StaticNode) -> None:
    with RdmaClient(node) as attacker:
        for address, size_bytes, remote_key in ((2**64 - 4096, 4097, 1), (2**64 - 1, 2, 1)):
            with pytest.raises(SalternError) as caught:
                attacker.register(address, size_bytes, remote_key)
            assert caught.value.reason == "REGION_OUT_OF_RANGE"
        for offset in (MIB - 4095, MIB, 2**63, 2**64 - 4096):
            attacker.send_put(ENTRY, offsets=[offset])
            assert attacker.wire.error().reason == "OUT_OF_REGION"
        assert attacker.put(ENTRY).codes in (b"\0", b"\6"), "the session goes on"


def test_i2_anothers_true_descriptor_is_of_no_use(node: StaticNode) -> None:
    with RdmaClient(node) as attacker, RdmaClient(node, "blue") as victim:
        victim.memory[:4096] = b"\x77" * 4096
        attacker.put(ENTRY)
        attacker.register(victim.region.address, MIB, victim.region.remote_key)
        attacker.send_get([key(1)], 4096)
        assert refusal(attacker).reason == "RDMA_REMOTE_ACCESS"
        assert victim.memory[:4096] == b"\x77" * 4096
    with RdmaClient(node) as attacker, RdmaClient(node, "blue") as victim:
        attacker.register(victim.region.address, MIB, victim.region.remote_key)
        attacker.send_put({key(66): b"\x77" * 4096}, offsets=[0])
        assert refusal(attacker).reason == "RDMA_REMOTE_ACCESS"


def test_i2_the_node_speaks_to_a_queue_pair_for_one_session_only(node: StaticNode) -> None:
    with RdmaClient(node, "blue") as victim, RdmaClient(node) as other:
        with pytest.raises(SalternError) as caught:
            other.connect(other.pair.endpoint)
        assert caught.value.reason == "ALREADY_CONNECTED"
        with connect_tcp(node) as attacker:
            attacker.hello(node.token("acme", "chat"))
            attacker.send(Opcode.CONNECT, wire.Connect(victim.pair.endpoint.pack()))
            assert attacker.error().reason == "RDMA_ENDPOINT_IN_USE"
            attacker.send(Opcode.CONNECT, wire.Connect(b"\0" * 28))
            assert attacker.error().reason == "RDMA_ENDPOINT_INVALID"
            attacker.send(Opcode.REGISTER, wire.Register(0, 4096, 4096, 1))
            assert attacker.error().reason == "REGION_NOT_CONNECTED"
            assert attacker.get(key(1)) in ({}, ENTRY), "the session goes on, inline"


@pytest.mark.parametrize("what", ["read", "write"])
def test_i3_the_arena_cannot_be_reached_by_whoever_knows_all_about_it(node: StaticNode, what: str) -> None:
    arena = node.call(lambda: node._node._state.fabric._arena)  # type: ignore[union-attr]
    told = [(arena.address, remote_key) for remote_key in {arena.remote_key, arena.local_key, 0}]
    guessed = [(arena.address & ~0xFFFFFF, arena.remote_key ^ 1), (0, arena.remote_key + 0x100)]
    for address, remote_key in told + guessed:
        with RdmaClient(node) as attacker:
            attacker.put(ENTRY)
            attacker.memory[:4096] = b"\x66" * 4096
            mine, there = (attacker.region.local(0, 4096),), RemoteSpan(address, 4096, remote_key)
            for chain in attacker.pair.plan([Read(mine, there) if what == "read" else Write(mine, there)]):
                attacker.pair.post(chain, "attack")
            ended = attacker.collect()
            while ended.token != "attack":
                ended = attacker.collect()
            assert ended.status in (CompletionStatus.REMOTE_INVALID_REQUEST, CompletionStatus.REMOTE_ACCESS)
            assert attacker.memory[:4096] == b"\x66" * 4096
            # The attacker's own session is over: the node's queue pair has failed as well.
            attacker.send_get([key(1)], 4096)
            refusal(attacker)
    with RdmaClient(node) as again:
        assert again.get(key(1), 4096) == block(1), "no byte of the arena has changed"


def test_a_bad_request_in_the_middle_of_a_chain_publishes_nothing_of_it(node: StaticNode) -> None:
    with RdmaClient(node) as attacker:
        # The region is described as longer than it is: the second of three entries lies behind its end.
        attacker.register(attacker.region.address, 2 * MIB, attacker.region.remote_key)
        entries = {key(70 + at): block(70 + at) for at in range(3)}
        attacker.send_put(entries, offsets=[0, MIB + 4096, 8192])
        assert refusal(attacker).reason == "RDMA_REMOTE_ACCESS"
    with RdmaClient(node) as again:
        assert all(again.get(name, 4096) is None for name in entries)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue pairs that the node connects from now on give a silent peer up after half a second, not after two."""
    monkeypatch.setattr("dataplane.io.rdma._ACK_TIMEOUT", 14)


def test_i7_a_vanished_queue_pair_keeps_the_extent_until_the_node_has_given_up_on_it(
    node: StaticNode, request: pytest.FixtureRequest
) -> None:
    """A completion that comes late: while the device retries, the extent is charged and nobody gets it, not even the
    tenant itself, which has room for no other; once the queue pair is gone it is given out again."""
    with RdmaClient(node, "tiny") as other:
        request.getfixturevalue("impatient")
        with RdmaClient(node, "tiny") as attacker:
            attacker.pair.close()
            attacker.send_put({key(81): block(81, MIB)})
            wait_until(lambda: node.usage().tenants[TINY].in_flight_bytes == MIB)
            (link,) = node.call(lambda: [link for link in links(node) if not link.is_quiet])
            other.send_put({key(82): block(82, MIB)})
            with suppress(EOFError):  # where the request's own deadline comes before the device gives up
                assert refusal(attacker).reason == "RDMA_PEER_SILENT"
        assert other.wire.answer(wire.PutReply)[0].codes == b"\0"
        assert link.is_quiet and link._queue_pair.is_closed
        assert other.get(key(82), MIB) == block(82, MIB)
        assert other.get(key(81), MIB) is None


def test_i7_a_client_that_leaves_in_the_middle_takes_its_queue_pair_along(node: StaticNode, impatient: None) -> None:
    """The connection ends while a chain is under way: the queue pair goes first, then the extent is free again."""
    with RdmaClient(node) as attacker:
        attacker.pair.close()
        attacker.send_put({key(83): block(83)})
        wait_until(lambda: node.usage().tenants[ACME].in_flight_bytes == 4096)
    wait_until(lambda: node.usage().tenants[ACME].in_flight_bytes == 0)


def test_i5_a_completion_queue_that_fails_keeps_nothing_busy_and_ends_its_own_session(
    node: StaticNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise UnavailableError("its device is gone", reason="RDMA_NO_DEVICE", hint="put it back")

    with RdmaClient(node) as failing, RdmaClient(node) as other:
        (link,) = node.call(lambda: [each for each in links(node) if each.peer == failing.pair.endpoint])
        monkeypatch.setattr(link._completions, "collect", fail)
        node.call(link._on_completions)
        assert not node.call(lambda: asyncio.get_running_loop().remove_reader(link._completions.fileno()))
        failing.send_put({key(84): block(84)})
        assert refusal(failing).reason == "RDMA_NO_DEVICE"
        assert other.put(ENTRY).codes in (b"\0", b"\6")


def test_a_get_without_a_receive_posted_is_given_up_on(node: StaticNode) -> None:
    with RdmaClient(node) as attacker:
        attacker.put(ENTRY)
        for _ in range(4):  # uses up what is posted
            attacker.send_get([key(1)], 4096)
            attacker.wire.answer(wire.GetReply)
        attacker.send_get([key(1)], 4096)
        assert refusal(attacker).reason in ("RDMA_RECEIVER_NOT_READY", "RDMA_PEER_SILENT")


@pytest.mark.parametrize("end", ["destroyed", "failed"])
@pytest.mark.parametrize("operation", ["put", "get"])
def test_i7_a_queue_pair_that_ends_in_the_middle_of_a_transfer(
    node: StaticNode, impatient: None, operation: str, end: str
) -> None:
    """The device is halfway through the bytes: the node's queue pair goes, then its memory is free again. Entries of
    earlier chains, which are whole, stay."""
    entries = {key(90 + at): block(90 + at, MIB) for at in range(LONG_MIB)}
    # The device may be done before its queue pair is ended: that was no attack, and it is tried again.
    assert any(_interrupted(node, operation, end, entries) for _ in range(10))
    with RdmaClient(node) as again:
        found = [again.get(name, MIB) for name in entries]
        assert all(got in (None, value) for got, value in zip(found, entries.values(), strict=True))
        assert operation == "get" or found[-1] is None, "what was under way is not published"


def _interrupted(node: StaticNode, operation: str, end: str, entries: dict[bytes, bytes]) -> bool:
    """Begin a transfer and end its queue pair; whether that came before the transfer's own end."""
    with RdmaClient(node, size_bytes=LONG_MIB * MIB) as attacker:
        if operation == "get":
            assert set(attacker.put(entries).codes) <= {0, StatusCode.ALREADY_EXISTS}
            attacker.send_get(list(entries), MIB)
        else:
            attacker.wire.send(Opcode.DELETE, wire.Delete(b"".join(entries)))
            attacker.wire.answer(wire.DeleteReply)
            attacker.send_put(entries)
        wait_until(lambda: node.call(lambda: any(not link.is_quiet for link in links(node))))
        attacker.pair.close() if end == "destroyed" else attacker.pair.fail()
        try:
            header, body, _ = attacker.wire.receive()
        except EOFError:
            return True
        if not header.status:
            return False
        error = wire.error_from_body(wire.decode_body(wire.ErrorBody, body), header.status)
        assert error.reason in ("RDMA_PEER_SILENT", "RDMA_REMOTE_ACCESS", "RDMA_QUEUE_PAIR_ENDED")
        return attacker.wire.is_closed()


@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_descriptor_that_was_closed_is_of_no_use_later(node: StaticNode, operation: str) -> None:
    """Neither in the session that made it nor in the next one; the memory that it named is somebody else's by now."""
    with RdmaClient(node) as attacker:
        attacker.put(ENTRY)
        attacker.region.close()
        _use(attacker, operation)
        assert refusal(attacker).reason == "RDMA_REMOTE_ACCESS"
    old = attacker.region
    with RdmaClient(node) as attacker:
        attacker.register(old.address, MIB, old.remote_key)
        _use(attacker, operation)
        assert refusal(attacker).reason == "RDMA_REMOTE_ACCESS"
    with RdmaClient(node) as again:
        assert again.get(key(66), 4096) is None


def _use(attacker: RdmaClient, operation: str) -> None:
    if operation == "get":
        attacker.send_get([key(1)], 4096)
    else:
        attacker.send_put({key(66): block(66)}, offsets=[0])


def test_a_client_that_is_killed_in_the_middle_of_transfers_leaves_nothing(
    other: OtherProcess, node: StaticNode
) -> None:
    other.begin("endless", node)
    assert other.answer() == "rdma"
    wait_until(lambda: node.usage().tenants[ACME].in_flight_bytes > 0)
    other.process.kill()
    wait_until(lambda: node.session_count() == 1)


def test_a_flood_of_sessions_is_bounded_and_the_rest_is_served_over_tcp(
    node: StaticNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant takes all that it may have, with queue pairs that nobody is behind: others do not feel it."""
    with ExitStack() as stack:
        gid, token = shared_device().gid, node.token("acme", "chat")

        def connect(number: int) -> WireClient:
            flooding = stack.enter_context(connect_tcp(node))
            flooding.hello(token)
            pretended = Endpoint(qpn=0x800000 + number, gid=gid, psn=1, mtu_bytes=1024)
            flooding.send(Opcode.CONNECT, wire.Connect(pretended.pack()))
            return flooding

        for number in range(TENANT_LINKS_MAX):
            connect(number).answer(wire.ConnectReply)
        refused = connect(TENANT_LINKS_MAX)
        assert refused.error().reason == "RDMA_SESSIONS_FULL"
        refused.put({key(1): block(1)})
        assert refused.get(key(1)) == {key(1): block(1)}, "the session goes on over TCP"
        with RdmaClient(node, "blue") as neighbour:
            assert neighbour.put(ENTRY).codes in (b"\0", b"\6")
        monkeypatch.setattr("dataplane.io.rdma.LINKS_MAX", TENANT_LINKS_MAX + 1)  # the innocent session is one
        with pytest.raises(SalternError) as caught:
            RdmaClient(node, "blue")
        assert caught.value.reason == "RDMA_SESSIONS_FULL"


def test_i2_addresses_that_nobody_has_are_tried_once_in_a_while(
    node: StaticNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for the way to one can make the node stand still: a tenant cannot have it look again and again."""
    fabric = node.call(lambda: node._node._state.fabric)
    assert fabric is not None
    monkeypatch.setattr(fabric, "_held_until_s", {})
    nowhere = Endpoint(qpn=17, gid=Gid.parse("2001:db8::1"), psn=1, mtu_bytes=1024)
    reasons = []
    for _ in range(2):
        with connect_tcp(node) as attacker:
            attacker.hello(node.token("acme", "chat"))
            attacker.send(Opcode.CONNECT, wire.Connect(nowhere.pack()))
            reasons.append(attacker.error().reason)
    assert reasons == ["RDMA_GID_MISMATCH", "RDMA_CONNECT_HELD"]
    with RdmaClient(node, "blue") as other:
        assert other.put(ENTRY).codes in (b"\0", b"\6")
    fabric._held_until_s.clear()
