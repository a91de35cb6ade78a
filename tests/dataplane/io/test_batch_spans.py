"""Spans of batches: none unless asked for, then what they say, and no secret among it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import structlog.testing
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dataplane.io.batch_spans import BatchSpans, TracedConversation, spans_of
from dataplane.io.conversation import Conversation
from saltern import tracing, wire
from saltern.cache.v1 import cache_pb2, cache_pb2_grpc
from saltern.client import Client
from saltern.credentials import StaticCredentials
from saltern.errors import SalternError
from saltern.grant import NodeEndpoint
from saltern.keys import BlockKey
from saltern.results import Hit, Stored
from saltern.wire import Opcode
from tenants.roles import Role
from tests.controlplane.audit.test_canaries import forms_of
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import block, connect_tcp, key

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEYS = [bytes([0xA0 + n]) * 32 for n in range(4)]


class Traced:
    """A node whose every batch is to have a span, and those that it made."""

    def __init__(self, node: StaticNode, exporter: InMemorySpanExporter) -> None:
        self.node = node
        self._exporter = exporter

    def spans(self, count: int) -> list[ReadableSpan]:
        """Exactly so many, once they have ended: a reply may arrive before its span does."""
        wait_until(lambda: len(self._exporter.get_finished_spans()) >= count, 20)
        found = list(self._exporter.get_finished_spans())
        assert len(found) == count
        return found

    def told(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """Their names and attributes, without whose they are, which all must say."""
        told = []
        for span in self.spans(count):
            attributes = dict(span.attributes or {})
            assert attributes.pop("saltern.tenant") == "acme" and attributes.pop("saltern.namespace") == "chat"
            told.append((span.name, attributes))
        return told


@contextmanager
def traced_node(share: float = 1.0, **settings: Any) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    stop = tracing.start_with(SimpleSpanProcessor(exporter), "test-node")
    try:
        with static_node({"acme": tenant_policy(limit_bytes=8 * MIB)}, trace_batches=share, **settings) as node:
            exporter.clear()  # that of the policy
            yield Traced(node, exporter)
    finally:
        stop()


@pytest.fixture
def traced() -> Iterator[Traced]:
    with traced_node() as node:
        yield node


def conversation_of(node: StaticNode) -> Conversation:
    """That of the node's only session."""

    def look() -> Conversation:
        (connection,) = node._node._sessions._connections
        return connection.conversation

    return node.call(look)


def test_each_batch_over_tcp_has_a_span_that_says_what_came_of_it(traced: Traced) -> None:
    with connect_tcp(traced.node) as client:
        client.hello(traced.node.token("acme", "chat"))
        client.put({KEYS[0]: block(0, 5000), KEYS[1]: block(1, 3000)})
        client.put({KEYS[1]: block(1, 3000), KEYS[2]: block(2, 100)})
        client.get(*KEYS)
        client.lookup(*KEYS)
        client.delete(*KEYS[1:])
        client.ping()
        told = traced.told(5)
        assert type(conversation_of(traced.node)) is TracedConversation
    over = {"saltern.transport": "tcp"}
    put = {"saltern.keys": 2, "saltern.refused": 0, **over}
    assert told == [
        ("cache put", {**put, "saltern.stored": 2, "saltern.already": 0, "saltern.bytes": 8000}),
        ("cache put", {**put, "saltern.stored": 1, "saltern.already": 1, "saltern.bytes": 100}),
        ("cache get", {"saltern.keys": 4, "saltern.hits": 3, "saltern.bytes": 8100, **over}),
        ("cache lookup", {"saltern.keys": 4, "saltern.found": 3, "saltern.prefix": 3, **over}),
        ("cache delete", {"saltern.keys": 3, "saltern.deleted": 2, **over}),
    ]
    assert all(span.parent is None and span.status.is_unset for span in traced.spans(5))


def test_the_sdk_over_shared_memory(traced: Traced) -> None:
    node = traced.node
    credentials = StaticCredentials(
        node.token("acme", "chat"),
        namespace="chat",
        nodes=(NodeEndpoint("node", node.wire_endpoint, node.shm_path),),
    )
    with Client.from_credentials(credentials, transport="shm") as client:
        assert isinstance(client.put_many([(BlockKey(KEYS[0]), b"x" * 1000)])[0], Stored)
        assert isinstance(client.get_many([BlockKey(KEYS[0])])[0], Hit)
        told = traced.told(2)
    assert [(name, attributes["saltern.transport"], attributes["saltern.bytes"]) for name, attributes in told] == [
        ("cache put", "shm", 1000),
        ("cache get", "shm", 1000),
    ]


