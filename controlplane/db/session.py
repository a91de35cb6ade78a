"""One database, one unit of work: ``async with database.transaction() as session``.

Everything the service changes happens inside such a block: it commits at the end or, on any exception, not at all
(I11). Each is bound to the rows of its scope before its first statement (I2, ``controlplane.db.row_security``). What
the driver raises passes through as it is; ``controlplane.rpc`` says what it means to a caller.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

import psycopg
from sqlalchemy import URL, Connection, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import AsyncAdaptedQueuePool

from controlplane.db.row_security import TENANT_SETTING, Scope, scope_of_current_caller, setting_of
from controlplane.db.shares import ConnectionShares
from saltern.errors import InvalidArgumentError

_CONNECT_TIMEOUT_S = 5
_POOL_TIMEOUT_S = 5
_STATEMENT_TIMEOUT_MS = 10_000
_LOCK_TIMEOUT_MS = 5_000
#: A control plane that was paused, or cut off, in the middle of a transaction keeps others from its rows for so long.
_IDLE_IN_TRANSACTION_TIMEOUT_MS = 10_000
#: A server that has vanished without a word is noticed within seconds, also by the check of a pooled connection before
#: its use; libpq would wait for TCP, a quarter of an hour. Nothing of it matters on a unix socket.
_VANISHED_SERVER: Final = {
    "tcp_user_timeout": 5_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
_SCOPE: Final = "scope"  # in ``Session.info``
#: Until the end of the transaction. For the driver as it stands: every transaction pays for it, and building it from
#: expressions takes as long again as the round trip.
_SET_TENANT: Final = f"SELECT set_config('{TENANT_SETTING}', %s, true)"


class _ScopedSession(Session):
    """A session whose every transaction is told its scope first."""


@event.listens_for(_ScopedSession, "after_begin")
def _set_scope(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    scope: Scope | None = session.info[_SCOPE]
    if scope is not None:  # none set is none allowed: the setting of a transaction ends with it
        connection.exec_driver_sql(_SET_TENANT, (setting_of(scope),))


class Database:
    """The pool of connections. Close it with ``close`` when nothing uses it any more."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        assert isinstance(engine.pool, AsyncAdaptedQueuePool)
        self._shares = ConnectionShares(engine.pool.size(), _POOL_TIMEOUT_S)
        # What a block read stays usable after its commit: answers are built from it.
        self._sessions = async_sessionmaker(engine, expire_on_commit=False, sync_session_class=_ScopedSession)

    @asynccontextmanager
    async def transaction(
        self,
        scope: Scope | None = None,
        *,
        isolation_level: Literal["READ COMMITTED", "REPEATABLE READ"] = "READ COMMITTED",
    ) -> AsyncIterator[AsyncSession]:
        """One transaction: commits at the end of the block, rolls back on any exception.

        Args:
            scope: whose rows it may touch; by default those of the current caller, and where there is none, no row of
                any tenant (I10).

        Raises:
            sqlalchemy.exc.DBAPIError: the database refused a statement or cannot be reached.
            sqlalchemy.exc.TimeoutError: no connection of the pool became free in time.
            ResourceExhaustedError: TOO_MANY_CALLS: none of the tenant's own share did.
        """
        scope = scope or scope_of_current_caller()
        async with self._shares.of(scope), self._sessions(info={_SCOPE: scope}) as session, session.begin():
            if isolation_level != "READ COMMITTED":
                await session.connection(execution_options={"isolation_level": isolation_level})
            yield session

    @property
    def connections_in_use(self) -> int:
        """How many connections of the pool somebody holds now."""
        pool = self.engine.pool
        assert isinstance(pool, AsyncAdaptedQueuePool)
        return pool.checkedout()

    async def ping(self) -> None:
        """Return if the database answers; raises as ``transaction`` does."""
        async with self.transaction() as session:
            await session.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()


async def driver_of(session: AsyncSession) -> psycopg.AsyncConnection:
    """The driver's own connection in the transaction of ``session``, bound to its scope, for statements as they stand.

    For what is done very often: around a statement SQLAlchemy takes five times as long as the driver alone. What the
    session was told and has not flushed yet is not there.
    """
    connection = await session.connection()
    driver = (await connection.get_raw_connection()).driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)
    return driver


def scope_of_session(session: AsyncSession) -> Scope | None:
    """Whose rows the transaction in progress may touch."""
    scope: Scope | None = session.info.get(_SCOPE)
    return scope


def connect(url: str | URL, *, pool_connections: int = 10) -> Database:
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
        hide_parameters=True,  # statements carry wrapped secrets and hashes: not into a log
        connect_args={
            "connect_timeout": _CONNECT_TIMEOUT_S,
            **_VANISHED_SERVER,
            "options": (
                f"-c statement_timeout={_STATEMENT_TIMEOUT_MS} -c lock_timeout={_LOCK_TIMEOUT_MS}"
                f" -c idle_in_transaction_session_timeout={_IDLE_IN_TRANSACTION_TIMEOUT_MS} -c timezone=UTC"
            ),
            "application_name": "saltern-control",
        },
    )
    return Database(engine)


def sqlalchemy_url(url: str | URL) -> URL:
    """``url`` with the psycopg driver named, as SQLAlchemy takes it; raises InvalidArgumentError."""
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
        ) from None
    return parsed.set(drivername="postgresql+psycopg")
