"""A span for every call that the control plane answers, as part of its caller's trace.

It holds the method, the status and how long it took; nothing of the call itself. See :mod:`saltern.tracing`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from saltern import tracing

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def interceptors() -> list[grpc.aio.ServerInterceptor]:
    """The outermost ones of a server; none where nothing is traced, so that nothing is paid for it."""
    return [TracingInterceptor()] if tracing.is_on() else []


class TracingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps handlers as they come out of the door: every one takes a stream of requests (``saltern.rpc_intake``)."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # a method that is not here: its name is the caller's, and must not become a span's
        method = handler_call_details.method.lstrip("/")
        metadata = handler_call_details.invocation_metadata or ()
        traceparent = next((entry[1] for entry in metadata if entry[0] == tracing.TRACEPARENT), "")
        parent = traceparent if isinstance(traceparent, str) else ""
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.stream_unary is not None:
            inner_call: Any = handler.stream_unary

            async def call(requests: AsyncIterator[Any], context: Context) -> Any:
                with _traced(method, parent, context):
                    return await inner_call(requests, context)

            return grpc.stream_unary_rpc_method_handler(call, **codec)
        # A policy stream lives for days: a span of it would end when nobody looks any more.
        return handler


@contextmanager
def _traced(method: str, parent: str, context: Context) -> Iterator[None]:
    service, _, name = method.partition("/")
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
    with tracing.server_span(method, parent, **attributes) as current:
        try:
            yield
        except BaseException as error:
            tracing.note_error(current, error)
            raise
        finally:
            # grpc.aio keeps the number of a status that a call was ended with; None is OK.
            code = context.code()
            number = code.value[0] if isinstance(code, grpc.StatusCode) else code or 0
            current.set_attribute("rpc.grpc.status_code", number)
