"""From a node's books and meters to metrics, in pieces that the event loop does not feel."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from time import monotonic
from typing import Final

from prometheus_client import GC_COLLECTOR, Metric, ProcessCollector

from dataplane.core.cache import CacheCore
from dataplane.core.usage import NodeUsage, TenantUsage
from dataplane.io.engines.objects import EngineCounts
from dataplane.metrics import catalog, readings
from dataplane.metrics.catalog import FAMILIES, Family, Series
from dataplane.metrics.health import ControlLink, Health, HealthState
from dataplane.metrics.labels import OTHER, Ledger, TenantLabels
from dataplane.metrics.loop_lag import LoopLag
from dataplane.metrics.meters import BUCKETS_S, Histogram, Meters, Transport
from dataplane.metrics.pace import Pace
from dataplane.metrics.readings import Rates, Readings
from saltern.names import TenantId

#: Tenants whose books are taken at once.
_TENANTS_AT_ONCE: Final = 16
#: Families whose numbers are kept in nanoseconds and exposed in seconds.
_IN_NANOSECONDS: Final = frozenset({catalog.TENANT_SECONDS, catalog.RATE_WAIT_SECONDS})
_SSD_STATES: Final = ("ok", "degraded", "read-only", "off")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a store below this node was asked for and gave."""

    name: str
    is_connected: bool
    counts: EngineCounts


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node tells beside its tenants' books, at one moment.

    Attributes:
        policy_applied_unix_s: when the policy in force was applied; 0 before the first.
        ssd_state: None without an SSD tier.
        engine: None where the tier below DRAM is files of this node.
        control: None where nobody follows a control plane.
        rates: of a tenant; None if it has done nothing yet.
    """

    health: Health
    policy_applied_unix_s: float
    ssd_state: str | None
    engine: EngineFacts | None
    control: ControlLink | None
    sessions_by_tenant: Mapping[TenantId, int]
    rates: Callable[[TenantId], Rates | None]
    http_requests: Mapping[int, int]


class NodeCollector:
    """Collects the metrics of one node.

    Args:
        facts: asked once for each collection.
        tenants_max: how many tenants are exposed by name.

    Attributes:
        cost_s: time on the loop that the last page took; set by whoever made it.
    """

    def __init__(
        self,
        core: CacheCore,
        meters: Meters,
        lag: LoopLag,
        *,
        node: str,
        facts: Callable[[], NodeFacts],
        tenants_max: int,
    ) -> None:
        self._core = core
        self._meters = meters
        self._lag = lag
        self._facts = facts
        self._build = (node, version("saltern-server"), platform.python_version())
        self._labels = TenantLabels(tenants_max)
        self._ledger = Ledger()
        self.cost_s = 0.0
        self._process = ProcessCollector(registry=None)

    async def collect(self, pace: Pace) -> list[Metric]:
        """Everything, each tenant as it is at one moment. Not to be called again before it has returned."""
        sheet = _Sheet()
        facts = self._facts()
        self._add_node(sheet, facts)
        self._add_doors(sheet)
        await pace.breathe()
        await self._add_tenants(sheet, facts, pace)
        return [*sheet.metrics.values(), *self._process.collect(), *GC_COLLECTOR.collect()]

    def _add_node(self, sheet: _Sheet, facts: NodeFacts) -> None:
        pool: NodeUsage = self._core.usage(())
        control = facts.control
        sheet.add(catalog.ARENA_BYTES, pool.capacity_bytes)
        sheet.add(catalog.ARENA_FREE_BYTES, pool.free_bytes)
        sheet.add(catalog.ARENA_LARGEST_FREE_BYTES, pool.largest_free_bytes)
        sheet.add(catalog.COMPACTIONS, pool.compactions)
        sheet.add(catalog.MOVED_BYTES, pool.moved_bytes)
        sheet.add(catalog.SSD_CAPACITY_BYTES, pool.ssd_capacity_bytes)
        if facts.ssd_state is not None:
            for state in _SSD_STATES:
                sheet.add(catalog.SSD_STATE, int(state == facts.ssd_state), (state,))
        if facts.engine is not None:
            _add_engine(sheet, facts.engine)
        for (victim, taker), size_bytes in self._core.displaced_bytes().items():
            sheet.add(catalog.DISPLACED_BYTES, size_bytes, (victim, taker))
        sheet.add(catalog.POLICY_VERSION, pool.policy_version)
        sheet.add(catalog.POLICY_APPLIED, facts.policy_applied_unix_s)
        if control is not None:
            sheet.add(catalog.POLICY_REFUSED, int(control.refused_version > 0))
            sheet.add(catalog.CONTROL_CONNECTED, int(control.is_connected))
        for health in HealthState:
            sheet.add(catalog.HEALTH_STATE, int(health is facts.health.state), (health.value,))
        sheet.add_histogram(catalog.LOOP_LAG_SECONDS, self._lag.histogram)
        sheet.add(catalog.LOOP_LAG_MAX_SECONDS, self._lag.worst_s)
        sheet.add(catalog.COLLECTION_SECONDS, self.cost_s)
        for code, count in facts.http_requests.items():
            sheet.add(catalog.HTTP_REQUESTS, count, (str(code),))
        sheet.add(catalog.BUILD, 1, self._build)

    def _add_doors(self, sheet: _Sheet) -> None:
        for transport, door in self._meters.doors.items():
            for operation, histogram in door.histograms.items():
                sheet.add_histogram(catalog.REQUEST_SECONDS, histogram, (transport.value, operation.value))
            for reason, count in door.refused.items():
                sheet.add(catalog.REQUESTS_REFUSED, count, (transport.value, reason))
            if transport is Transport.GRPC:
                continue  # calls, not sessions
            sheet.add(catalog.SESSIONS, door.opened - door.closed.total(), (transport.value,))
            sheet.add(catalog.SESSIONS_OPENED, door.opened, (transport.value,))
            for reason, count in door.closed.items():
                sheet.add(catalog.SESSIONS_CLOSED, count, (transport.value, reason))
            for reason, count in door.turned_away.items():
                sheet.add(catalog.TURNED_AWAY, count, (transport.value, reason))

    async def _add_tenants(self, sheet: _Sheet, facts: NodeFacts, pace: Pace) -> None:
        tenants = self._core.tenants()
        must_choose = self._labels.retain(tenants)
        self._ledger.retain(tenants)
        await pace.breathe()
        if must_choose and self._labels.is_ranking_due(monotonic()):
            await self._rank(tenants, pace)
        others: Readings = {}
        for at in range(0, len(tenants), _TENANTS_AT_ONCE):
            for tenant, usage in self._core.usage(tenants[at : at + _TENANTS_AT_ONCE]).tenants.items():
                self._add_tenant(sheet, tenant, usage, facts, others)
                await pace.breathe()
        if must_choose or self._ledger.other:
            sheet.add_readings(others, OTHER)
            sheet.add_readings(self._ledger.other, OTHER)
        sheet.add(catalog.TENANTS, len(tenants))
        sheet.add(catalog.TENANTS_LABELLED, len(self._labels))

    def _add_tenant(
        self, sheet: _Sheet, tenant: TenantId, usage: TenantUsage, facts: NodeFacts, others: Readings
    ) -> None:
        is_labelled = tenant in self._labels
        rates = facts.rates(tenant)
        gauges = readings.gauges(usage, facts.sessions_by_tenant.get(tenant, 0), rates)
        counted = readings.counters(usage, self._meters.spent(tenant), rates)
        own = self._ledger.account(tenant, counted, is_labelled=is_labelled)
        if is_labelled:
            sheet.add_readings(gauges, tenant)
            sheet.add_readings(own, tenant)
        else:
            for series, value in gauges.items():
                others[series] = others.get(series, 0) + value

    async def _rank(self, tenants: list[TenantId], pace: Pace) -> None:
        for at in range(0, len(tenants), _TENANTS_AT_ONCE):
            for tenant, usage in self._core.usage(tenants[at : at + _TENANTS_AT_ONCE]).tenants.items():
                used_bytes = usage.used_bytes + (usage.ssd.used_bytes if usage.ssd is not None else 0)
                self._labels.weigh(tenant, used_bytes=used_bytes, traffic_bytes=readings.traffic_bytes(usage))
            await pace.breathe()
        self._labels.rank(monotonic())


def _add_engine(sheet: _Sheet, engine: EngineFacts) -> None:
    counts = engine.counts
    sheet.add(catalog.ENGINE_CONNECTED, int(engine.is_connected), (engine.name,))
    outcomes = {"hit": counts.reads, "gone": counts.gone, "forged": counts.forged, "unreachable": counts.unreachable}
    for outcome, count in outcomes.items():
        sheet.add(catalog.ENGINE_READS, count, (outcome,))
    sheet.add(catalog.ENGINE_READ_BYTES, counts.read_bytes)
    for outcome, count in {"written": counts.writes, "failed": counts.writes_failed}.items():
        sheet.add(catalog.ENGINE_WRITES, count, (outcome,))
    sheet.add(catalog.ENGINE_WRITTEN_BYTES, counts.written_bytes)
    sheet.add(catalog.ENGINE_REMOVED, counts.removed)
    sheet.add(catalog.ENGINE_REMOVALS_FAILED, counts.removals_failed)


class _Sheet:
    """Metrics being filled, one for each family, in the order of the catalog."""

    def __init__(self) -> None:
        self.metrics: dict[Family, Metric] = {family: family.metric() for family in FAMILIES}

    def add(self, family: Family, value: float, labels: tuple[str, ...] = ()) -> None:
        self.metrics[family].add_sample(family.exposed_name, dict(zip(family.labels, labels, strict=True)), value)

    def add_readings(self, found: Mapping[Series, int], tenant: str) -> None:
        for series, value in found.items():
            family = series.family
            self.add(family, value / 1e9 if family in _IN_NANOSECONDS else value, (tenant, *series.labels))

    def add_histogram(self, family: Family, histogram: Histogram, labels: tuple[str, ...] = ()) -> None:
        metric, name = self.metrics[family], family.exposed_name
        by_name = dict(zip(family.labels, labels, strict=True))
        total = 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), histogram.counts, strict=True):
            total += count
            metric.add_sample(f"{name}_bucket", by_name | {"le": bound}, total)
        metric.add_sample(f"{name}_sum", by_name, histogram.total_ns / 1e9)
        metric.add_sample(f"{name}_count", by_name, total)
