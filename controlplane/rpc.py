"""The edge between servicer methods and gRPC: whatever a method raises leaves as one well-formed status.

Servicer methods are written as plain coroutines that return a response or raise an error of :mod:`saltern.errors`;
:func:`unary` and :func:`stream` turn them into what grpc.aio calls. What is not one of ours never reaches the caller:
it is logged whole and answered with a correlation id, because a traceback can hold anything (SQL, values, secrets).
What the database driver raises is translated where transactions end, in :mod:`controlplane.db.session`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc
import structlog

from saltern.errors import InternalError, SalternError
from saltern.rpc_errors import abort

Context = grpc.aio.ServicerContext[Any, Any]
_ServicerT = TypeVar("_ServicerT")
_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")

_log = structlog.get_logger(__name__)


def unary(
    method: Callable[[_ServicerT, _RequestT, Context], Awaitable[_ResponseT]],
) -> Callable[[_ServicerT, _RequestT, Context], Awaitable[_ResponseT]]:
    """Decorate a servicer method of one request and one response."""

    @wraps(method)
    async def guarded(servicer: _ServicerT, request: _RequestT, context: Context) -> _ResponseT:
        try:
            return await method(servicer, request, context)
        except Exception as error:
            await _abort_with(context, error, method.__qualname__)

    return guarded


def stream(
    method: Callable[[_ServicerT, AsyncIterator[_RequestT], Context], AsyncIterator[_ResponseT]],
) -> Callable[[_ServicerT, AsyncIterator[_RequestT], Context], AsyncIterator[_ResponseT]]:
    """Decorate a servicer method that is an asynchronous generator over a stream of requests."""

    @wraps(method)
    async def guarded(
        servicer: _ServicerT, requests: AsyncIterator[_RequestT], context: Context
    ) -> AsyncIterator[_ResponseT]:
        try:
            async for response in method(servicer, requests, context):
                yield response
        except Exception as error:
            await _abort_with(context, error, method.__qualname__)

    return guarded


async def _abort_with(context: Context, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the method has set the status itself
    await abort(context, to_saltern_error(error, method=method))


def to_saltern_error(error: Exception, *, method: str) -> SalternError:
    """The error that a caller may see for ``error``; anything unexpected is logged under the id that it carries."""
    if isinstance(error, SalternError):
        return error
    correlation_id = secrets.token_hex(8)
    _log.error("unexpected error", method=method, correlation_id=correlation_id, exc_info=error)
    return InternalError(
        "the control plane failed unexpectedly",
        reason="UNEXPECTED",
        hint=f"look for correlation id {correlation_id} in the log of the control plane",
        metadata={"correlation_id": correlation_id},
    )
