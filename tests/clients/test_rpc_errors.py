"""Errors survive the trip over a real gRPC connection, and what is not ours degrades to something that helps."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from saltern import errors
from saltern.rpc_errors import STATUS_DETAILS_KEY, abort, error_from_rpc, grpc_status_code, status_from_error

METHOD = "/test.Echo/Call"
Servicer = Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], Awaitable[bytes]]


def every_error_class() -> list[type[errors.SalternError]]:
    """Of the tree that may cross the network; what a tool makes of it for itself is not sent."""
    found, queue = [], [errors.SalternError]
    while queue:
        queue.extend(subclasses := queue.pop().__subclasses__())
        found.extend(subclasses)
    tree = {kind for kind in found if kind.__module__ == errors.__name__}
    return sorted(tree, key=lambda kind: kind.__name__)


@asynccontextmanager
async def serving(servicer: Servicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("test.Echo", {"Call": grpc.unary_unary_rpc_method_handler(servicer)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call_async(endpoint: str, timeout_s: float = 20, payload: bytes = b"") -> grpc.RpcError:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary(METHOD)(payload, timeout=timeout_s)
        return caught.value


def call_sync(endpoint: str) -> grpc.RpcError:
    with grpc.insecure_channel(endpoint) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(METHOD)(b"", timeout=20)
    return caught.value


def refusing_with(error: errors.SalternError) -> Servicer:
    async def servicer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await abort(context, error)

    return servicer


async def test_every_error_class_comes_back_whole() -> None:
    kinds = every_error_class()
    assert len(kinds) >= 14
    for kind in kinds:
        reason = kind.default_reason if kind.default_reason in errors._BY_REASON else "SOME_REASON"
        sent = kind(
            f"wanted x, ünd {kind.__name__} refused it",
            reason=reason,
            hint="do something else",
            metadata={"tenant": "acme", "used_bytes": "12"},
            retry_after_ms=1234,
        )
        async with serving(refusing_with(sent)) as endpoint:
            for raw in (await call_async(endpoint), await asyncio.to_thread(call_sync, endpoint)):
                received = error_from_rpc(raw, endpoint=endpoint)
                assert type(received) is kind
                assert vars(received) == vars(sent)
                assert raw.code() is grpc_status_code(sent)


async def test_no_retry_info_means_no_retry() -> None:
    async with serving(refusing_with(errors.NotFoundError("no such thing"))) as endpoint:
        received = error_from_rpc(await call_async(endpoint))
    assert (received.retry_after_ms, received.hint, received.metadata) == (None, "", {})


async def test_oversized_errors_still_arrive_with_their_reason() -> None:
    sent = errors.ResourceExhaustedError(
        "m" * 100_000 + "\ud800",
        hint="ü" * 100_000,
        metadata={f"key-{i}" * 1000: "v" * 100_000 for i in range(1000)},
    )
    async with serving(refusing_with(sent)) as endpoint:
        received = error_from_rpc(await call_async(endpoint))
    assert type(received) is errors.ResourceExhaustedError
    assert received.reason == "QUOTA_EXCEEDED"
    assert received.message == "m" * 512
    assert set(received.hint) == {"ü"}


def _status(code: int, *details: Any) -> bytes:
    status = status_pb2.Status(code=code, message="theirs")
    for detail in details:
        status.details.add().Pack(detail)
    return status.SerializeToString()


_FOREIGN_INFO = error_details_pb2.ErrorInfo(reason="NOT_OURS", domain="example.com", metadata={"a": "b"})


@pytest.mark.parametrize(
    "details",
    [
        b"",
        b"\xff\xfe\xfd garbage \x00",
        _status(5),
        _status(5, _FOREIGN_INFO),
        _status(5, error_details_pb2.RetryInfo()),
        # Contradicts the call's own code: none of it is believed.
        _status(7, error_details_pb2.ErrorInfo(reason="PERMISSION_DENIED", domain="saltern")),
        b"\x0a" * 70_00,
    ],
)
async def test_foreign_or_garbled_details_degrade_to_the_plain_code(details: bytes) -> None:
    async def servicer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "gone\nfishing", ((STATUS_DETAILS_KEY, details),))

    async with serving(servicer) as endpoint:
        received = error_from_rpc(await call_async(endpoint), endpoint=endpoint)
    assert type(received) is errors.NotFoundError
    assert (received.message, received.reason) == ("gone fishing", "NOT_FOUND")
    assert received.metadata == {"endpoint": endpoint}


async def test_a_garbled_detail_inside_a_good_status_is_ignored() -> None:
    status = status_from_error(errors.NotFoundError("no such tenant", reason="NO_TENANT", hint="look again"))
    status.details[1].value = b"\xff\xff\xff"

    async def servicer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        trailer = ((STATUS_DETAILS_KEY, status.SerializeToString()),)
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such tenant", trailer)

    async with serving(servicer) as endpoint:
        received = error_from_rpc(await call_async(endpoint))
    assert (received.reason, received.hint) == ("NO_TENANT", "")


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
async def test_every_grpc_code_becomes_an_error_of_the_tree(code: grpc.StatusCode) -> None:
    async def servicer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await context.abort(code)

    async with serving(servicer) as endpoint:
        received = error_from_rpc(await call_async(endpoint), endpoint=endpoint)
    expected = errors.StatusCode.INTERNAL
    if code.value[0] in errors.StatusCode.__members__.values():
        expected = errors.StatusCode(code.value[0])
    if code is grpc.StatusCode.CANCELLED:  # how a server that drains ends what came at the last moment: to be retried
        expected = errors.StatusCode.UNAVAILABLE
    assert received.code == expected
    assert received.message


async def test_i10_an_unreachable_endpoint_is_unavailable_and_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nothing else can take it meanwhile
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        received = error_from_rpc(await call_async(endpoint), endpoint=endpoint)
    assert type(received) is errors.UnavailableError
    assert received.reason == "ENDPOINT_UNREACHABLE"
    assert endpoint in received.hint
    assert "\n" not in str(received)


async def test_i10_a_silent_endpoint_is_a_deadline_and_named() -> None:
    released = asyncio.Event()

    async def servicer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await released.wait()
        return b""

    async with serving(servicer) as endpoint:
        received = error_from_rpc(await call_async(endpoint, timeout_s=0.05), endpoint=endpoint)
        released.set()
    assert type(received) is errors.DeadlineExceededError
    assert endpoint in received.message
    assert endpoint in received.hint


async def test_a_message_too_large_says_so() -> None:
    async def servicer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return b""

    async with serving(servicer) as endpoint:
        received = error_from_rpc(await call_async(endpoint, payload=bytes(5 * 1024 * 1024)), endpoint=endpoint)
    assert type(received) is errors.ResourceExhaustedError
    assert received.reason == "MESSAGE_TOO_LARGE"


def test_an_error_without_a_status_is_internal() -> None:
    assert error_from_rpc(grpc.RpcError()).reason == "NO_STATUS"
