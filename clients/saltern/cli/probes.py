"""Single probes of services: does it answer, and does it speak our protocol?"""

from __future__ import annotations

import time
from typing import Final

import grpc

from saltern.admin_client import open_channel
from saltern.bare_session import BareSession
from saltern.cache.v1.cache_pb2 import LookupBlocksRequest
from saltern.cache.v1.cache_pb2_grpc import CacheServiceStub
from saltern.cli.finding import Finding, failed, ok
from saltern.errors import SalternError, UnauthenticatedError, UnavailableError
from saltern.keys import KEY_BYTES
from saltern.rpc_errors import error_from_rpc
from saltern.wire import Empty, Hello, HelloReply, Opcode

_HEALTH_METHOD: Final = "/grpc.health.v1.Health/Check"
#: HealthCheckResponse.status is field 1, a varint; SERVING is 1 (grpc/health/v1/health.proto).
_HEALTH_SERVING: Final = b"\x08\x01"


def check_health(check: str, channel: grpc.Channel, endpoint: str, deadline_ms: int) -> Finding:
    """Ask the standard gRPC health service about the whole server.

    Spoken by hand: request and answer are two bytes at most, and the client needs no further package for it.
    """
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        _HEALTH_METHOD, request_serializer=None, response_deserializer=None
    )
    started_s = time.monotonic()
    try:
        answer = call(b"", timeout=deadline_ms / 1000)
    except grpc.RpcError as error:
        return failed(check, error_from_rpc(error, endpoint=endpoint))
    if answer != _HEALTH_SERVING:
        unhealthy = UnavailableError(
            f"{endpoint} answers but does not serve now",
            reason="NOT_SERVING",
            hint="its database or policy is not there: look at its log",
        )
        return failed(check, unhealthy)
    return ok(check, f"{endpoint} serves ({_since(started_s)})")


def check_grpc(check: str, endpoint: str, deadline_ms: int, hello: Hello | None = None) -> Finding:
    """Call a node's CacheService: with the token of ``hello``, or without one, which it must refuse as such."""
    request = LookupBlocksRequest(keys=[bytes(KEY_BYTES)])
    metadata: tuple[tuple[str, str], ...] = ()
    if hello is not None:
        request.namespace_id, request.epoch = hello.namespace, hello.epoch
        metadata = (("authorization", f"Bearer {hello.token}"),)
    started_s = time.monotonic()
    with open_channel(endpoint) as channel:
        try:
            CacheServiceStub(channel).LookupBlocks(request, timeout=deadline_ms / 1000, metadata=metadata)
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error, endpoint=endpoint)
            if hello is not None or not isinstance(error, UnauthenticatedError):
                return failed(check, error)
    return ok(check, f"{endpoint} serves CacheService ({_since(started_s)})")


def check_door(check: str, address: str, deadline_ms: int) -> Finding:
    """Send a PING to a node's wire door (``host:port``) or shared-memory door (a path).

    Without a session the node answers it with HELLO_REQUIRED, which nobody else would.
    """
    started_s = time.monotonic()
    try:
        with BareSession(address, timeout_ms=deadline_ms) as session:
            session.call(Opcode.PING, Empty(), Empty)
    except SalternError as error:
        if error.reason != "HELLO_REQUIRED":
            return failed(check, error)
    return ok(check, f"{address} speaks the wire protocol ({_since(started_s)})")


def check_session(check: str, address: str, hello: Hello, deadline_ms: int) -> Finding:
    """Open a session with a token, on ``host:port`` or the path of a unix socket."""
    started_s = time.monotonic()
    try:
        with BareSession(address, timeout_ms=deadline_ms) as session:
            reply, _ = session.call(Opcode.HELLO, hello, HelloReply)
    except SalternError as error:
        return failed(check, error)
    return ok(check, f"session open as tenant {reply.tenant} on {address} ({_since(started_s)})")


def _since(started_s: float) -> str:
    return f"{(time.monotonic() - started_s) * 1000:.0f} ms"
