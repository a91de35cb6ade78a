"""The pace of one gRPC call: let in like any request, in turns with sessions, charged to the same tenant."""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from types import TracebackType
from typing import Self

from dataplane.core.lines import Place
from dataplane.core.work import REQUEST_WORK
from dataplane.io.traffic import Traffic
from saltern.names import TenantId


class CallPace:
    """Use it as a context; leaving it gives back what the call holds and charges its work.

    Attributes:
        served_bytes: entries moved so far; whoever moves them counts.
    """

    def __init__(self, node: Traffic, tenant: TenantId) -> None:
        self._scheduler = node.scheduler
        self._traffic = node.of(tenant)
        self._rate_place: Place | None = None
        self._flight_place: Place | None = None
        self._held_bytes = 0
        self._work = 0
        self._turn_work = 0
        self.served_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.begun(0)
        self._traffic.release(self._held_bytes)
        self._traffic.served_bytes += self.served_bytes
        self._scheduler.charge(self._traffic.flow, self._work)

    async def enter(self, operations: int, payload_bytes: int = 0, *, moves_entries: bool = False) -> None:
        """Wait until the tenant's rates and what its transfers hold let the call begin, and for a first turn.

        Raises:
            ResourceExhaustedError: RATE_LIMITED.
        """
        traffic = self._traffic
        self._rate_place = place = traffic.enter_rates(operations or 1, payload_bytes)
        if place is not None:
            began_ns = monotonic_ns()
            await _wait(place)
            traffic.throttled_ns += monotonic_ns() - began_ns
            refusal = place.take_refusal()
            if refusal is not None:
                try:
                    raise refusal
                finally:
                    del refusal  # what its own traceback leads to would be left to the garbage collector
        if moves_entries:
            self._flight_place = place = traffic.enter_flight()
            if place is not None:
                await _wait(place)
        self._turn_work = await self._scheduler.turn(traffic.flow)
        self._work = REQUEST_WORK

    def begun(self, held_bytes: int) -> None:
        """The call has begun and holds so many bytes of the arena until it ends; idempotent."""
        self._held_bytes += held_bytes
        self._traffic.hold(held_bytes)
        places = self._rate_place, self._flight_place
        self._rate_place = self._flight_place = None
        self._traffic.begun(*places)

    def charge_bytes(self, payload_bytes: int) -> None:
        """Charge bytes to the tenant's rate that were not known at :meth:`enter`."""
        self._traffic.charge_bytes(payload_bytes)

    async def spend(self, work: int) -> None:
        """Account for work done; wait for another turn if this one is over."""
        self._work += work
        if self._work >= self._turn_work:
            self._scheduler.charge(self._traffic.flow, self._work)
            self._work = 0
            self._turn_work = await self._scheduler.turn(self._traffic.flow)


async def _wait(place: Place) -> None:
    over = asyncio.Event()
    place.wake = over.set
    if place.is_waiting:
        await over.wait()
