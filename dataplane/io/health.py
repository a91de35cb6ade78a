"""The node's health, watched: the standard gRPC health service tells what ``/readyz`` tells, and changes are logged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataplane.metrics.health import Health, HealthState
from saltern.cache.v1 import cache_pb2

_log = structlog.get_logger(__name__)
#: How often the node is judged anew when nothing announces a change.
_PERIOD_S: Final = 0.5
CACHE_SERVICE: Final = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
#: Whose health is told: the whole node's, and that of its one service, which are the same.
_SERVICES: Final = frozenset({"", CACHE_SERVICE})

_Response = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Any, Any]


class HealthWatch:
    """Judges the node again and again and wakes whoever waits for a change.

    Args:
        judge: says how the node is now.
    """

    def __init__(self, judge: Callable[[], Health]) -> None:
        self._judge = judge
        self.current = judge()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Begin; call it on the running loop."""
        self.refresh()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self.start)

    def close(self) -> None:
        """Stop; idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def refresh(self) -> Health:
        """Judge now; call it where something has changed."""
        before, now = self.current, self._judge()
        self.current = now
        reasons = [finding.reason for finding in now.findings]
        if now.state is not before.state or reasons != [finding.reason for finding in before.findings]:
            log = _log.warning if now.state is HealthState.DEGRADED else _log.info
            log("health changed", state=now.state.value, before=before.state.value, reasons=reasons)
            self._changed.set()
            self._changed = asyncio.Event()
        return now

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()


class HealthService(health_pb2_grpc.HealthServicer):
    """``grpc.health.v1.Health``; a watch ends when the node drains, so that it does not hold the node up."""

    def __init__(self, watch: HealthWatch) -> None:
        self._watch = watch

    async def Check(  # noqa: N802 - the name is the contract's
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> _Response:
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _Response(status=_status(self._watch.refresh()))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, _context: Context
    ) -> AsyncIterator[_Response]:
        if request.service not in _SERVICES:
            yield _Response(status=_Response.SERVICE_UNKNOWN)
            return
        told: int | None = None
        while True:
            health = self._watch.current
            status = _status(health)
            if status != told:
                told = status
                yield _Response(status=status)
            if health.state is HealthState.DRAINING:
                return
            if health is self._watch.current:
                await self._watch.changed()


def _status(health: Health) -> int:
    return _Response.SERVING if health.is_ready else _Response.NOT_SERVING
