"""A channel whose calls carry the current span on; apart from :mod:`saltern.tracing`, which a command line starts with.

The command line shows its help without loading gRPC: that alone takes longer than all the rest of it.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

import grpc

from saltern.tracing import TRACEPARENT

_API: Final = "opentelemetry.trace"


def traced(channel: grpc.Channel) -> grpc.Channel:
    """The same channel; where the process traces at all, its calls carry on the span that is current then."""
    return grpc.intercept_channel(channel, _Propagation()) if _API in sys.modules else channel


class _Details(NamedTuple):
    """What gRPC asks of the details of a call."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Propagation(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(_with_context(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(_with_context(client_call_details), request)


def _with_context(details: Any) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    if TRACEPARENT not in carrier:
        return details  # no span is current
    metadata = [*(details.metadata or ()), (TRACEPARENT, carrier[TRACEPARENT])]
    return _Details(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready, details.compression
    )
