"""Sessions at the wire doors: identity (I1), walls between tenants (I2), limits (I4, I6), deletion (I12)."""

from __future__ import annotations

import contextlib
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.settings import SessionLimits
from saltern import wire
from saltern.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from saltern.wire import Opcode
from tenants.policy import TenantState
from tenants.roles import Role
from tenants.tokens import Audience, KeySet
from tests.support.bad_tokens import bad_tokens, leaked
from tests.support.static_node import ISSUER, KID, MIB, StaticNode, static_node, tenant_policy
from tests.support.wire_client import WireClient, block, connect_tcp, key


def test_a_put_is_readable_once_acknowledged_and_unreadable_once_deleted(client: WireClient) -> None:
    entries = {key(n): block(n, 1000 * n) for n in range(1, 6)}
    assert client.put(entries).codes == bytes(5)
    assert client.get(*entries) == entries
    assert client.lookup(key(1), key(2), key(77), key(3)) == wire.LookupReply(2, b"\x01\x01\x00\x01")
    assert client.delete(key(1), key(77)) == 1
    assert client.lookup(key(1)) == wire.LookupReply(0, b"\x00")
    assert client.get(key(1), key(2)) == {key(2): block(2, 2000)}


def test_large_entries_come_back_whole(client: WireClient) -> None:
    entries = {key(n): block(n, 3 * MIB + n) for n in range(4)}
    assert client.put(entries).codes == bytes(4)
    assert client.get(*entries) == entries


def test_a_batch_with_a_body_larger_than_the_receive_buffer(client: WireClient) -> None:
    entries = {key(n): n.to_bytes(2, "little") for n in range(3500)}
    reply = client.put(entries)
    assert reply.codes == bytes(3500)
    assert client.get(*entries) == entries
    assert client.lookup(*entries).prefix == 3500


def test_a_block_is_immutable(client: WireClient) -> None:
    client.put({key(1): block(1)})
    assert client.put({key(1): block(2)}).codes == bytes([6])
    assert client.get(key(1)) == {key(1): block(1)}


def test_a_get_says_when_there_is_no_room(client: WireClient) -> None:
    client.put({key(1): block(1), key(2): block(2, 100)})
    client.send(Opcode.GET, wire.Get(key(1) + key(2) + key(3), [4095, 100, 1]))
    reply, payload = client.answer(wire.GetReply)
    assert reply.codes == bytes([9, 0, 5])
    assert reply.sizes == [0, 100, 0]
    assert payload == block(2, 100)


def test_pipelined_requests_are_answered_in_order(client: WireClient) -> None:
    for number in range(200):
        client.send(Opcode.LOOKUP, wire.Lookup(key(number)), request_id=number)
    assert [client.receive()[0].request_id for _ in range(200)] == list(range(200))


def test_i7_a_wrong_sum_stores_nothing(client: WireClient) -> None:
    reply = client.put({key(1): block(1), key(2): block(2)}, sums=wire.join_sums([7, wire.checksum(block(2))]))
    assert reply.codes == bytes([15, 0])
    assert reply.errors[0].error.reason == "CHECKSUM_MISMATCH"
    assert client.get(key(1), key(2)) == {key(2): block(2)}


# ---- identity


def test_i1_no_bad_token_opens_a_session(node: StaticNode, capfd: pytest.CaptureFixture[str]) -> None:
    now_s = int(time.time())
    other_key = Ed25519PrivateKey.generate()
    table = bad_tokens(node.signing_key, other_key, KID, issuer=ISSUER, audience=Audience.NODE, now_s=now_s)
    assert len(table) >= 100
    for name, token, expected_reason in table:
        with connect_tcp(node) as client:
            client.send(Opcode.HELLO, wire.Hello(token, "chat", 1))
            error = client.error()
            assert isinstance(error, UnauthenticatedError), name
            assert error.reason == expected_reason, name
            assert leaked(table, repr(vars(error))) == [], name
            assert client.is_closed()
    assert leaked(table, "".join(capfd.readouterr())) == []


def test_i1_i2_a_foreign_and_an_absent_namespace_get_the_same_answer(node: StaticNode) -> None:
    """acme has ``code``, and blue has not: a token for chat opens it to neither."""
    answers = set()
    for tenant in ("acme", "blue"):
        for namespace in ("code", "absent"):
            with connect_tcp(node) as client:
                client.send(Opcode.HELLO, wire.Hello(node.token(tenant, "chat"), namespace, 1))
                error = client.error()
                assert isinstance(error, PermissionDeniedError)
                answers.add((error.reason, error.message.replace(namespace, "X")))
                assert client.is_closed()
    assert [reason for reason, _ in answers] == ["NAMESPACE_NOT_AVAILABLE"]


