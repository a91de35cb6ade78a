"""One database, one unit of work: ``async with database.transaction() as session``.

Everything the service changes happens inside such a block: it commits at the end or, on any exception, not at all
(I11). What the driver raises leaves the block as an error of the tree, so that no caller needs to know the driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from saltern.errors import AbortedError, DeadlineExceededError, InvalidArgumentError, SalternError, UnavailableError

_CONNECT_TIMEOUT_S = 5
_POOL_TIMEOUT_S = 5
_STATEMENT_TIMEOUT_MS = 10_000
_LOCK_TIMEOUT_MS = 5_000
_IDLE_IN_TRANSACTION_TIMEOUT_MS = 30_000
_RETRY_AFTER_MS = 1_000

# SQLSTATE codes (PostgreSQL manual, appendix A) of a transaction that lost against another one.
_LOST_AGAINST_ANOTHER = frozenset({"40001", "40P01", "55P03"})
_QUERY_CANCELED = "57014"
# Classes of codes that mean that the server itself is not usable now: connection lost, out of resources, intervention.
_UNUSABLE_CLASSES = frozenset({"08", "53", "57"})


class Database:
    """The pool of connections. Close it with ``close`` when nothing uses it any more."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        # What a block read stays usable after its commit: answers are built from it.
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """One READ COMMITTED transaction: commits at the end of the block, rolls back on any exception.

        Raises:
            UnavailableError: the database cannot be reached or has no connection to spare.
            AbortedError: a concurrent change won (lock timeout, deadlock); the same request may be sent again.
            DeadlineExceededError: a statement ran past its time limit.
        """
        try:
            async with self._sessions() as session, session.begin():
                yield session
        except SalternError:
            raise
        except (DBAPIError, PoolTimeoutError) as error:
            _raise_translated(error)

    async def ping(self) -> None:
        """Raise UnavailableError unless the database answers."""
        async with self.transaction() as session:
            await session.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()


def connect(url: str, *, pool_connections: int = 10) -> Database:
    """A database of ``url`` (``postgresql://user:password@host:port/name`` or with a socket folder as ``?host=``).

    Connects at the first use, not here. ``pool_connections``: at most so many connections at a time.

    Raises:
        InvalidArgumentError: the URL is not one of a PostgreSQL database.
    """
    engine = create_async_engine(
        sqlalchemy_url(url),
        pool_size=pool_connections,
        max_overflow=0,
        pool_timeout=_POOL_TIMEOUT_S,
        pool_pre_ping=True,
        hide_parameters=True,  # statements may carry wrapped secrets and hashes: not into a log
        connect_args={
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "options": (
                f"-c statement_timeout={_STATEMENT_TIMEOUT_MS} -c lock_timeout={_LOCK_TIMEOUT_MS}"
                f" -c idle_in_transaction_session_timeout={_IDLE_IN_TRANSACTION_TIMEOUT_MS} -c timezone=UTC"
            ),
            "application_name": "saltern-control",
        },
    )
    return Database(engine)


def sqlalchemy_url(url: str) -> str:
    """The form of ``url`` that SQLAlchemy takes, with the psycopg driver; raises InvalidArgumentError."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("postgresql", "postgres"):
        # The URL itself stays out of the message: it may hold a password.
        raise InvalidArgumentError(
            "the database URL is not one of a PostgreSQL database",
            reason="INVALID_DATABASE_URL",
            hint="write postgresql://USER:PASSWORD@HOST:PORT/NAME",
        )
    return parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def _raise_translated(error: DBAPIError | PoolTimeoutError) -> NoReturn:
    """Raise what ``error`` means to a caller; anything unforeseen stays as it is: a fault of ours."""
    if isinstance(error, PoolTimeoutError):
        raise UnavailableError(
            f"no database connection became free within {_POOL_TIMEOUT_S} s",
            reason="DATABASE_BUSY",
            hint="retry; if it persists, allow the control plane more connections",
            retry_after_ms=_RETRY_AFTER_MS,
        ) from error
    state = getattr(error.orig, "sqlstate", None)
    if state in _LOST_AGAINST_ANOTHER:
        raise AbortedError(
            "a concurrent change of the same resources won",
            reason="CONCURRENT_CHANGE",
            hint="send the request again",
            retry_after_ms=_RETRY_AFTER_MS,
        ) from error
    if state == _QUERY_CANCELED:
        raise DeadlineExceededError(
            f"a database statement ran past its limit of {_STATEMENT_TIMEOUT_MS} ms",
            reason="DATABASE_STATEMENT_TIMEOUT",
            hint="retry; if it persists, look at the load of the database",
            retry_after_ms=_RETRY_AFTER_MS,
        ) from error
    connection_lost = isinstance(error, OperationalError | InterfaceError) and state is None
    if connection_lost or error.connection_invalidated or (state or "")[:2] in _UNUSABLE_CLASSES:
        raise UnavailableError(
            "the control plane cannot reach its database",
            reason="DATABASE_UNAVAILABLE",
            hint="check that PostgreSQL runs and that SALTERN_DATABASE_URL is right; nodes go on serving meanwhile",
            retry_after_ms=_RETRY_AFTER_MS,
        ) from error
    raise error
