"""The gRPC door: ``saltern.cache.v1.CacheService`` for every other language, over the same gate and the same core.

A token is verified before a request's message is read, so that only tenants can make the node hold large messages; and
each tenant has so many calls at a time, so that it can hold up only itself.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic_ns
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf.message import Message
from grpc_health.v1 import health as health_service
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dataplane.core.partition import Partition
from dataplane.core.work import DELETE_WORK, PUT_WORK
from dataplane.io.batches import SLICE_KEYS, GetBatch, PutBatch
from dataplane.io.call_pace import CallPace
from dataplane.io.health import CACHE_SERVICE, HealthService
from dataplane.io.session import NodeState
from dataplane.io.tcp import bind_error
from dataplane.metrics.meters import Transport
from saltern import wire
from saltern.cache.v1 import cache_pb2, cache_pb2_grpc
from saltern.endpoints import Endpoint
from saltern.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SalternError,
    UnauthenticatedError,
    UnavailableError,
)
from saltern.keys import KEY_BYTES, BlockKey
from saltern.names import TenantId
from saltern.rpc_connections import connection_limits
from saltern.rpc_errors import abort
from saltern.rpc_intake import MessageLimits, take_in
from saltern.rpc_tls import server_credentials
from saltern.tls_reload import ReloadingTls
from saltern.wire import Opcode
from tenants.roles import Permission

_log = structlog.get_logger(__name__)
PUT_BLOCKS_MAX: Final = 1024
#: The entries of one call. Less than on the wire protocol, because here they are held in memory, twice.
CALL_MAX_BYTES: Final = wire.ENTRY_MAX_BYTES
#: That with room for keys and framing.
MESSAGE_MAX_BYTES: Final = CALL_MAX_BYTES + 1024 * 1024
_CONCURRENT_CALLS_MAX: Final = 64
TENANT_CALLS_MAX: Final = 8
#: Keys of a lookup, and the few other fields that a request has.
_MESSAGE_LIMITS: Final = MessageLimits(bytes_max=MESSAGE_MAX_BYTES, fields_max=wire.KEYS_MAX + 16, wait_s=30)
_HANDSHAKE_TIMEOUT_MS: Final = 10_000
_KEEPALIVE_TIME_MS: Final = 30_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
_METADATA_MAX_BYTES: Final = 16 * 1024
_SCHEME: Final = "Bearer "
#: Open to everybody: a probe has no token, and learns no more than that the node serves.
_HEALTH_METHODS: Final = "/grpc.health.v1.Health/"
_PROBE_LIMITS: Final = MessageLimits(bytes_max=4096, fields_max=16, wait_s=5)
#: What a method is called on the wire protocol: latencies are counted under one name for both doors.
_OPCODES: Final = {
    "/saltern.cache.v1.CacheService/PutBlocks": Opcode.PUT,
    "/saltern.cache.v1.CacheService/GetBlocks": Opcode.GET,
    "/saltern.cache.v1.CacheService/LookupBlocks": Opcode.LOOKUP,
    "/saltern.cache.v1.CacheService/DeleteBlocks": Opcode.DELETE,
}

Context = grpc.aio.ServicerContext[Any, Any]
Request: TypeAlias = (
    cache_pb2.PutBlocksRequest
    | cache_pb2.GetBlocksRequest
    | cache_pb2.LookupBlocksRequest
    | cache_pb2.DeleteBlocksRequest
)
RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """CacheService over the node's core."""

    def __init__(self, node: NodeState) -> None:
        self._node = node

    async def PutBlocks(  # noqa: N802 - the name is the contract's
        self, request: cache_pb2.PutBlocksRequest, context: Context
    ) -> cache_pb2.PutBlocksResponse:
        return await self._answer(self._put(request, context), context)

    async def GetBlocks(  # noqa: N802
        self, request: cache_pb2.GetBlocksRequest, context: Context
    ) -> cache_pb2.GetBlocksResponse:
        return await self._answer(self._get(request, context), context)

    async def LookupBlocks(  # noqa: N802
        self, request: cache_pb2.LookupBlocksRequest, context: Context
    ) -> cache_pb2.LookupBlocksResponse:
        return await self._answer(self._lookup(request, context), context)

    async def DeleteBlocks(  # noqa: N802
        self, request: cache_pb2.DeleteBlocksRequest, context: Context
    ) -> cache_pb2.DeleteBlocksResponse:
        return await self._answer(self._delete(request, context), context)

    async def _answer(self, work: Awaitable[ReplyT], context: Context) -> ReplyT:
        """The one edge from errors to gRPC status."""
        refused = self._node.meters.doors[Transport.GRPC].refused
        try:
            return await work
        except SalternError as error:
            refused[error.reason] += 1
            await abort(context, error)
        except Exception:
            _log.exception("call failed")
            refused[InternalError.default_reason] += 1
            await abort(context, InternalError("the node failed to answer", hint="see the node's log"))

    async def _put(self, request: cache_pb2.PutBlocksRequest, context: Context) -> cache_pb2.PutBlocksResponse:
        partition = self._open(request, Permission.ENTRIES_WRITE, context)
        blocks = request.blocks
        keys = _block_keys([block.key for block in blocks], PUT_BLOCKS_MAX)
        if any(not 1 <= len(block.payload) <= wire.ENTRY_MAX_BYTES for block in blocks):
            raise InvalidArgumentError(
                f"a block is not 1 to {wire.ENTRY_MAX_BYTES} bytes long",
                reason="ENTRY_SIZE_OUT_OF_RANGE",
                hint="put no empty blocks, and split larger ones",
            )
        sizes = [len(block.payload) for block in blocks]
        batch = PutBatch(self._node.blocks, partition, keys, errors_max=len(keys))
        with CallPace(self._node.traffic, partition.tenant) as pace:
            await pace.enter(len(keys), sum(sizes), moves_entries=True)
            pace.begun(max(sizes, default=0))  # one entry at a time holds memory
            try:
                for index, block in enumerate(blocks):
                    payload = block.payload
                    target = batch.start(index, len(payload))
                    if target is not None:
                        target[:] = payload
                        digest = wire.checksum(target)
                        batch.finish(index, digest, digest)  # gRPC's transport carries no sum to compare with
                        pace.served_bytes += len(payload)
                    await pace.spend(PUT_WORK + len(payload))
                for work in batch.touch():
                    await pace.spend(work)
            finally:
                batch.close()
        response = cache_pb2.PutBlocksResponse(statuses=[cache_pb2.BlockStatus(code=code) for code in batch.codes])
        for index, error in batch.refused:
            _describe(response.statuses[index], error)
        for status in response.statuses:
            if status.code == AlreadyExistsError.code:
                status.reason = AlreadyExistsError.default_reason
        return response

    async def _get(self, request: cache_pb2.GetBlocksRequest, context: Context) -> cache_pb2.GetBlocksResponse:
        partition = self._open(request, Permission.ENTRIES_READ, context)
        keys = _block_keys(request.keys, wire.KEYS_MAX)
        response = cache_pb2.GetBlocksResponse()
        batch = GetBatch(self._node.blocks, partition, keys, None)
        with CallPace(self._node.traffic, partition.tenant) as pace:
            await pace.enter(len(keys), moves_entries=True)
            try:
                for work in batch.pin():
                    await pace.spend(work)
                if batch.payload_bytes > CALL_MAX_BYTES:
                    raise InvalidArgumentError(
                        f"the blocks are {batch.payload_bytes} bytes, above the limit of {CALL_MAX_BYTES}",
                        reason="PAYLOAD_TOO_LARGE",
                        hint="split the batch",
                        metadata={"limit_bytes": str(CALL_MAX_BYTES)},
                    )
                pace.charge_bytes(batch.payload_bytes)
                pace.begun(batch.payload_bytes)
                if batch.fetch is not None:
                    arrived = asyncio.Event()
                    batch.fetch.on_done(arrived.set)
                    if not batch.fetch.is_done:
                        await arrived.wait()
                    batch.finish()
                for index, pin in batch.hits:
                    response.blocks.add(key=keys[index], payload=bytes(batch.view(pin)))
                    pace.served_bytes += pin.size_bytes
                    await pace.spend(pin.size_bytes)
            finally:
                batch.close()
        return response

    async def _lookup(self, request: cache_pb2.LookupBlocksRequest, context: Context) -> cache_pb2.LookupBlocksResponse:
        partition = self._open(request, Permission.ENTRIES_READ, context)
        keys = _block_keys(request.keys, wire.KEYS_MAX)
        with CallPace(self._node.traffic, partition.tenant) as pace:
            await pace.enter(len(keys))
            blocks = self._node.blocks
            prefix, found = blocks.core.lookup(partition, keys, blocks.clock.monotonic_ns())
        return cache_pb2.LookupBlocksResponse(prefix_blocks=prefix, found=map(bool, found))

    async def _delete(self, request: cache_pb2.DeleteBlocksRequest, context: Context) -> cache_pb2.DeleteBlocksResponse:
        partition = self._open(request, Permission.ENTRIES_WRITE, context)
        keys = _block_keys(request.keys, wire.KEYS_MAX)
        deleted = 0
        with CallPace(self._node.traffic, partition.tenant) as pace:
            await pace.enter(len(keys))
            for start in range(0, len(keys), SLICE_KEYS):
                deleted += self._node.blocks.core.delete(partition, keys[start : start + SLICE_KEYS])
                await pace.spend(SLICE_KEYS * DELETE_WORK)
        return cache_pb2.DeleteBlocksResponse(deleted_blocks=deleted)

    def _open(self, request: Request, permission: Permission, context: Context) -> Partition:
        """I1: the tenant is the token's, and every call passes the gate."""
        gate = self._node.gate
        token = bearer_token(context.invocation_metadata() or ())
        grant = gate.admit(token, request.namespace_id, request.epoch, request.group_uid)
        return gate.check(grant, permission)


