"""What each tenant asks of the node right now, and how much of it may go on: turns, rates, bytes in flight.

Every door passes a request through here, in this order::

    enter_rates --(wait)--> enter_flight --(wait)--> hold what it pins --> begun --> ... --> release

Waiting costs the tenant's own session and nobody else's; nothing is read from it meanwhile, so its client is held up by
the socket's own flow control.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from dataplane.core.fair_queue import Flow
from dataplane.core.in_flight import InFlight, TenantFlight
from dataplane.core.lines import Place
from dataplane.core.rates import TenantRates
from dataplane.io.clock import Clock
from dataplane.io.scheduler import Scheduler, Turn
from dataplane.settings import SessionLimits
from saltern.names import TenantId
from tenants.policy import NodePolicy, TenantPolicy
from tenants.quota import NO_RATE_LIMITS, WEIGHT_DEFAULT, Tier

_NS: Final = 1_000_000_000


class TenantTraffic:
    """One tenant's share of the node's speed.

    Attributes:
        flow: its place among the others when turns are given.
        rates: its token buckets, with ``rates.delayed`` and ``rates.refused`` requests.
        flight: the bytes that its transfers hold.
        served_bytes: bytes of entries moved to and from its clients; only ever grows.
        throttled_ns: how long its requests have waited for its rates, in all; only ever grows.
    """

    __slots__ = ("_node", "_timer", "flight", "flow", "rates", "served_bytes", "tenant", "throttled_ns")

    def __init__(self, node: Traffic, tenant: TenantId, wait_max_ns: int) -> None:
        self._node = node
        self._timer: asyncio.TimerHandle | None = None
        self.tenant: Final = tenant
        self.flow: Final = Flow[Turn](WEIGHT_DEFAULT)
        self.rates: Final = TenantRates(tenant, wait_max_ns)
        self.flight: Final = TenantFlight(bound_bytes=0)
        self.served_bytes = 0
        self.throttled_ns = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for the tenant's rates or for what its other transfers hold."""
        return len(self.rates.line) + len(self.flight.line)

    def enter_rates(self, operations: int, payload_bytes: int) -> Place | None:
        """Ask to begin a request: None if its tenant owes nothing, else a place to wait at.

        Args:
            operations: entries that it names, at least 1.
            payload_bytes: what it is known to move; tell :meth:`charge_bytes` of what turns up later.

        Raises:
            ResourceExhaustedError: RATE_LIMITED.
        """
        rates = self.rates
        if not rates.is_limited:
            return None
        place = rates.enter(operations, payload_bytes, self._node.clock.monotonic_ns())
        if place is not None and self._timer is None:
            self._pump()
        return place

    def charge_bytes(self, payload_bytes: int) -> None:
        """Charge bytes that a request has turned out to move; negative ones it did not need to move after all."""
        if self.rates.is_limited:
            self.rates.charge(0, payload_bytes, self._node.clock.monotonic_ns())

    def enter_flight(self) -> Place | None:
        """Ask to begin a transfer: None if it may, else a place to wait at."""
        return self._node.in_flight.enter(self.flight)

    def hold(self, size_bytes: int) -> None:
        """A transfer holds so many bytes of the arena until :meth:`release`."""
        self._node.in_flight.hold(self.flight, size_bytes)

    def release(self, size_bytes: int) -> None:
        in_flight = self._node.in_flight
        in_flight.release(self.flight, size_bytes)
        if in_flight.is_waited_for:
            self._node.wake_transfers()

    def begun(self, rate_place: Place | None, flight_place: Place | None) -> None:
        """The request has begun, or has given up; whoever waits behind it may be next."""
        if rate_place is not None:
            self.rates.leave(rate_place)
            self._pump()
        if flight_place is not None:
            self._node.in_flight.leave(self.flight, flight_place)
            self._node.wake_transfers()

    def apply(self, policy: TenantPolicy | None, tenant_share: float) -> None:
        """Take over what the policy says; it holds for requests that wait already, too."""
        quota = None if policy is None else policy.tiers.get(Tier.DRAM)
        self.flow.weight = WEIGHT_DEFAULT if quota is None else quota.weight
        limit_bytes = 0 if quota is None else quota.limit_bytes
        self.flight.bound_bytes = min(int(tenant_share * limit_bytes), self._node.in_flight.bound_bytes // 2)
        limits = NO_RATE_LIMITS if policy is None else policy.rates
        self.rates.set_limits(limits, self._node.clock.monotonic_ns())
        if not self.rates.line.is_empty:
            self._pump()

    def _pump(self) -> None:
        """Let in or refuse who waits for the rates, and look again when the next one is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_ns = self._node.clock.monotonic_ns()
        for place in self.rates.advance(now_ns):
            place.wake()
        due_ns = self.rates.due_ns(now_ns)
        if due_ns is not None:
            self._timer = self._node.scheduler.loop.call_later(due_ns / _NS, self._pump)


class Traffic:
    """The traffic of all tenants that have a session or a call, or had one under the present policy.

    Attributes:
        scheduler: gives the turns.
        unopened: what connections before HELLO share, whoever they belong to.
    """

    def __init__(self, limits: SessionLimits, *, arena_bytes: int, clock: Clock) -> None:
        self.clock: Final = clock
        self.scheduler: Final = Scheduler(turn_bytes=limits.turn_bytes, short_turn_bytes=limits.short_turn_bytes)
        self.unopened: Final = Flow[Turn](limits.unopened_weight)
        self.in_flight: Final = InFlight(int(limits.in_flight_share * arena_bytes))
        self._limits = limits
        self._policy = NodePolicy(version=0)
        self._tenants: dict[TenantId, TenantTraffic] = {}

    @property
    def tenants(self) -> Mapping[TenantId, TenantTraffic]:
        """For whoever looks at it; a tenant that has done nothing yet is not in there."""
        return MappingProxyType(self._tenants)

    def __iter__(self) -> Iterator[TenantTraffic]:
        return iter(self._tenants.values())

    def of(self, tenant: TenantId) -> TenantTraffic:
        """The traffic of a tenant, which the caller has from a verified token (I1)."""
        traffic = self._tenants.get(tenant)
        if traffic is None:
            traffic = self._tenants[tenant] = TenantTraffic(self, tenant, int(self._limits.rate_wait_s * _NS))
            self._apply_to(traffic)
        return traffic

    def apply(self, policy: NodePolicy, *, touched: Collection[TenantId] | None = None) -> None:
        """Take over weights, rates and limits of a new policy, for open sessions too.

        Sessions of a tenant that is gone keep what they have until they are closed; nothing finds it any more.

        Args:
            touched: tenants that may differ from the policy before; None for all.
        """
        self._policy = policy
        for tenant in list(self._tenants) if touched is None else touched:
            traffic = self._tenants.get(tenant)
            if traffic is not None:
                self._apply_to(traffic)
                if tenant not in policy.tenants:
                    del self._tenants[tenant]

    def wake_transfers(self) -> None:
        """Let in transfers that waited for what others held."""
        for place in self.in_flight.advance():
            place.wake()

    def _apply_to(self, traffic: TenantTraffic) -> None:
        policy = self._policy.tenants.get(traffic.tenant)
        traffic.apply(policy, self._limits.tenant_in_flight_share)