def test_a_grpc_call_goes_on_with_its_callers_trace_and_without_one_begins_its_own(traced: Traced) -> None:
    bearer = ("authorization", f"Bearer {traced.node.token('acme', 'chat')}")
    caller = (bearer, ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=whatever"))
    with grpc.insecure_channel(traced.node.grpc_endpoint) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        place: dict[str, Any] = {"namespace_id": "chat", "epoch": 1}
        blocks = [cache_pb2.Block(key=KEYS[n], payload=block(n, 700)) for n in range(2)]
        stub.PutBlocks(cache_pb2.PutBlocksRequest(blocks=blocks, **place), metadata=caller)
        stub.GetBlocks(cache_pb2.GetBlocksRequest(keys=KEYS, **place), metadata=(bearer,))
        stub.LookupBlocks(cache_pb2.LookupBlocksRequest(keys=KEYS, **place), metadata=(bearer,))
        stub.DeleteBlocks(cache_pb2.DeleteBlocksRequest(keys=KEYS, **place), metadata=(bearer,))
        told = traced.told(4)
    over = {"saltern.transport": "grpc"}
    put = {"saltern.keys": 2, "saltern.stored": 2, "saltern.already": 0, "saltern.refused": 0, "saltern.bytes": 1400}
    assert told == [
        ("cache put", {**put, **over}),
        ("cache get", {"saltern.keys": 4, "saltern.hits": 2, "saltern.bytes": 1400, **over}),
        ("cache lookup", {"saltern.keys": 4, "saltern.found": 2, "saltern.prefix": 2, **over}),
        ("cache delete", {"saltern.keys": 4, "saltern.deleted": 2, **over}),
    ]
    first, *others = traced.spans(4)
    assert (
        first.parent is not None and f"{first.parent.trace_id:032x}-{first.parent.span_id:016x}" == f"{TRACE}-{PARENT}"
    )
    assert not first.context.trace_state
    assert all(span.parent is None for span in others)


def test_a_refusal_is_told_by_its_reason_alone(traced: Traced) -> None:
    with connect_tcp(traced.node) as client:
        client.hello(traced.node.token("acme", "chat", Role.READER))
        with pytest.raises(SalternError) as refused:
            client.put({KEYS[0]: block(0)})
        (told,) = traced.told(1)
        assert told == ("cache put", {"saltern.transport": "tcp", "error.type": refused.value.reason})
        assert not traced.spans(1)[0].status.is_ok and not traced.spans(1)[0].events
        client.send(Opcode.GET, wire.Get(b"short", [1]))  # the session goes on, and its next span has its own counts
        assert client.error().reason
        assert client.get(KEYS[0]) == {}
        assert traced.told(3)[2][1]["saltern.keys"] == 1


def test_a_client_that_leaves_in_the_middle_ends_the_span(traced: Traced) -> None:
    with connect_tcp(traced.node) as client:
        client.hello(traced.node.token("acme", "chat"))
        put = wire.Put(KEYS[0], [MIB], wire.join_sums([wire.checksum(bytes(MIB))]))
        frame = wire.encode_request(Opcode.PUT, 1, wire.encode_body(put), MIB)
        client.sock.sendall(frame + bytes(1000))
    ((name, attributes),) = traced.told(1)
    assert (name, attributes["error.type"], attributes["saltern.keys"]) == ("cache put", "SESSION_CLOSED", 1)


def test_no_key_no_token_and_no_byte_of_an_entry_is_in_a_span(traced: Traced) -> None:
    token, payload = traced.node.token("acme", "chat"), b"what an entry holds, and nobody else may read"
    bad: dict[str, Any] = {"namespace_id": "a-name-that-a-stranger-made-up", "epoch": 1}
    with connect_tcp(traced.node) as client, grpc.insecure_channel(traced.node.grpc_endpoint) as channel:
        client.hello(token)
        client.put({KEYS[0]: payload})
        client.get(*KEYS)
        client.lookup(*KEYS)
        stub, metadata = cache_pb2_grpc.CacheServiceStub(channel), (("authorization", f"Bearer {token}"),)
        place: dict[str, Any] = {"namespace_id": "chat", "epoch": 1}
        stub.GetBlocks(cache_pb2.GetBlocksRequest(keys=KEYS, **place), metadata=metadata)
        with pytest.raises(grpc.RpcError):
            stub.GetBlocks(cache_pb2.GetBlocksRequest(keys=KEYS, **bad), metadata=metadata)
        with pytest.raises(grpc.RpcError):
            stub.GetBlocks(cache_pb2.GetBlocksRequest(keys=[b"short"], **place), metadata=metadata)
        client.delete(*KEYS)
        spans = traced.spans(6)
    text = "\n".join(span.to_json() for span in spans).encode()
    for secret in (token.encode(), token.rsplit(".", 1)[1].encode(), payload, *KEYS):
        assert not any(form in text for form in forms_of(secret))
    assert b"stranger" not in text  # what a refused request names is anybody's invention


def test_off_is_the_plain_session_and_no_span() -> None:
    with traced_node(share=0.0) as traced, connect_tcp(traced.node) as client:
        client.hello(traced.node.token("acme", "chat"))
        client.put({key(1): block(1)})
        assert type(conversation_of(traced.node)) is Conversation
        client.get(key(1))
        traced.spans(0)


def test_a_share_of_batches_is_drawn_before_anything_is_made() -> None:
    draws = iter([0.0, 0.24, 0.25, 0.9])
    spans = BatchSpans(0.25, lambda: next(draws))
    assert [spans.takes_next() for _ in range(4)] == [True, True, False, False]
    assert not any(BatchSpans(0.0).takes_next() for _ in range(100))
    assert all(BatchSpans(1.0).takes_next() for _ in range(100))


def test_a_node_that_is_not_traced_says_so_and_serves() -> None:
    with structlog.testing.capture_logs() as logged:
        assert spans_of(1.0) is None and spans_of(0.0) is None
    assert [entry["log_level"] for entry in logged] == ["warning"]
    with static_node(trace_batches=1.0) as node, connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        client.put({key(1): block(1)})
        assert type(conversation_of(node)) is Conversation
