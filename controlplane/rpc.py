"""The edge between servicer methods and gRPC: whatever a method raises leaves as one well-formed status.

Servicer methods are written as plain coroutines that return a response or raise an error of :mod:`saltern.errors`;
:func:`unary`, :func:`stream` and :func:`server_stream` turn them into what grpc.aio calls. What is not one of ours
never reaches the caller: it is logged whole and answered with a correlation id, because a traceback can hold anything
(SQL, values, secrets). What the database driver raises passes through transactions as it is; here it gets its meaning
for the caller.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, Final, NoReturn, TypeVar

import grpc
import psycopg
import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from saltern.errors import AbortedError, DeadlineExceededError, InternalError, SalternError, UnavailableError
from saltern.rpc_errors import abort

Context = grpc.aio.ServicerContext[Any, Any]
_ServicerT = TypeVar("_ServicerT")
_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")

RETRY_AFTER_MS: Final = 1000
#: SQLSTATE codes (PostgreSQL manual, appendix A) of a transaction that lost against another: serialization failure,
#: deadlock, lock not available in time.
_CONFLICT_STATES: Final = frozenset({"40001", "40P01", "55P03"})
_QUERY_CANCELED: Final = "57014"
#: Of the guard of wrapped columns (``migrations.wrapped_columns``).
_KEY_RETIRED: Final = "SK001"
#: Classes that say "not usable now", not "the statement is wrong": connection, resources, operator intervention.
_UNAVAILABLE_CLASSES: Final = frozenset({"08", "53", "57"})

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


def server_stream(
    method: Callable[[_ServicerT, _RequestT, Context], AsyncIterator[_ResponseT]],
) -> Callable[[_ServicerT, _RequestT, Context], AsyncIterator[_ResponseT]]:
    """Decorate a servicer method that is an asynchronous generator of many responses to one request."""

    @wraps(method)
    async def guarded(servicer: _ServicerT, request: _RequestT, context: Context) -> AsyncIterator[_ResponseT]:
        try:
            async for response in method(servicer, request, context):
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
    failure = database_failure(error)
    if failure is not None:
        _log.warning("database failure", method=method, reason=failure.reason, sqlstate=_sqlstate(error))
        return failure
    correlation_id = secrets.token_hex(8)
    _log.error("unexpected error", method=method, correlation_id=correlation_id, exc_info=error)
    return InternalError(
        "the control plane failed unexpectedly",
        reason="UNEXPECTED",
        hint=f"look for correlation id {correlation_id} in the log of the control plane",
        metadata={"correlation_id": correlation_id},
    )


def database_failure(error: Exception) -> SalternError | None:
    """What an error of the driver means to a caller; None for one that only a fault of ours can cause."""
    sqlstate = _sqlstate(error)
    if sqlstate in _CONFLICT_STATES:
        return AbortedError(
            "a concurrent change of the same resources won",
            reason="CONCURRENT_CHANGE",
            hint="send the request again",
            retry_after_ms=RETRY_AFTER_MS,
        )
    if sqlstate == _QUERY_CANCELED:
        return DeadlineExceededError(
            "a database statement ran past its time limit",
            reason="DATABASE_STATEMENT_TIMEOUT",
            hint="retry; if it persists, look at the load of the database",
            retry_after_ms=RETRY_AFTER_MS,
        )
    if sqlstate == _KEY_RETIRED:
        return UnavailableError(
            "the key-encryption key that this control plane wrapped with has just retired",
            reason="KEY_ENCRYPTION_KEY_RETIRED",
            hint="try again: it takes up the new one within a second, if it has it",
            retry_after_ms=RETRY_AFTER_MS,
        )
    if _is_unavailable(error, sqlstate):
        return UnavailableError(
            "the control plane cannot reach its database",
            reason="DATABASE_UNAVAILABLE",
            hint="check that PostgreSQL runs and that SALTERN_DATABASE_URL is right; nodes go on serving meanwhile",
            retry_after_ms=RETRY_AFTER_MS,
        )
    return None


def _is_unavailable(error: Exception, sqlstate: str) -> bool:
    if isinstance(error, PoolTimeoutError) or (isinstance(error, DBAPIError) and error.connection_invalidated):
        return True
    if sqlstate:
        return sqlstate[:2] in _UNAVAILABLE_CLASSES
    # Without an SQLSTATE no statement was answered: the connection could not be made, or broke.
    return isinstance(_cause(error), psycopg.OperationalError | psycopg.InterfaceError)


def _sqlstate(error: Exception) -> str:
    cause = _cause(error)
    return (cause.sqlstate or "") if isinstance(cause, psycopg.Error) else ""


def _cause(error: Exception) -> BaseException | None:
    return error.orig if isinstance(error, DBAPIError) else error
