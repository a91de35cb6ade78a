"""Errors across gRPC, in both directions: one mapping between the tree of :mod:`saltern.errors` and google.rpc.Status.

A failed call carries a ``google.rpc.Status`` in its trailing metadata (AIP-193)::

    code, message                    the error's class and its one line
    ErrorInfo(reason, "saltern")     the reason and the details for programs
    LocalizedMessage                 the hint: what to do next
    RetryInfo                        when a retry may succeed, only where one can

What comes back from elsewhere (the channel itself, a proxy, another service) has no such details or foreign ones; it
still becomes an error of the tree, with a hint that names the endpoint. Nothing received is trusted to be well formed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from saltern.errors import (
    DeadlineExceededError,
    InternalError,
    ResourceExhaustedError,
    SalternError,
    StatusCode,
    UnavailableError,
    error_from_status,
)

ERROR_DOMAIN: Final = "saltern"
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"

# Trailing metadata above 8 KiB is refused by gRPC's default settings, and then the caller would see no reason at all.
# These bounds keep the status (base64 in the trailer) together with the percent-encoded message below that.
_TEXT_MAX_BYTES: Final = 512
_METADATA_MAX_ITEMS: Final = 16
_METADATA_KEY_MAX_BYTES: Final = 64
_METADATA_VALUE_MAX_BYTES: Final = 128
_STATUS_MAX_BYTES: Final = 64 * 1024
_RETRY_MAX_MS: Final = 24 * 3600 * 1000

_MessageT = TypeVar("_MessageT", bound=Message)
_GRPC_CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def grpc_status_code(error: SalternError) -> grpc.StatusCode:
    """The gRPC status code of an error; the numbers agree by construction (:class:`saltern.errors.StatusCode`)."""
    return _GRPC_CODES[int(error.code)]


def status_from_error(error: SalternError) -> status_pb2.Status:
    """Encode an error; over-long texts are cut and surplus metadata is dropped, so that it fits a trailer."""
    status = status_pb2.Status(code=int(error.code), message=_cut(error.message, _TEXT_MAX_BYTES))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    for key, value in list(error.metadata.items())[:_METADATA_MAX_ITEMS]:
        info.metadata[_cut(str(key), _METADATA_KEY_MAX_BYTES)] = _cut(str(value), _METADATA_VALUE_MAX_BYTES)
    status.details.add().Pack(info)
    if error.hint:
        hint = error_details_pb2.LocalizedMessage(locale="en-US", message=_cut(error.hint, _TEXT_MAX_BYTES))
        status.details.add().Pack(hint)
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(min(max(error.retry_after_ms, 0), _RETRY_MAX_MS))
        status.details.add().Pack(retry)
    return status


def trailing_metadata(error: SalternError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries ``error``."""
    return ((STATUS_DETAILS_KEY, status_from_error(error).SerializeToString()),)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SalternError) -> NoReturn:
    """End a call of a grpc.aio server with ``error``; raises what grpc.aio raises to unwind the servicer method."""
    message = _cut(error.message, _TEXT_MAX_BYTES)
    await context.abort(grpc_status_code(error), message, trailing_metadata(error))
    raise AssertionError("context.abort returned")  # it never does; for type checkers


