"""Books and counters of both tiers at one moment, as values (I8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from dataplane.core.pool import Pool
from dataplane.core.ssd_namespaces import namespace_usages
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.tenant_cache import NO_LIMIT_BYTES, TenantCache
from dataplane.core.usage import NamespaceUsage, NodeUsage, TenantCounters, TenantUsage
from saltern.names import NamespaceId, TenantId
from tenants.policy import NodePolicy, TenantPolicy

#: So many tenants are reported one and all, so that each is known to have been looked at.
ALL_REPORTED_TENANTS_MAX: Final = 500


def known_tenants(pool: Pool, ssd: SsdTier | None) -> list[TenantId]:
    """Every tenant that the policy names or that still holds bytes, on either tier."""
    below = () if ssd is None else ssd.tenants.keys() - pool.tenants.keys()
    return [*pool.tenants, *below]


def reported_tenants(pool: Pool, ssd: SsdTier | None) -> list[TenantId]:
    """Those of :func:`known_tenants` that a report names: all of them, or of very many those with anything to tell.

    Of 10,000 tenants most do nothing for most of the time, and a report of them all would take longer than the time to
    the next one. Who is left out holds, reserves and limits nothing, and nothing was ever counted for it.
    """
    tenants = known_tenants(pool, ssd)
    if len(tenants) <= ALL_REPORTED_TENANTS_MAX:
        return tenants
    return [tenant for tenant in tenants if not _is_blank(pool.tenants.get(tenant), ssd, tenant)]


def _is_blank(owner: TenantCache | None, ssd: SsdTier | None, tenant: TenantId) -> bool:
    below = None if ssd is None else ssd.tenants.get(tenant)
    return (owner is None or owner.is_blank) and (below is None or below.is_blank)


def node_usage(pool: Pool, ssd: SsdTier | None, policy: NodePolicy, tenants: Iterable[TenantId]) -> NodeUsage:
    """Books and counters of ``tenants``; those that are not known, or not any more, are left out."""
    usages = {tenant: _tenant_usage(pool, ssd, tenant, policy.tenants.get(tenant)) for tenant in tenants}
    extents = pool.extents
    return NodeUsage(
        policy_version=policy.version,
        capacity_bytes=extents.capacity_bytes,
        free_bytes=extents.free_bytes,
        largest_free_bytes=extents.largest_free_bytes,
        tenants={tenant: usage for tenant, usage in usages.items() if usage is not None},
        ssd_capacity_bytes=0 if ssd is None else ssd.capacity_bytes,
        compactions=pool.compactions,
        moved_bytes=pool.moved_bytes,
    )


def _tenant_usage(pool: Pool, ssd: SsdTier | None, tenant: TenantId, rules: TenantPolicy | None) -> TenantUsage | None:
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
        namespaces={} if rules is None else _namespace_usages(owner, ssd, rules),
    )


def _namespace_usages(
    owner: TenantCache, ssd: SsdTier | None, rules: TenantPolicy
) -> dict[NamespaceId, NamespaceUsage]:
    """Those that the policy names, as far as they were used or have a limit; what is left of others only leaves."""
    entries = Counter[str]()
    for index in owner.partitions.values():
        entries[index.partition.namespace_uid] += len(index.entries)
    on_ssd_tier = None if ssd is None else ssd.tenants.get(owner.tenant)
    below = {} if on_ssd_tier is None else namespace_usages(on_ssd_tier)
    usages = {}
    for name, rule in rules.namespaces.items():
        books, on_ssd = owner.namespaces.get(rule.uid), below.get(rule.uid)
        if books is None and on_ssd is None:
            continue
        usages[name] = NamespaceUsage(
            uid=rule.uid,
            used_bytes=0 if books is None else books.used_bytes,
            entries=entries[rule.uid],
            get_hits=0 if books is None else books.get_hits,
            get_misses=0 if books is None else books.get_misses,
            limit_bytes=None if books is None or books.limit_bytes == NO_LIMIT_BYTES else books.limit_bytes,
            ssd_used_bytes=0 if on_ssd is None else on_ssd.used_bytes,
            ssd_entries=0 if on_ssd is None else on_ssd.entries,
            ssd_limit_bytes=None if on_ssd is None else on_ssd.limit_bytes,
            hit_tokens=0 if books is None else books.get_hits * rule.block_tokens,  # the same for a namespace's life
        )
    return usages
