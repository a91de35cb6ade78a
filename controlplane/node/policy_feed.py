"""Wakes the policy streams of this process when the policy has changed.

One connection for the whole process LISTENs for the notification that every change sends at its commit. A notification
is only a hint to look: what counts is ``policy_state.version``, read after each one and at least every five seconds, so
a lost notification or a broken connection delays a push and never loses it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import psycopg
import structlog
from psycopg import sql
from sqlalchemy import make_url

from controlplane.db import POLICY_CHANNEL, sqlalchemy_url
from saltern.errors import UnavailableError

POLL_INTERVAL_S: Final = 5.0
DRAIN_RETRY_AFTER_MS: Final = 1000
_NEVER: Final = 2**63
_RECONNECT_DELAY_S: Final = 1.0
_CONNECT_TIMEOUT_S: Final = 5

_log = structlog.get_logger(__name__)


class PolicyFeed:
    """The newest policy version that this process has seen; coroutines wait for it to grow.

    Args:
        database_url: the URL of the application role.
    """

    def __init__(self, database_url: str) -> None:
        # libpq reads the same URL once SQLAlchemy's driver name is out of it.
        url = make_url(sqlalchemy_url(database_url)).set(drivername="postgresql")
        self._conninfo = url.render_as_string(hide_password=False)
        self._version = 0
        self._draining = False
        self._answers = 0
        self._changed = asyncio.Condition()

    async def wait_past(self, version: int) -> int:
        """Return the newest version as soon as it is above ``version``.

        Raises:
            UnavailableError: this process drains; the streams that wait here end.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._draining or self._version > version)
        self._require_serving()
        return self._version

    def _require_serving(self) -> None:
        if self._draining:
            raise UnavailableError(
                "the control plane is stopping",
                reason="DRAINING",
                hint="connect again; go on with the last policy meanwhile",
                retry_after_ms=DRAIN_RETRY_AFTER_MS,
            )

    async def answered(self) -> None:
        """A node has said which policy it goes by."""
        async with self._changed:
            self._answers += 1
            self._changed.notify_all()

    async def wait_answer(self, timeout_s: float) -> None:
        """Return when a node of this process has answered, or after ``timeout_s``; raises as :meth:`wait_past`."""
        before = self._answers
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._draining or self._answers != before)
        self._require_serving()

    async def drained(self) -> None:
        """Wait until this process drains, and raise that as :meth:`wait_past` does."""
        await self.wait_past(_NEVER)

    async def drain(self) -> None:
        """End everything that waits, now and later."""
        async with self._changed:
            self._draining = True
            self._changed.notify_all()

    async def run(self) -> None:
        """Follow the database until cancelled; connects again after any failure."""
        while True:
            try:
                await self._follow()
            except psycopg.Error as error:
                _log.warning("policy feed lost its database connection", error_type=type(error).__name__)
            await asyncio.sleep(_RECONNECT_DELAY_S)

    async def _follow(self) -> None:
        connection = await psycopg.AsyncConnection.connect(
            self._conninfo,
            autocommit=True,
            connect_timeout=_CONNECT_TIMEOUT_S,
            application_name="saltern-control-policy-feed",
            # Notices a peer that vanished without a word (pulled cable), which a LISTEN would wait for until its poll.
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
        )
        async with connection:
            # LISTEN before the first read: a change between the two is then notified.
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(POLICY_CHANNEL)))
            while True:
                await self._read_version(connection)
                async for _ in connection.notifies(timeout=POLL_INTERVAL_S, stop_after=1):
                    pass

    async def _read_version(self, connection: psycopg.AsyncConnection[tuple[int]]) -> None:
        cursor = await connection.execute("SELECT version FROM policy_state")
        row = await cursor.fetchone()
        if row is not None and row[0] > self._version:
            async with self._changed:
                self._version = row[0]
                self._changed.notify_all()
