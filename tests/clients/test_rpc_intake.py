"""Messages of a call, one or a stream of them, that are none: each a typed error that says what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from saltern.errors import InvalidArgumentError, ResourceExhaustedError, SalternError
from saltern.rpc_errors import error_from_rpc
from saltern.rpc_intake import MessageLimits, take_in

LIMITS = MessageLimits(bytes_max=64, fields_max=8, wait_s=5)
GARBAGE = b"\x0a\xff\xff\xff\xff\x0f"


class Door(grpc.aio.ServerInterceptor):
    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        @asynccontextmanager
        async def everybody(_context: Any) -> AsyncIterator[None]:
            yield

        return take_in(await continuation(handler_call_details), everybody, LIMITS)


async def echo(request: Timestamp, context: Any) -> Timestamp:
    return request


async def echo_each(requests: AsyncIterator[Timestamp], context: Any) -> AsyncIterator[Timestamp]:
    """A service that knows nothing of our errors."""
    async for request in requests:
        yield request


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    codec: Any = {"request_deserializer": Timestamp.FromString, "response_serializer": Timestamp.SerializeToString}
    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo, **codec),
        "EchoEach": grpc.stream_stream_rpc_method_handler(echo_each, **codec),
    }
    server = grpc.aio.server(interceptors=[Door()])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            yield opened
    finally:
        await server.stop(None)


async def exchange(channel: grpc.aio.Channel, method: str, *messages: bytes) -> list[bytes] | SalternError:
    """What came back; each message is sent when the one before is answered."""
    call: Any = channel.stream_stream(f"/test.Echo/{method}")(timeout=10)
    answers = []
    try:
        for message in messages:
            await call.write(message)
            if (answer := await call.read()) is not grpc.aio.EOF:
                answers.append(answer)
        await call.done_writing()
        while (answer := await call.read()) is not grpc.aio.EOF:
            answers.append(answer)
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    return answers


async def test_messages_of_a_stream_arrive_as_they_were_sent(channel: grpc.aio.Channel) -> None:
    first, second = Timestamp(seconds=1).SerializeToString(), Timestamp(seconds=2).SerializeToString()
    assert await exchange(channel, "EchoEach", first, second) == [first, second]


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (GARBAGE, InvalidArgumentError, "MALFORMED_REQUEST"),
        (bytes(65), ResourceExhaustedError, "MESSAGE_TOO_LARGE"),
        (b"\x08\x01" * 9, ResourceExhaustedError, "MESSAGE_TOO_LARGE"),
    ],
)
async def test_a_message_of_a_stream_that_is_none_ends_it_with_a_reason(
    channel: grpc.aio.Channel, before: int, message: bytes, kind: type[SalternError], reason: str
) -> None:
    good = [Timestamp(seconds=1).SerializeToString()] * before
    error = await exchange(channel, "EchoEach", *good, message)
    assert isinstance(error, kind) and error.reason == reason
    assert error.hint


async def test_a_call_without_a_request_is_told_to_send_one(channel: grpc.aio.Channel) -> None:
    error = await exchange(channel, "Echo")
    assert isinstance(error, InvalidArgumentError) and error.reason == "MALFORMED_REQUEST"
    assert error.hint
