"""A span for some of the batches that a node serves, for whoever wants to see single requests in their traces.

Off by default, and nothing is paid for it then: what is here stands in for :class:`~dataplane.io.session.Session`,
:class:`~dataplane.io.conversation.Conversation` and :class:`~dataplane.io.grpc_door.CacheService` only where a node is
told to trace, so the plain ones hold no trace of it. A span says whose batch it was, by which transport, how many keys
and bytes, and how it ended: never a key, a salt or a token, and of a namespace only what a verified session has.

Wire sessions take turns in one task, so no span here is anybody's current one. Those of the wire protocol begin traces
of their own; a gRPC call's goes on with its caller's, named by ``traceparent``.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import structlog

from dataplane.core.partition import Partition
from dataplane.io.batches import GetBatch, PutBatch
from dataplane.io.conversation import Conversation
from dataplane.io.grpc_door import CacheService, Context, Request, bearer_token
from dataplane.io.rdma import RemoteFailedError
from dataplane.io.session import NodeState, Session
from dataplane.io.stream import ByteStream, PeerGoneError, Script
from dataplane.metrics.meters import DoorMeter, Operation, Transport
from dataplane.settings import SessionLimits
from saltern import tracing, wire
from saltern.cache.v1 import cache_pb2
from saltern.errors import AlreadyExistsError, SalternError
from saltern.keys import BlockKey
from saltern.names import TenantId
from saltern.wire import Opcode

_log = structlog.get_logger(__name__)
_OPERATIONS: Final = {
    int(Opcode.LOOKUP): Operation.LOOKUP,
    int(Opcode.GET): Operation.GET,
    int(Opcode.PUT): Operation.PUT,
    int(Opcode.DELETE): Operation.DELETE,
}
#: Why a span ends whose session is closed in the middle of the batch.
_LEFT: Final = "SESSION_CLOSED"

Counts: TypeAlias = dict[str, int]
ResponseT = TypeVar("ResponseT")


class BatchSpans:
    """Which batches get a span.

    Args:
        ratio: the share of batches, 0 to 1, drawn at random before anything is made of one. The sampler that
            ``OTEL_TRACES_SAMPLER`` names decides about the rest.
        draw: a number from 0 to below 1.
    """

    __slots__ = ("_draw", "_ratio")

    def __init__(self, ratio: float, draw: Callable[[], float] = random.random) -> None:
        self._ratio = ratio
        self._draw = draw

    def takes_next(self) -> bool:
        """Whether the batch that begins gets one."""
        return self._draw() < self._ratio


def spans_of(ratio: float) -> BatchSpans | None:
    """What makes spans of that share of batches; None where there are to be none, or the process is not traced."""
    if ratio > 0 and not tracing.is_on():
        _log.warning("batches are to be traced, and this process is not: set OTEL_EXPORTER_OTLP_ENDPOINT")
    return BatchSpans(ratio) if ratio > 0 and tracing.is_on() else None


class TracedSession(Session):
    """A session that remembers, while its conversation says so, what the batch of the moment has come to.

    Attributes:
        counts: asked once the batch has ended; None where none is remembered, or it was refused before it began.
        is_watched: whether to remember.
    """

    __slots__ = ("counts", "is_watched")

    def __init__(self, node: NodeState, claim_place: Callable[[TenantId], bool]) -> None:
        super().__init__(node, claim_place)
        self.counts: Callable[[], Counts] | None = None
        self.is_watched = False

    def begin_put(self, put: wire.Put) -> PutBatch:
        batch = super().begin_put(put)
        if self.is_watched:
            self.counts = lambda: _counts_of_put(put.sizes, batch.codes)
        return batch

    def begin_get(self, get: wire.Get) -> GetBatch:
        batch = super().begin_get(get)
        if self.is_watched:
            asked = len(get.max_sizes)
            self.counts = lambda: {"keys": asked, "hits": len(batch.hits), "bytes": batch.payload_bytes}
        return batch

    def lookup(self, keys: Sequence[BlockKey]) -> wire.LookupReply:
        reply = super().lookup(keys)
        if self.is_watched:
            counts = {"keys": len(keys), "found": sum(reply.found), "prefix": reply.prefix}
            self.counts = lambda: counts
        return reply

    def delete(self, keys: Sequence[BlockKey]) -> int:
        deleted = super().delete(keys)
        if self.is_watched:
            before = self.counts() if self.counts else {"keys": 0, "deleted": 0}
            counts = {"keys": before["keys"] + len(keys), "deleted": before["deleted"] + deleted}
            self.counts = lambda: counts
        return deleted

    @property
    def partition(self) -> Partition | None:
        """What the session was opened for; None before HELLO."""
        return None if self._grant is None else self._grant.partition


class TracedConversation(Conversation):
    """A conversation that makes a span of some batches.

    Args:
        transport: of the door; a session with a queue pair is told apart.
    """

    __slots__ = ("_spans", "_traced", "_transport")

    def __init__(
        self,
        stream: ByteStream,
        session: TracedSession,
        limits: SessionLimits,
        meter: DoorMeter,
        *,
        spans: BatchSpans,
        transport: Transport,
    ) -> None:
        super().__init__(stream, session, limits, meter)
        self._traced = session
        self._spans = spans
        self._transport = transport

    def _begin(self, header: wire.Header, body: memoryview) -> Script[bytes | Script[None]]:
        operation = _OPERATIONS.get(header.opcode)
        partition = self._traced.partition
        if operation is None or partition is None or not self._spans.takes_next():
            return (yield from super()._begin(header, body))
        transport = self._transport if self._link is None else Transport.RDMA
        span = _open_span(operation, transport, partition)
        self._traced.is_watched = True
        answer: bytes | Script[None] = b""
        try:
            answer = yield from super()._begin(header, body)
        except BaseException as error:
            self._close_span(span, error)
            raise
        if isinstance(answer, bytes):
            self._close_span(span)
            return answer
        return self._watched(span, answer)

    def _watched(self, span: Any, script: Script[None]) -> Script[None]:
        """The rest of a batch, which moves its entries and replies."""
        try:
            yield from script
        except BaseException as error:
            self._close_span(span, error)
            raise
        self._close_span(span)

    def _close_span(self, span: Any, error: BaseException | None = None) -> None:
        session = self._traced
        counts = session.counts() if session.counts else {}
        # Or the batch, which is over, would live until the next one.
        session.counts, session.is_watched = None, False
        _close_span(span, counts, error)


class TracedCacheService(CacheService):
    """CacheService that makes a span of some calls, as parts of their callers' traces."""

    def __init__(self, node: NodeState, spans: BatchSpans) -> None:
        super().__init__(node)
        self._spans = spans

    async def _put(self, request: cache_pb2.PutBlocksRequest, context: Context) -> cache_pb2.PutBlocksResponse:
        return await self._spanned(Operation.PUT, request, context, super()._put(request, context), _counts_of_put_call)

    async def _get(self, request: cache_pb2.GetBlocksRequest, context: Context) -> cache_pb2.GetBlocksResponse:
        return await self._spanned(Operation.GET, request, context, super()._get(request, context), _counts_of_get_call)

    async def _lookup(self, request: cache_pb2.LookupBlocksRequest, context: Context) -> cache_pb2.LookupBlocksResponse:
        work = super()._lookup(request, context)
        return await self._spanned(Operation.LOOKUP, request, context, work, _counts_of_lookup_call)

    async def _delete(self, request: cache_pb2.DeleteBlocksRequest, context: Context) -> cache_pb2.DeleteBlocksResponse:
        work = super()._delete(request, context)
        return await self._spanned(Operation.DELETE, request, context, work, _counts_of_delete_call)

    async def _spanned(
        self,
        operation: Operation,
        request: Any,
        context: Context,
        work: Awaitable[ResponseT],
        counts_of: Callable[[Any, ResponseT], Counts],
    ) -> ResponseT:
        partition = self._partition_of(request, context) if self._spans.takes_next() else None
        if partition is None:
            return await work
        span = _open_span(operation, Transport.GRPC, partition, _traceparent_of(context))
        try:
            response = await work
        except BaseException as error:
            _close_span(span, {}, error)
            raise
        _close_span(span, counts_of(request, response))
        return response

    def _partition_of(self, request: Request, context: Context) -> Partition | None:
        """Whose call it is (I1); None where the gate refuses it: what such a request names is anybody's invention."""
        try:
            token = bearer_token(context.invocation_metadata() or ())
            return self._node.gate.admit(token, request.namespace_id, request.epoch, request.group_uid).partition
        except SalternError:
            return None


