"""Single probes of services: does it answer, and does it speak our protocol?"""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import grpc

from saltern.admin_client import open_channel
from saltern.bare_session import BareSession
from saltern.cache.v1.cache_pb2 import LookupBlocksRequest
from saltern.cache.v1.cache_pb2_grpc import CacheServiceStub
from saltern.cli.finding import Finding, fail, failed, ok, warn
from saltern.endpoints import parse_endpoint
from saltern.errors import SalternError, UnauthenticatedError, UnavailableError
from saltern.keys import KEY_BYTES
from saltern.rpc_errors import error_from_rpc
from saltern.transport.tls import require_agreement, tls_failure
from saltern.wire import Empty, Hello, HelloReply, Opcode

if TYPE_CHECKING:
    from saltern.tls import ClientTls

#: A certificate that ends within this time is worth a warning.
CERTIFICATE_WARN_DAYS: Final = 14
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


@dataclass(frozen=True, slots=True)
class Door:
    """How a door is reached.

    Attributes:
        address: ``host:port``, or the path of a unix socket.
        tls: what this client was told to trust; None for plain text.
        server_name: what the registry says that the node's certificate is for; empty for plain text.
    """

    address: str
    deadline_ms: int
    tls: ClientTls | None = None
    server_name: str = ""

    def open_session(self) -> BareSession:
        """Raises UnavailableError."""
        return BareSession(self.address, timeout_ms=self.deadline_ms, tls=self.tls, server_name=self.server_name)


def check_grpc(check: str, door: Door, hello: Hello | None = None) -> Finding:
    """Call a node's CacheService: with the token of ``hello``, or without one, which it must refuse as such."""
    request = LookupBlocksRequest(keys=[bytes(KEY_BYTES)])
    metadata: tuple[tuple[str, str], ...] = ()
    if hello is not None:
        request.namespace_id, request.epoch = hello.namespace, hello.epoch
        metadata = (("authorization", f"Bearer {hello.token}"),)
    started_s = time.monotonic()
    try:
        require_agreement(door.address, is_tls_client=door.tls is not None, server_name=door.server_name)
        with open_channel(door.address, door.tls, server_name=door.server_name) as channel:
            CacheServiceStub(channel).LookupBlocks(request, timeout=door.deadline_ms / 1000, metadata=metadata)
    except SalternError as error:
        return failed(check, error)
    except grpc.RpcError as rpc_error:
        answer = error_from_rpc(rpc_error, endpoint=door.address)
        if hello is not None or not isinstance(answer, UnauthenticatedError):
            return failed(check, answer)
    return ok(check, f"{door.address} serves CacheService ({_since(started_s)})")


def check_door(check: str, door: Door) -> Finding:
    """Send a PING to a node's wire door or shared-memory door.

    Without a session the node answers it with HELLO_REQUIRED, which nobody else would.
    """
    started_s = time.monotonic()
    try:
        with door.open_session() as session:
            session.call(Opcode.PING, Empty(), Empty)
    except SalternError as error:
        if error.reason != "HELLO_REQUIRED":
            return failed(check, error)
    return ok(check, f"{door.address} speaks the wire protocol ({_since(started_s)})")


def check_session(check: str, door: Door, hello: Hello) -> Finding:
    """Open a session with a token."""
    started_s = time.monotonic()
    try:
        with door.open_session() as session:
            reply, _ = session.call(Opcode.HELLO, hello, HelloReply)
    except SalternError as error:
        return failed(check, error)
    return ok(check, f"session open as tenant {reply.tenant} on {door.address} ({_since(started_s)})")


def check_certificate(check: str, door: Door) -> Finding:
    """Shake hands and look at when the certificate that is shown ends; ``door`` must have ``tls`` and a name."""
    from saltern.tls import client_context

    assert door.tls is not None
    try:
        context = client_context(door.tls)
        context.set_alpn_protocols(["h2"])
        timeout_s = door.deadline_ms / 1000
        with (
            socket.create_connection(parse_endpoint(door.address, port_min=1), timeout=timeout_s) as raw,
            context.wrap_socket(raw, server_hostname=door.server_name) as sock,
        ):
            ends_at_s = ssl.cert_time_to_seconds(str((sock.getpeercert() or {})["notAfter"]))
    except SalternError as error:
        return failed(check, error)
    except ssl.SSLError as error:
        return failed(check, tls_failure(error, door.address))
    except OSError as error:
        return fail(check, f"no TLS with {door.address}: {error.strerror or error}", "check that it runs and uses TLS")
    days = (ends_at_s - time.time()) / 86400
    ends = f"{datetime.fromtimestamp(ends_at_s, UTC):%Y-%m-%d}"
    if days < CERTIFICATE_WARN_DAYS:
        return warn(
            check,
            f"the certificate of {door.address} ends on {ends}, in {days:.0f} days",
            "renew it: servers pick the new files up by themselves, `saltern up --tls` renews its own when it starts",
        )
    return ok(check, f"the certificate of {door.address} is good until {ends}")


def _since(started_s: float) -> str:
    return f"{(time.monotonic() - started_s) * 1000:.0f} ms"
