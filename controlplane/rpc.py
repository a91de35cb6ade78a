"""The edge between servicer methods and gRPC: whatever a method raises leaves as one well-formed status.

Servicer methods are written as plain coroutines that return a response or raise an error of :mod:`saltern.errors`;
:func:`unary` and :func:`stream` turn them into what grpc.aio calls. What is not one of ours never reaches the caller:
it is logged whole and answered with a correlation id, because a traceback can hold anything (SQL, values, secrets).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, Final, NoReturn, TypeVar

import grpc
import psycopg
import sqlalchemy.exc
import structlog
from sqlalchemy.exc import DBAPIError

from saltern.errors import AbortedError, InternalError, SalternError, UnavailableError
from saltern.rpc_errors import abort

Context = grpc.aio.ServicerContext[Any, Any]
_ServicerT = TypeVar("_ServicerT")
_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")

DATABASE_RETRY_AFTER_MS: Final = 1000
#: SQLSTATE classes that say "the database is not there or has no room now", not "the statement is wrong":
#: 08 connection exception, 53 insufficient resources, 57 operator intervention (shutdown, statement timeout).
_UNAVAILABLE_CLASSES: Final = frozenset({"08", "53", "57"})
#: 40001 serialization failure, 40P01 deadlock, 55P03 lock not available: a concurrent change won.
_CONFLICT_STATES: Final = frozenset({"40001", "40P01", "55P03"})

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
    if is_database_unavailable(error):
        _log.warning("database unavailable", method=method, error_type=type(error).__name__, sqlstate=_sqlstate(error))
        return UnavailableError(
            "the control plane cannot reach its database",
            reason="DATABASE_UNAVAILABLE",
            hint="retry; if it lasts, check the database that SALTERN_DATABASE_URL names",
            retry_after_ms=DATABASE_RETRY_AFTER_MS,
        )
    if _sqlstate(error) in _CONFLICT_STATES:
        return AbortedError(
            "a concurrent change won",
            reason="CONCURRENT_CHANGE",
            hint="read the resource again and retry",
            retry_after_ms=0,
        )
    correlation_id = secrets.token_hex(8)
    _log.error("unexpected error", method=method, correlation_id=correlation_id, exc_info=error)
    return InternalError(
        "the control plane failed unexpectedly",
        reason="UNEXPECTED",
        hint=f"look for correlation id {correlation_id} in the log of the control plane",
        metadata={"correlation_id": correlation_id},
    )


def is_database_unavailable(error: Exception) -> bool:
    """Whether ``error`` means that the database cannot be reached or has no room now; a retry may succeed."""
    if isinstance(error, sqlalchemy.exc.TimeoutError | psycopg.errors.ConnectionTimeout):
        return True  # no connection of the pool came free in time
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    sqlstate = _sqlstate(error)
    if sqlstate:
        return sqlstate[:2] in _UNAVAILABLE_CLASSES
    # Without an SQLSTATE no server has answered: the connection could not be made, or broke.
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, psycopg.OperationalError)


def _sqlstate(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return (cause.sqlstate or "") if isinstance(cause, psycopg.Error) else ""
