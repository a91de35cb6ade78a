"""Books and counters of both tiers at one moment, as values (I8)."""

from __future__ import annotations

from collections.abc import Iterable

from dataplane.core.pool import Pool
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.usage import NodeUsage, TenantCounters, TenantUsage
from saltern.names import TenantId


def known_tenants(pool: Pool, ssd: SsdTier | None) -> list[TenantId]:
    """Every tenant that the policy names or that still holds bytes, on either tier."""
    below = () if ssd is None else ssd.tenants.keys() - pool.tenants.keys()
    return [*pool.tenants, *below]


def node_usage(pool: Pool, ssd: SsdTier | None, policy_version: int, tenants: Iterable[TenantId]) -> NodeUsage:
    """Books and counters of ``tenants``; those that are not known, or not any more, are left out."""
    usages = {tenant: _tenant_usage(pool, ssd, tenant) for tenant in tenants}
    extents = pool.extents
    return NodeUsage(
        policy_version=policy_version,
        capacity_bytes=extents.capacity_bytes,
        free_bytes=extents.free_bytes,
        largest_free_bytes=extents.largest_free_bytes,
        tenants={tenant: usage for tenant, usage in usages.items() if usage is not None},
        ssd_capacity_bytes=0 if ssd is None else ssd.capacity_bytes,
        compactions=pool.compactions,
        moved_bytes=pool.moved_bytes,
    )


def _tenant_usage(pool: Pool, ssd: SsdTier | None, tenant: TenantId) -> TenantUsage | None:
    owner = pool.tenants.get(tenant)
    below = None if ssd is None else ssd.usage(tenant)
    if owner is None:
        return None if below is None else TenantUsage(0, 0, 0, 0, 0, 0, 0, 0, counters=TenantCounters(), ssd=below)
    budget = owner.budget
    return TenantUsage(
        reserved_bytes=budget.reserved_bytes,
        limit_bytes=budget.limit_bytes,
        used_bytes=budget.used_bytes,
        resident_bytes=budget.resident_bytes,
        in_flight_bytes=budget.in_flight_bytes,
        slack_bytes=budget.slack_bytes,
        held_bytes=budget.held_bytes,
        entries=sum(len(index.entries) for index in owner.partitions.values()),
        counters=owner.counters.copy(),
        ssd=below,
        weight=budget.weight,
        protected_bytes=budget.protected_bytes,
        uid=owner.uid,
    )