def error_from_rpc(error: grpc.RpcError, *, endpoint: str = "") -> SalternError:
    """Decode a failed call, of the synchronous or the asyncio API, into an error of the tree.

    Args:
        error: what the call raised.
        endpoint: ``host:port`` that was called, named in the hints of errors of the channel itself.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return InternalError("the call failed without a status", reason="NO_STATUS")
    grpc_code = error.code()
    code = int(grpc_code.value[0]) if grpc_code is not None else int(StatusCode.INTERNAL)
    message = _one_line(error.details())
    status = _received_status(error.trailing_metadata(), code)
    info = _detail(status, error_details_pb2.ErrorInfo())
    if status is None or info is None or info.domain != ERROR_DOMAIN:
        return _foreign_error(code, message, endpoint)
    hint = _detail(status, error_details_pb2.LocalizedMessage())
    retry = _detail(status, error_details_pb2.RetryInfo())
    return error_from_status(
        code,
        status.message or message or "the call failed",
        reason=info.reason,
        hint=hint.message if hint else "",
        metadata=dict(info.metadata),
        retry_after_ms=_retry_after_ms(retry) if retry else None,
    )


#: How gRPC says that it does not accept a server's certificate; its status has no better place for it.
_CERTIFICATE_WORDS = (
    "CERTIFICATE_VERIFY_FAILED",
    "certificate signature failure",
    "Hostname Verification",
    "Peer name",
)


def _foreign_error(code: int, message: str, endpoint: str) -> SalternError:
    """An error without our details: from the channel, a proxy or something that is not Saltern."""
    target = endpoint or "the endpoint"
    metadata = {"endpoint": endpoint} if endpoint else {}
    match code:
        case StatusCode.UNAVAILABLE if any(words in message for words in _CERTIFICATE_WORDS):
            return UnavailableError(
                f"{target} showed a certificate that is not accepted: another authority's, another name's, or expired",
                reason="TLS_CERTIFICATE_REFUSED",
                hint="check the CA file of this client (--tls-ca), the name that it calls, and the server's --tls-cert",
                metadata=metadata,
            )
        case StatusCode.UNAVAILABLE if "Ssl handshake failed" in message or "SSL_ERROR" in message:
            return UnavailableError(
                f"no TLS handshake with {target}",
                reason="TLS_FAILED",
                hint="check that it serves TLS, and whether it asks for a client certificate; plain text is not tried",
                metadata=metadata,
            )
        case StatusCode.UNAVAILABLE:
            return UnavailableError(
                f"cannot reach {target}" + (f": {message}" if message else ""),
                reason="ENDPOINT_UNREACHABLE",
                hint=f"check that the service runs and that {target} is its gRPC endpoint",
                metadata=metadata,
            )
        case StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(
                f"no answer from {target} within the deadline",
                hint=f"check that {target} is reachable and not overloaded, or allow more time",
                metadata=metadata,
            )
        case StatusCode.RESOURCE_EXHAUSTED if "larger than max" in message:
            return ResourceExhaustedError(
                f"a message is larger than {target} or this client accepts",
                reason="MESSAGE_TOO_LARGE",
                hint="send less in one request, or ask for smaller pages",
                metadata=metadata,
            )
    if code == grpc.StatusCode.UNIMPLEMENTED.value[0]:
        return InternalError(
            f"{target} does not serve this method",
            reason="UNIMPLEMENTED",
            hint=f"check that {target} is the right service, of the same release as this client",
            metadata=metadata,
        )
    if code == grpc.StatusCode.CANCELLED.value[0]:
        # Nobody here cancels a call and asks how it went: a server that drains ends so what came at the last moment.
        return UnavailableError(
            f"{target} ended the call before it was answered",
            reason="CANCELLED",
            hint="send it again, with the same request_id; what is sent twice is then done once",
            metadata=metadata,
        )
    return error_from_status(code, message or f"{target} failed without saying why", metadata=metadata)


def _received_status(trailing: Iterable[Any] | None, code: int) -> status_pb2.Status | None:
    """The status in trailing metadata; None if there is none, it is garbled, or it contradicts the call's own code."""
    for entry in trailing or ():
        key, value = entry[0], entry[1]
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes) and len(value) <= _STATUS_MAX_BYTES:
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                return None
            return status if status.code == code else None
    return None


def _detail(status: status_pb2.Status | None, empty: _MessageT) -> _MessageT | None:
    """The first detail of the type of ``empty``, which it fills; None if there is none or it is garbled."""
    for packed in status.details if status is not None else ():
        if packed.Is(empty.DESCRIPTOR):
            try:
                empty.ParseFromString(packed.value)
            except DecodeError:
                return None
            return empty
    return None


def _retry_after_ms(retry: error_details_pb2.RetryInfo) -> int:
    return min(max(int(retry.retry_delay.ToMilliseconds()), 0), _RETRY_MAX_MS)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())[:_TEXT_MAX_BYTES]


def _cut(text: str, limit_bytes: int) -> str:
    """At most ``limit_bytes`` of UTF-8, never half a character; what has no UTF-8 form is replaced."""
    return text.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")
