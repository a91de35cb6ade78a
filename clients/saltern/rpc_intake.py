"""How a grpc.aio server takes in a call: who calls is known before the message is read, and the message is bounded.

gRPC by itself reads a whole message before it asks anybody, waits for it without end, and parses whatever came. So a
caller who is nobody could hold memory and places, and two bytes on the wire can become fifty in memory. A handler of a
request *stream* is called before anything is received; so every handler is turned into one, and reads its message here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc

from saltern.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError, SalternError
from saltern.rpc_errors import abort

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
#: Entered before the message is read, left when the call has ended; refuses the call by ending it with a status.
Admission: TypeAlias = Callable[[Context], AbstractAsyncContextManager[Any]]

_VARINT_MAX_BYTES: Final = 10


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """What the one message of a unary call may cost.

    Attributes:
        bytes_max: its length.
        fields_max: how many fields it has at its top level, each element of a list counted: what costs memory and time
            when it is parsed, whatever its length. None where callers are trusted with that.
        wait_s: how long it may take to arrive.
    """

    bytes_max: int
    fields_max: int | None
    wait_s: float


def take_in(handler: Handler, admission: Admission, limits: MessageLimits) -> Handler:
    """The same handler, behind ``admission`` and ``limits``; of a stream of requests each message is held to these,
    but for the wait: it may come whenever it likes."""
    if handler.stream_stream is not None:
        inner_stream: Any = handler.stream_stream

        async def follow(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async with admission(context):
                try:
                    async for response in inner_stream(_parsed(requests, handler, limits), context):
                        yield response
                except SalternError as error:  # a service that is not ours does not know them
                    await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(follow, response_serializer=handler.response_serializer)
    if handler.unary_stream is not None:
        inner_watch: Any = handler.unary_stream

        async def watch(_requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async with admission(context):
                responses = inner_watch(await _read(context, handler, limits), context)
                if inspect.isawaitable(responses):  # it writes to the context itself
                    await responses
                    return
                async for response in responses:
                    yield response

        return grpc.stream_stream_rpc_method_handler(watch, response_serializer=handler.response_serializer)
    assert handler.unary_unary is not None, "no service here takes a stream of requests for one response"
    inner_unary: Any = handler.unary_unary

    async def call(_requests: AsyncIterator[bytes], context: Context) -> Any:
        async with admission(context):
            return await inner_unary(await _read(context, handler, limits), context)

    return grpc.stream_unary_rpc_method_handler(call, response_serializer=handler.response_serializer)


async def _read(context: Context, handler: Handler, limits: MessageLimits) -> Any:
    """The request; ends the call with a status if it does not come, is too large or is no message."""
    try:
        async with asyncio.timeout(limits.wait_s):
            # Read from the context: an iterator that is left before its end costs a task to close it.
            message = await context.read()
        return _parse(None if message is grpc.aio.EOF else message, handler, limits)
    except TimeoutError:
        slow = DeadlineExceededError(
            f"the request did not arrive within {limits.wait_s:g} s",
            reason="REQUEST_TOO_SLOW",
            hint="send the message together with the call",
        )
        await abort(context, slow)
    except SalternError as error:
        await abort(context, error)


async def _parsed(requests: AsyncIterator[bytes], handler: Handler, limits: MessageLimits) -> AsyncIterator[Any]:
    """Each message of a stream; raises SalternError at one that is too large or is no message."""
    async for message in requests:
        yield _parse(message, handler, limits)


def _parse(message: bytes | None, handler: Handler, limits: MessageLimits) -> Any:
    if message is None:
        raise InvalidArgumentError(
            "the call ended without a request", reason="MALFORMED_REQUEST", hint="send one message with the call"
        )
    if len(message) > limits.bytes_max:
        raise ResourceExhaustedError(
            f"the request is {len(message)} bytes, above the limit of {limits.bytes_max}",
            reason="MESSAGE_TOO_LARGE",
            hint="send less in one request",
            metadata={"limit_bytes": str(limits.bytes_max)},
        )
    if limits.fields_max is not None and has_more_fields(message, limits.fields_max):
        raise ResourceExhaustedError(
            f"the request has more than {limits.fields_max} elements",
            reason="MESSAGE_TOO_LARGE",
            hint="send fewer elements in one request",
            metadata={"limit_elements": str(limits.fields_max)},
        )
    deserialize = handler.request_deserializer
    try:
        return deserialize(message) if deserialize is not None else message
    except Exception:  # protobuf's own DecodeError, or a ValueError of a wrong UTF-8
        raise InvalidArgumentError(
            "the request is not a message of this method", reason="MALFORMED_REQUEST", hint="see proto/saltern"
        ) from None


def has_more_fields(message: bytes, fields_max: int) -> bool:
    """Whether a protobuf message has more than ``fields_max`` fields at its top level, without parsing it.

    Looks at no more than that many; what is malformed is left to the parser, which stops there as well.
    """
    at, end, fields = 0, len(message), 0
    while at < end:
        fields += 1
        if fields > fields_max:
            return True
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:  # varint
                _, at = _varint(message, at)
            case 1:  # 64 bits
                at += 8
            case 2:  # bytes, text, messages
                length, at = _varint(message, at)
                at += length
            case 5:  # 32 bits
                at += 4
            case _:
                return True  # a group, which no message here has: it could hide any number of fields
    return False


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends; the end of the message where it is cut off or too long."""
    value = 0
    for index, byte in enumerate(message[at : at + _VARINT_MAX_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    return 0, len(message)
