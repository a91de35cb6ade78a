"""OpenTelemetry traces, where they are wanted: with the extra ``otel`` and the standard ``OTEL_*`` environment.

Nothing of OpenTelemetry is imported before :func:`start` finds that it is wanted, or before the application has done so
itself; until then a span is one call that returns at once. What goes into an attribute is chosen here and where spans
are made, one by one: never a message, metadata, a token or a key.

::

    saltern tenant create ──traceparent──> TenantService/CreateTenant      application ──traceparent──> ExchangeApiKey
    (a span for each command)              (a span for each call)          (whatever span is current there)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from saltern.errors import SalternError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from opentelemetry.trace import Tracer

TRACEPARENT: Final = "traceparent"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NOTHING: Final = nullcontext()


@dataclass(slots=True)
class _Tracing:
    """Of this process."""

    tracer: Tracer | None = None


_tracing = _Tracing()

logger = logging.getLogger("saltern")


def is_on() -> bool:
    """Whether spans go anywhere."""
    return _tracing.tracer is not None


def is_wanted() -> bool:
    """Whether the environment asks for traces: it names where they go, and does not say that there are to be none."""
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_none = os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    return not is_disabled and not is_none and any(os.environ.get(name) for name in _ENDPOINTS)


def start(service_name: str) -> Callable[[], None]:
    """Begin to trace if that is wanted; returns what ends it, which sends what is left.

    Everything else is OpenTelemetry's own environment: endpoint, headers, certificate, sampler, OTEL_SERVICE_NAME.
    """
    if not is_wanted():
        return _do_nothing
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning("traces are asked for by OTEL_* and cannot be made: install the extra otel")
        return _do_nothing
    return start_with(BatchSpanProcessor(OTLPSpanExporter()), service_name)


def start_with(processor: Any, service_name: str) -> Callable[[], None]:
    """As :func:`start`, with a span processor of one's own; the extra must be there."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider

    # What the environment names the service wins.
    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or service_name})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(processor)
    _tracing.tracer = provider.get_tracer("saltern")

    def stop() -> None:
        _tracing.tracer = None
        provider.shutdown()

    return stop


def span(name: str, **attributes: str | int | bool) -> AbstractContextManager[Any]:
    """A span for the time of the block; nothing where nothing is traced.

    An error that leaves the block is told by its reason alone: a message may quote what a caller sent.
    """
    return _NOTHING if _tracing.tracer is None else _span(_tracing.tracer, name, attributes)


@contextmanager
def _span(tracer: Tracer, name: str, attributes: dict[str, str | int | bool]) -> Iterator[None]:
    with tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield
        except BaseException as error:
            note_error(current, error)
            raise


@contextmanager
def server_span(name: str, traceparent: str, **attributes: str | int | bool) -> Iterator[Any]:
    """A span of a call that is served, as part of the caller's trace; gives it, or None where nothing is traced."""
    if _tracing.tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # Not the caller's tracestate: it is of any content, and would go on to wherever the traces go.
    parent = TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent})
    with _tracing.tracer.start_as_current_span(
        name,
        context=parent,
        kind=SpanKind.SERVER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        yield current


def detached_span(name: str, traceparent: str = "", **attributes: str | int | bool) -> Any:
    """A span of work that takes turns with other work: it is nobody's current one, and the caller ends it.

    Args:
        traceparent: the caller's, if there is one; a trace begins here without.
    """
    from opentelemetry.context import Context
    from opentelemetry.trace import INVALID_SPAN, SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if _tracing.tracer is None:
        return INVALID_SPAN
    parent = TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, Context())
    return _tracing.tracer.start_span(
        name,
        context=parent,
        kind=SpanKind.SERVER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    )


def note_error(current: Any, error: BaseException) -> None:
    """Say in a span how it failed."""
    reason = error.reason if isinstance(error, SalternError) else type(error).__name__
    note_reason(current, reason)


def note_reason(current: Any, reason: str) -> None:
    """Say in a span that it failed, and by which reason."""
    from opentelemetry.trace import Status, StatusCode

    current.set_attribute("error.type", reason)
    current.set_status(Status(StatusCode.ERROR))


def _do_nothing() -> None:
    pass
