"""Connections of the pool, of which no tenant takes so many that others wait for it (I10).

A tenant may have many calls in progress (``controlplane.auth.door``). Each of them needs a connection for a moment, and
locks that they hold against each other make the moments long. Here they wait for each other, in the order in which they
came, and the rest of the pool is there for everybody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from controlplane.db.row_security import Scope, TenantScope
from saltern.errors import ResourceExhaustedError
from saltern.names import TenantId

#: Of the pool's connections, what one tenant may have at a time.
_SHARE: Final = 0.4


class ConnectionShares:
    """Who waits for a connection of the tenant's share.

    Args:
        connections: of the pool.
        wait_s: for a connection of the share, at most.
    """

    def __init__(self, connections: int, wait_s: float) -> None:
        self._share = max(1, int(connections * _SHARE))
        self._wait_s = wait_s
        self._lines: dict[TenantId, _Line] = {}

    @asynccontextmanager
    async def of(self, scope: Scope | None) -> AsyncIterator[None]:
        """A place for a transaction of ``scope``, for the time of the block; only a tenant's waits for one.

        Raises:
            ResourceExhaustedError: TOO_MANY_CALLS: none came free in time.
        """
        if not isinstance(scope, TenantScope):
            yield
            return
        line = self._lines.setdefault(scope.tenant, _Line(self._share))
        line.length += 1
        try:
            await self._take(line)
            try:
                yield
            finally:
                line.places.release()
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[scope.tenant]

    async def _take(self, line: _Line) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await line.places.acquire()
        except TimeoutError:
            raise ResourceExhaustedError(
                f"{self._share} transactions of this tenant are in progress already, and none ended in time",
                reason="TOO_MANY_CALLS",
                hint="wait for answers before making more calls",
                retry_after_ms=1000,
                metadata={"limit_transactions": str(self._share)},
            ) from None


class _Line:
    """Of one tenant: its places, and how many have or want one."""

    __slots__ = ("length", "places")

    def __init__(self, share: int) -> None:
        self.places = asyncio.Semaphore(share)
        self.length = 0
