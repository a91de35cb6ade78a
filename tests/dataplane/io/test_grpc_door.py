"""CacheService: the same walls and limits behind the other door."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.io.grpc_door import TENANT_CALLS_MAX
from saltern.cache.v1 import cache_pb2, cache_pb2_grpc
from saltern.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SalternError,
    UnauthenticatedError,
    UnavailableError,
)
from saltern.rpc_errors import error_from_rpc
from tenants.roles import Role
from tenants.tokens import Audience
from tests.support.bad_tokens import bad_tokens, leaked
from tests.support.static_node import ISSUER, KID, MIB, StaticNode, static_node
from tests.support.waiting import wait_until
from tests.support.wire_client import block, connect_tcp, key


class GrpcClient:
    """CacheService as one tenant sees it; failures come as errors of the tree."""

    def __init__(self, channel: grpc.Channel, *metadata: tuple[str, str]) -> None:
        self._stub = cache_pb2_grpc.CacheServiceStub(channel)
        self._metadata = metadata

    def call(self, method: str, request: object) -> object:
        try:
            return getattr(self._stub, method)(request, metadata=self._metadata, timeout=20)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def put(self, entries: dict[bytes, bytes], namespace: str = "chat", epoch: int = 1) -> cache_pb2.PutBlocksResponse:
        blocks = [cache_pb2.Block(key=name, payload=value) for name, value in entries.items()]
        request = cache_pb2.PutBlocksRequest(namespace_id=namespace, epoch=epoch, blocks=blocks)
        response = self.call("PutBlocks", request)
        assert isinstance(response, cache_pb2.PutBlocksResponse)
        return response

    def get(self, *keys: bytes, namespace: str = "chat") -> dict[bytes, bytes]:
        request = cache_pb2.GetBlocksRequest(namespace_id=namespace, epoch=1, keys=keys)
        response = self.call("GetBlocks", request)
        assert isinstance(response, cache_pb2.GetBlocksResponse)
        return {found.key: found.payload for found in response.blocks}


@pytest.fixture
def channel(node: StaticNode) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(node.grpc_endpoint, options=[("grpc.max_receive_message_length", -1)]) as opened:
        yield opened


def as_tenant(channel: grpc.Channel, node: StaticNode, tenant: str, role: Role = Role.WRITER) -> GrpcClient:
    return GrpcClient(channel, ("authorization", f"Bearer {node.token(tenant, 'chat', role)}"))


def test_put_get_lookup_delete_and_the_wire_door_sees_the_same(channel: grpc.Channel, node: StaticNode) -> None:
    acme = as_tenant(channel, node, "acme")
    entries = {key(n): block(n, MIB + n) for n in range(6)}
    assert [status.code for status in acme.put(entries).statuses] == [0] * 6
    assert acme.get(*entries, key(77)) == entries
    assert acme.put({key(1): b"other"}).statuses[0].code == 6
    request = cache_pb2.LookupBlocksRequest(namespace_id="chat", epoch=1, keys=[key(0), key(77), key(1)])
    found = acme.call("LookupBlocks", request)
    assert isinstance(found, cache_pb2.LookupBlocksResponse)
    assert (found.prefix_blocks, list(found.found)) == (1, [True, False, True])
    with connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        assert client.get(key(2)) == {key(2): entries[key(2)]}
    request_delete = cache_pb2.DeleteBlocksRequest(namespace_id="chat", epoch=1, keys=[key(0), key(77)])
    deleted = acme.call("DeleteBlocks", request_delete)
    assert isinstance(deleted, cache_pb2.DeleteBlocksResponse)
    assert deleted.deleted_blocks == 1


def test_i1_no_bad_token_is_let_in(channel: grpc.Channel, node: StaticNode, capfd: pytest.CaptureFixture[str]) -> None:
    now_s = int(time.time())
    other_key = Ed25519PrivateKey.generate()
    table = bad_tokens(node.signing_key, other_key, KID, issuer=ISSUER, audience=Audience.NODE, now_s=now_s)
    for name, token, expected_reason in table:
        with pytest.raises(UnauthenticatedError) as caught:
            GrpcClient(channel, ("authorization", f"Bearer {token}")).get(key(1))
        assert caught.value.reason == expected_reason, name
        assert leaked(table, repr(vars(caught.value))) == [], name
    assert leaked(table, "".join(capfd.readouterr())) == []


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "TOKEN_MISSING"),
        ((("authorization", "Basic YTpi"),), "TOKEN_MALFORMED"),
        ((("authorization", "Bearer "),), "TOKEN_MALFORMED"),
    ],
)
def test_i1_a_call_without_one_bearer_token_is_refused(
    channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], reason: str
) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        GrpcClient(channel, *metadata).put({key(1): bytes(MIB)})
    assert caught.value.reason == reason


def test_i1_two_tokens_are_no_token(channel: grpc.Channel, node: StaticNode) -> None:
    tokens = [("authorization", f"Bearer {node.token(tenant, 'chat')}") for tenant in ("acme", "blue")]
    with pytest.raises(UnauthenticatedError):
        GrpcClient(channel, *tokens).get(key(1))


def test_i2_no_entry_crosses_from_tenant_to_tenant(channel: grpc.Channel, node: StaticNode) -> None:
    acme, blue = as_tenant(channel, node, "acme"), as_tenant(channel, node, "blue")
    acme.put({key(1): block(1)})
    assert blue.get(key(1)) == {}
    for namespace in ("code", "absent", "chat/../code", "\x00", ""):
        with pytest.raises(PermissionDeniedError) as caught:
            blue.get(key(1), namespace=namespace)
        assert caught.value.reason == "NAMESPACE_NOT_AVAILABLE"


def test_a_reader_does_not_write(channel: grpc.Channel, node: StaticNode) -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        as_tenant(channel, node, "acme", Role.READER).put({key(1): block(1)})
    assert caught.value.reason == "ROLE_REQUIRED"


def test_i4_i6_what_a_limit_refuses_is_explained(channel: grpc.Channel, node: StaticNode) -> None:
    acme = as_tenant(channel, node, "acme")
    refused = acme.put({key(1): bytes(9 * MIB), key(2): block(2)}).statuses
    assert [status.code for status in refused] == [8, 0]
    assert refused[0].reason == "ENTRY_TOO_LARGE"
    assert refused[0].metadata["tenant"] == "acme"
    for number in range(4):
        acme.put({key(100 + number * 8 + n): block(n, MIB) for n in range(8)})
        assert node.usage().tenants["acme"].used_bytes <= 16 * MIB  # type: ignore[index]


@pytest.mark.parametrize(
    ("request_", "method"),
    [
        (cache_pb2.GetBlocksRequest(namespace_id="chat", epoch=1, keys=[b"short"]), "GetBlocks"),
        (cache_pb2.GetBlocksRequest(namespace_id="chat", epoch=1, keys=[bytes(32)] * 4097), "GetBlocks"),
        (cache_pb2.LookupBlocksRequest(namespace_id="chat", epoch=1, keys=[bytes(32)] * 4097), "LookupBlocks"),
        (cache_pb2.DeleteBlocksRequest(namespace_id="chat", epoch=1, keys=[bytes(33)]), "DeleteBlocks"),
        (
            cache_pb2.PutBlocksRequest(namespace_id="chat", epoch=1, blocks=[cache_pb2.Block(key=bytes(32))]),
            "PutBlocks",
        ),
        (
            cache_pb2.PutBlocksRequest(
                namespace_id="chat", epoch=1, blocks=[cache_pb2.Block(key=bytes(32), payload=b"x")] * 1025
            ),
            "PutBlocks",
        ),
    ],
)
def test_malformed_requests_are_refused(channel: grpc.Channel, node: StaticNode, request_: object, method: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        as_tenant(channel, node, "acme").call(method, request_)
    assert caught.value.hint


def test_bytes_that_are_no_message_are_refused(channel: grpc.Channel, node: StaticNode) -> None:
    method = channel.unary_unary("/saltern.cache.v1.CacheService/GetBlocks")
    metadata = (("authorization", f"Bearer {node.token('acme', 'chat')}"),)
    with pytest.raises(grpc.RpcError) as caught:
        method(b"\xff\xff\xff\xff", metadata=metadata, timeout=20)
    assert isinstance(error_from_rpc(caught.value), SalternError)
    assert as_tenant(channel, node, "acme").get(key(1)) == {}


def test_i10_without_a_policy_every_call_is_refused() -> None:
    with static_node(apply_policy=False, dram_bytes=MIB) as node, grpc.insecure_channel(node.grpc_endpoint) as channel:
        with pytest.raises(UnavailableError) as caught:
            as_tenant(channel, node, "acme").get(key(1))
        assert caught.value.reason == "NO_POLICY"


def test_i2_calls_that_never_end_hold_up_their_own_tenant_only(node: StaticNode) -> None:
    """A tenant opens calls and sends nothing more: others get their answers, and so does it once they are gone."""
    metadata = (("authorization", f"Bearer {node.token('acme', 'chat')}"),)
    ended = threading.Event()

    def nothing() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    with grpc.insecure_channel(node.grpc_endpoint) as channel:
        method = channel.stream_unary("/saltern.cache.v1.CacheService/GetBlocks")
        calls = [method.future(nothing(), metadata=metadata, timeout=60) for _ in range(64)]
        try:
            wait_until(lambda: sum(call.done() for call in calls) == 64 - TENANT_CALLS_MAX)
            assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            with own_connection(node) as other:
                assert as_tenant(other, node, "blue").get(key(1)) == {}
                with pytest.raises(ResourceExhaustedError) as caught:
                    as_tenant(other, node, "acme").get(key(1))
                assert caught.value.reason == "TOO_MANY_CALLS"
        finally:
            for call in calls:
                call.cancel()
            ended.set()

    def is_free() -> bool:
        with own_connection(node) as after, contextlib.suppress(ResourceExhaustedError):
            return as_tenant(after, node, "acme").get(key(1)) == {}
        return False

    wait_until(is_free)


def own_connection(node: StaticNode) -> grpc.Channel:
    return grpc.insecure_channel(node.grpc_endpoint, options=[("grpc.use_local_subchannel_pool", 1)])


@pytest.mark.parametrize("element", [b"\x1a\x00", b"\x0b\x0c"])
def test_i2_many_elements_are_refused_before_they_are_parsed(
    channel: grpc.Channel, node: StaticNode, element: bytes
) -> None:
    """Two bytes of an empty element would become fifty in memory, and their parsing would stop every session."""
    metadata = (("authorization", f"Bearer {node.token('acme', 'chat')}"),)
    method = channel.unary_unary("/saltern.cache.v1.CacheService/PutBlocks")
    with pytest.raises(grpc.RpcError) as caught:
        method(element * (16 * MIB), metadata=metadata, timeout=20)
    error = error_from_rpc(caught.value)
    assert (type(error), error.reason) == (ResourceExhaustedError, "MESSAGE_TOO_LARGE")
    assert "elements" in error.message