def test_i10_an_epoch_that_is_not_readable_is_refused(stranger: WireClient, node: StaticNode) -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        stranger.hello(node.token("acme", "chat"), epoch=2)
    assert caught.value.reason == "EPOCH_NOT_AVAILABLE"


def test_i2_two_tenants_with_one_key_hold_two_entries(node: StaticNode) -> None:
    with connect_tcp(node) as acme, connect_tcp(node) as blue, connect_tcp(node) as code:
        acme.hello(node.token("acme", "chat"))
        blue.hello(node.token("blue", "chat"))
        code.hello(node.token("acme", "code"), "code")
        acme.put({key(1): block(1)})
        for other in (blue, code):
            assert other.get(key(1)) == {}
            assert other.lookup(key(1)).found == b"\x00"
            assert other.delete(key(1)) == 0
        assert blue.put({key(1): block(2)}).codes == bytes([0])
        assert acme.get(key(1)) == {key(1): block(1)}
        assert blue.get(key(1)) == {key(1): block(2)}


def test_a_reader_reads_but_does_not_write(node: StaticNode) -> None:
    with connect_tcp(node) as writer, connect_tcp(node) as reader:
        writer.hello(node.token("acme", "chat"))
        writer.put({key(1): block(1)})
        reader.hello(node.token("acme", "chat", Role.READER))
        for attempt in (lambda: reader.put({key(2): block(2)}), lambda: reader.delete(key(1))):
            with pytest.raises(PermissionDeniedError) as caught:
                attempt()
            assert caught.value.reason == "ROLE_REQUIRED"
        assert reader.get(key(1)) == {key(1): block(1)}  # the payload of the refused put was thrown away


def test_an_auditor_reads_no_entry(client: WireClient, node: StaticNode) -> None:
    with connect_tcp(node) as auditor:
        auditor.hello(node.token("acme", "chat", Role.TENANT_AUDITOR))
        with pytest.raises(PermissionDeniedError):
            auditor.lookup(key(1))


# ---- policy changes on open sessions


def test_i1_a_token_expires_on_an_open_session_until_it_is_refreshed(node: StaticNode) -> None:
    with connect_tcp(node) as client:
        now_s = int(time.time())
        client.hello(node.token("acme", "chat", issued_at_s=now_s - 600, expires_at_s=now_s + 1))
        deadline_s = time.monotonic() + 10
        with pytest.raises(UnauthenticatedError) as caught:
            while time.monotonic() < deadline_s:
                client.ping()
        assert caught.value.reason == "TOKEN_EXPIRED"
        client.send(Opcode.REFRESH, wire.Refresh(node.token("acme", "chat")))
        assert client.answer(wire.RefreshReply)[0].expires_ms > (now_s + 500) * 1000
        client.ping()


def test_i2_refresh_does_not_change_tenant_or_namespace(client: WireClient, node: StaticNode) -> None:
    client.put({key(1): block(1)})
    for token in (node.token("blue", "chat"), node.token("acme", "code")):
        client.send(Opcode.REFRESH, wire.Refresh(token))
        assert client.error().reason == "NAMESPACE_NOT_AVAILABLE"
    assert client.get(key(1)) == {key(1): block(1)}


def test_i1_a_suspended_tenant_is_refused_until_it_is_resumed(client: WireClient, node: StaticNode) -> None:
    client.put({key(1): block(1)})
    node.change("acme", state=TenantState.SUSPENDED)
    with pytest.raises(PermissionDeniedError) as caught:
        client.get(key(1))
    assert caught.value.reason == "TENANT_SUSPENDED"
    node.change("acme", state=TenantState.ACTIVE)
    client.ping()


def test_i1_tokens_cut_off_by_issue_time_are_refused(client: WireClient, node: StaticNode) -> None:
    node.change("acme", min_issue_time_s=int(time.time()) + 5)
    with pytest.raises(UnauthenticatedError) as caught:
        client.ping()
    assert caught.value.reason == "TOKEN_REVOKED"


def test_i1_a_withdrawn_signing_key_ends_open_sessions(client: WireClient, node: StaticNode) -> None:
    own_keys = node.key_set
    try:
        node.apply(node.tenants, key_set=KeySet(ISSUER, {"another": Ed25519PrivateKey.generate().public_key()}))
        with pytest.raises(UnauthenticatedError) as caught:
            client.ping()
        assert caught.value.reason == "TOKEN_UNKNOWN_KEY"
    finally:
        node.apply(node.tenants, key_set=own_keys)


