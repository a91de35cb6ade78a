"""Trims tenants to their soft marks in turns of its own, between those of sessions and after them."""

from __future__ import annotations

from typing import Final

from dataplane.core.cache import CacheCore
from dataplane.core.fair_queue import Flow
from dataplane.core.work import REQUEST_WORK
from dataplane.io.clock import Clock
from dataplane.io.scheduler import Scheduler, Turn

#: Evicted in one turn, or one larger entry: at most 128 entries.
TRIM_BYTES: Final = 512 * 1024
#: Beside a tenant, whose default is 100: the node's idle time and a little more.
_WEIGHT: Final = 10


class Trimmer:
    """Background eviction (see :meth:`CacheCore.trim`), never in a request."""

    __slots__ = ("_clock", "_core", "_flow", "_is_waiting", "_scheduler")

    def __init__(self, scheduler: Scheduler, core: CacheCore, clock: Clock) -> None:
        self._scheduler = scheduler
        self._core = core
        self._clock = clock
        self._flow = Flow[Turn](_WEIGHT)
        self._is_waiting = False

    def look(self) -> None:
        """Begin to trim if there is something to trim; call it after a put."""
        if not self._is_waiting and self._core.is_above_soft_mark:
            self._is_waiting = True
            self._scheduler.ready(self._flow, self)

    def take(self, turn_bytes: int, *, is_alone: bool) -> int:
        """Evict a little; see :class:`~dataplane.io.scheduler.Turn`."""
        self._is_waiting = False
        evicted_bytes = self._core.trim(self._clock.monotonic_ns(), TRIM_BYTES)
        if evicted_bytes:
            self.look()
        return REQUEST_WORK + evicted_bytes
