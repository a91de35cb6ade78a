"""Housekeeping of the core in turns of its own, between those of sessions: what policies left to do, and soft marks."""

from __future__ import annotations

from typing import Final

from dataplane.core.cache import CacheCore
from dataplane.core.fair_queue import Flow
from dataplane.core.work import REQUEST_WORK
from dataplane.io.clock import Clock
from dataplane.io.scheduler import Scheduler, Turn
from tenants.quota import WEIGHT_DEFAULT

#: Evicted or freed in one turn, or one larger entry: at most 128 entries.
TRIM_BYTES: Final = 512 * 1024
#: Beside a tenant, whose default is 100: the node's idle time and a little more.
_WEIGHT: Final = 10


class Trimmer:
    """Background eviction (:meth:`CacheCore.work_off`, then :meth:`CacheCore.trim`), never in a request.

    What a policy left to do has a tenant's share of the node, since a lowered limit is to be met soon (I4).
    """

    __slots__ = ("_clock", "_core", "_flow", "_is_waiting", "_scheduler")

    def __init__(self, scheduler: Scheduler, core: CacheCore, clock: Clock) -> None:
        self._scheduler = scheduler
        self._core = core
        self._clock = clock
        self._flow = Flow[Turn](_WEIGHT)
        self._is_waiting = False

    def look(self) -> None:
        """Begin if there is something to do; call it after a put, and after a policy."""
        if self._is_waiting:
            return
        has_arrears = self._core.has_arrears
        if has_arrears or self._core.is_above_soft_mark:
            self._flow.weight = WEIGHT_DEFAULT if has_arrears else _WEIGHT
            self._is_waiting = True
            self._scheduler.ready(self._flow, self)

    def take(self, turn_bytes: int, *, is_alone: bool) -> int:
        """Do a little; see :class:`~dataplane.io.scheduler.Turn`."""
        self._is_waiting = False
        now_ns = self._clock.monotonic_ns()
        if self._core.has_arrears:
            self._core.work_off(now_ns, TRIM_BYTES)
            self.look()
            return REQUEST_WORK + TRIM_BYTES
        evicted_bytes = self._core.trim(now_ns, TRIM_BYTES)
        if evicted_bytes:
            self.look()
        return REQUEST_WORK + evicted_bytes