def test_i12_a_deleted_tenant_is_gone_from_open_sessions(client: WireClient, node: StaticNode) -> None:
    client.put({key(1): block(1)})
    node.apply({"blue": node.tenants["blue"]})  # type: ignore[index]
    with pytest.raises(PermissionDeniedError) as caught:
        client.get(key(1))
    assert caught.value.reason == "NAMESPACE_NOT_AVAILABLE"
    assert "acme" not in node.usage().tenants


def test_i12_a_namespace_made_again_under_its_name_is_another_one(client: WireClient, node: StaticNode) -> None:
    client.put({key(1): block(1)})
    again = tenant_policy(limit_bytes=16 * MIB, uid="uid-2")
    node.apply({**node.tenants, "acme": again})
    with pytest.raises(PermissionDeniedError):
        client.get(key(1))
    with connect_tcp(node) as fresh:
        fresh.hello(node.token("acme", "chat"))
        assert fresh.get(key(1)) == {}


def test_i12_a_put_that_began_before_its_namespace_was_deleted_is_not_stored(
    client: WireClient, node: StaticNode
) -> None:
    data = block(1, MIB)
    put = wire.encode_body(wire.Put(key(1), [MIB], wire.join_sums([wire.checksum(data)])))
    client.sock.sendall(wire.encode_request(Opcode.PUT, 1, put, MIB) + data[: MIB // 2])
    wait_for_in_flight(node, "acme", MIB)
    node.apply({"blue": node.tenants["blue"]})  # type: ignore[index]
    client.sock.sendall(data[MIB // 2 :])
    reply, _ = client.answer(wire.PutReply)
    assert reply.codes == bytes([7])


# ---- limits


def test_i4_i6_the_limit_is_never_passed_and_refusals_carry_the_books(node: StaticNode) -> None:
    with connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        for number in range(24):
            reply = client.put({key(number): block(number, MIB)})
            used_bytes = node.usage().tenants["acme"].used_bytes  # type: ignore[index]
            assert used_bytes <= 16 * MIB
            if reply.codes[0] == 0:
                assert client.get(key(number)) == {key(number): block(number, MIB)}  # I6: acknowledged is readable
        big = client.put({key(100): block(100, 9 * MIB), key(101): block(101)})
        assert big.codes == bytes([8, 0])
        error = big.errors[0].error
        assert error.reason == "ENTRY_TOO_LARGE"
        assert error.metadata["tenant"] == "acme"
        assert error.metadata["limit_bytes"] == str(16 * MIB)


def test_i4_i6_limits_hold_with_unfinished_puts_of_many_sessions() -> None:
    """The core's own limits, with no bound on transfers before them."""
    size = 3 * MIB
    unbounded = SessionLimits(tenant_in_flight_share=8.0, in_flight_share=8.0)
    tenants = {"acme": tenant_policy(limit_bytes=16 * MIB)}
    with static_node(tenants, limits=unbounded) as node, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect_tcp(node)) for _ in range(8)]
        for number, client in enumerate(clients):
            client.hello(node.token("acme", "chat"))
            data = block(number, size)
            put = wire.Put(key(number), [size], wire.join_sums([wire.checksum(data)]))
            frame = wire.encode_request(Opcode.PUT, 1, wire.encode_body(put), size)
            client.sock.sendall(frame + data[:1000])
        wait_for_in_flight(node, "acme", 5 * size)
        assert node.usage().tenants["acme"].used_bytes <= 16 * MIB  # type: ignore[index]
        codes = []
        for number, client in enumerate(clients):
            client.sock.sendall(block(number, size)[1000:])
            reply, _ = client.answer(wire.PutReply)
            codes.append(reply.codes[0])
            if reply.codes[0]:
                assert reply.errors[0].error.reason == "QUOTA_EXCEEDED"
        assert codes.count(0) == 5 and codes.count(8) == 3
        node.check_invariants()


def test_i10_without_a_policy_every_session_is_refused() -> None:
    with static_node(apply_policy=False, dram_bytes=MIB) as node, connect_tcp(node) as client:
        with pytest.raises(UnavailableError) as caught:
            client.hello(node.token("acme", "chat"))
        assert caught.value.reason == "NO_POLICY"
        assert client.is_closed()


def wait_for_in_flight(node: StaticNode, tenant: str, in_flight_bytes: int) -> None:
    deadline_s = time.monotonic() + 10
    while (seen := node.usage().tenants[tenant].in_flight_bytes) != in_flight_bytes:  # type: ignore[index]
        assert time.monotonic() < deadline_s, seen
        time.sleep(0.005)