class TokenFirst(grpc.aio.ServerInterceptor):
    """Refuses a call without a valid token, or one too many of its tenant, before its message is read."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._meter = node.meters.doors[Transport.GRPC]
        self._calls: Counter[str | None] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if method.startswith(_HEALTH_METHODS):
            handler = await continuation(handler_call_details)
            # A few at a time for all probes together: whoever asks is nobody.
            return handler and take_in(handler, functools.partial(self._probe_place, method), _PROBE_LIMITS)
        try:
            if self._node.is_draining:
                raise UnavailableError("the node is shutting down", reason="DRAINING", hint="use another node")
            claims = self._node.gate.verify(bearer_token(handler_call_details.invocation_metadata))
        except SalternError as error:
            self._meter.refused[error.reason] += 1
            # A handler of a request *stream* is called before anything is received.
            return grpc.stream_unary_rpc_method_handler(functools.partial(_refuse, error))
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        place = functools.partial(self._place, claims.tenant, _OPCODES.get(method, Opcode.PING))
        return take_in(handler, place, _MESSAGE_LIMITS)

    @asynccontextmanager
    async def _place(self, tenant: TenantId | None, opcode: int, context: Context) -> AsyncIterator[None]:
        async with self._counted(tenant, "the tenant has", context):
            began_ns = monotonic_ns()
            try:
                yield
            finally:
                self._meter.observe(opcode, tenant, monotonic_ns() - began_ns)

    def _probe_place(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        return self._counted(method, "all callers of this method together have", context)

    @asynccontextmanager
    async def _counted(self, who: str | None, words: str, context: Context) -> AsyncIterator[None]:
        """A place among the calls of a tenant, or of a method that is open to everybody, while there is one."""
        if self._calls[who] >= TENANT_CALLS_MAX:
            error = ResourceExhaustedError(
                f"{words} {TENANT_CALLS_MAX} calls in progress on this node, and that is the limit",
                reason="TOO_MANY_CALLS",
                hint="wait for answers, put more blocks into each call, or use the wire protocol",
                retry_after_ms=1000,
            )
            self._meter.refused[error.reason] += 1
            await abort(context, error)
        self._calls[who] += 1
        try:
            yield
        finally:
            self._calls[who] -= 1
            if not self._calls[who]:
                del self._calls[who]


async def start_grpc_door(
    node: NodeState,
    endpoint: Endpoint,
    health: HealthService,
    tls: ReloadingTls | None = None,
    *,
    service: CacheService | None = None,
) -> tuple[grpc.aio.Server, Endpoint]:
    """Serve CacheService, the node's health and reflection; return the server and where it listens.

    Args:
        tls: None for plain text.
        service: what answers; a plain one of ``node`` if None.

    Raises:
        FailedPreconditionError: the port is taken or the address is not this host's.
    """
    server = grpc.aio.server(
        interceptors=[TokenFirst(node)],
        maximum_concurrent_rpcs=_CONCURRENT_CALLS_MAX,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
            ("grpc.max_send_message_length", MESSAGE_MAX_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.max_metadata_size", _METADATA_MAX_BYTES),
            ("grpc.max_concurrent_streams", _CONCURRENT_CALLS_MAX),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),  # a peer that connects and says nothing
            ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            *connection_limits(),
        ],
    )
    cache_pb2_grpc.add_CacheServiceServicer_to_server(service or CacheService(node), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection([CACHE_SERVICE, health_service.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        if tls is None:
            port = server.add_insecure_port(str(endpoint))
        else:
            port = server.add_secure_port(str(endpoint), server_credentials(tls))
    except RuntimeError as error:
        raise bind_error(endpoint, "--grpc-listen", OSError(str(error))) from None
    await server.start()
    return server, Endpoint(endpoint.host, port)


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The token of ``authorization: Bearer <token>``.

    Raises:
        UnauthenticatedError: TOKEN_MISSING, or TOKEN_MALFORMED if there is more than one or another scheme.
    """
    values = [value for key, value in metadata if key == "authorization"]
    if not values:
        raise UnauthenticatedError(
            "the call carries no token",
            reason="TOKEN_MISSING",
            hint="send the metadata 'authorization: Bearer <token>' with a token of the audience node",
        )
    value = values[0]
    if len(values) > 1 or not isinstance(value, str) or not value.startswith(_SCHEME):
        raise UnauthenticatedError(
            "the call's authorization is not one bearer token",
            reason="TOKEN_MALFORMED",
            hint="send 'authorization: Bearer <token>' once",
        )
    return value[len(_SCHEME) :]


async def _refuse(error: SalternError, _requests: object, context: Context) -> None:
    await abort(context, error)


def _block_keys(keys: Sequence[bytes], count_max: int) -> list[BlockKey]:
    if len(keys) > count_max:
        raise InvalidArgumentError(
            f"{len(keys)} blocks in one request, above the limit of {count_max}",
            reason="TOO_MANY_KEYS",
            hint="split the batch",
            metadata={"limit_keys": str(count_max)},
        )
    if any(len(key) != KEY_BYTES for key in keys):
        raise InvalidArgumentError(
            f"a block key is not {KEY_BYTES} bytes long", reason="INVALID_KEY_LENGTH", hint="derive keys with the SDK"
        )
    return [BlockKey(key) for key in keys]


def _describe(status: cache_pb2.BlockStatus, error: SalternError) -> None:
    status.reason = error.reason
    status.message = error.message
    status.metadata.update(error.metadata)