def _open_span(operation: Operation, transport: Transport, partition: Partition, traceparent: str = "") -> Any:
    attributes = {
        "saltern.tenant": partition.tenant,
        "saltern.namespace": partition.namespace,
        "saltern.transport": transport.value,
    }
    return tracing.detached_span(f"cache {operation}", traceparent, **attributes)


def _close_span(span: Any, counts: Counts, error: BaseException | None = None) -> None:
    for name, count in counts.items():
        span.set_attribute(f"saltern.{name}", count)
    if isinstance(error, GeneratorExit | PeerGoneError):
        tracing.note_reason(span, _LEFT)
    elif error is not None:
        tracing.note_error(span, error.error if isinstance(error, RemoteFailedError) else error)
    span.end()


def _counts_of_put(sizes: list[int], codes: bytes | bytearray | list[int]) -> Counts:
    stored = [size for size, code in zip(sizes, codes, strict=True) if code == 0]
    already = sum(code == AlreadyExistsError.code for code in codes)
    refused = len(codes) - len(stored) - already
    return {"keys": len(sizes), "stored": len(stored), "already": already, "refused": refused, "bytes": sum(stored)}


def _counts_of_put_call(request: cache_pb2.PutBlocksRequest, response: cache_pb2.PutBlocksResponse) -> Counts:
    return _counts_of_put(
        [len(block.payload) for block in request.blocks], [status.code for status in response.statuses]
    )


def _counts_of_get_call(request: cache_pb2.GetBlocksRequest, response: cache_pb2.GetBlocksResponse) -> Counts:
    moved_bytes = sum(len(block.payload) for block in response.blocks)
    return {"keys": len(request.keys), "hits": len(response.blocks), "bytes": moved_bytes}


def _counts_of_lookup_call(request: cache_pb2.LookupBlocksRequest, response: cache_pb2.LookupBlocksResponse) -> Counts:
    return {"keys": len(request.keys), "found": sum(response.found), "prefix": response.prefix_blocks}


def _counts_of_delete_call(request: cache_pb2.DeleteBlocksRequest, response: cache_pb2.DeleteBlocksResponse) -> Counts:
    return {"keys": len(request.keys), "deleted": response.deleted_blocks}


def _traceparent_of(context: Context) -> str:
    metadata = context.invocation_metadata() or ()
    value = next((entry[1] for entry in metadata if entry[0] == tracing.TRACEPARENT), "")
    return value if isinstance(value, str) else ""
