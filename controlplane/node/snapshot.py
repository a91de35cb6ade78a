"""The policy of one node, composed of rows as pure values; reading them is :mod:`controlplane.node.policy_rows`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from controlplane.clock import ceiling_s
from controlplane.core.namespace_leases import share_before_leased
from controlplane.core.quota_split import split_rates, split_reserved
from controlplane.db import models
from controlplane.node.lease_rows import QuotaKey
from controlplane.node.policy_rows import PolicyRows, SharedNamespace
from controlplane.node.registry import capacity_bytes
from controlplane.salts.epochs import readable_epochs
from saltern.names import NamespaceId, NodeId, TenantId
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy, NodePolicy, TenantPolicy
from tenants.quota import NO_RATE_LIMITS, RateLimits, Tier, TierQuota
from tenants.revocation import NO_REVOCATIONS, Revocation, RevocationSet


def compose_policy(rows: PolicyRows, node: NodeId) -> NodePolicy:
    """What ``node`` must know: its share of quotas and rates (I4) and the namespaces that exist. Holds no secret.

    Of rows that were narrowed to the tenants that changed it is those tenants' part of the policy.

    The limit is what it is leased, and nothing while an earlier process of the node may hold that; its part of the
    reservation fits in there (I5).
    """
    capacities = {tier: _capacities(rows.nodes, tier) for tier in Tier}
    granted = rows.granted_bytes.get(node, {})
    waits = any(row.id == node and row.lease_from_time is not None for row in rows.nodes)
    quotas: dict[str, dict[Tier, TierQuota]] = defaultdict(dict)
    for row in rows.quotas:
        quota = TierQuota(reserved_bytes=row.reserved_bytes, limit_bytes=row.limit_bytes, weight=row.weight)
        granted_bytes = 0 if waits else granted.get((TenantId(row.tenant_id), row.tier), 0)
        # Leases follow a lowered quota with the next version; this one must not grant more than is left.
        limit_bytes = min(granted_bytes, quota.limit_bytes)
        reserved_bytes = split_reserved(quota, capacities[row.tier]).get(node, 0) if quota.reserved_bytes else 0
        quotas[row.tenant_id][row.tier] = TierQuota(min(reserved_bytes, limit_bytes), limit_bytes, quota.weight)
    rates: dict[str, RateLimits] = {}
    for rate_row in rows.rates:
        limits = RateLimits(
            operations_per_s=rate_row.operations_per_s,
            bytes_per_s=rate_row.bytes_per_s,
            ssd_write_bytes_per_s=rate_row.ssd_write_bytes_per_s,
        )
        rates[rate_row.tenant_id] = split_rates(limits, capacities[Tier.DRAM], capacities[Tier.SSD]).get(
            node, NO_RATE_LIMITS
        )
    epochs = readable_epochs(rows.salt_epochs)
    groups = _groups(rows.shared)
    namespaces: dict[str, dict[NamespaceId, NamespacePolicy]] = defaultdict(dict)
    for namespace in rows.namespaces:
        namespaces[namespace.tenant_id][NamespaceId(namespace.id)] = NamespacePolicy(
            uid=str(namespace.uid),
            block_bytes=namespace.block_bytes,
            epochs=epochs.get(namespace.tenant_id, ()),
            block_tokens=namespace.block_tokens,
            groups=groups.get(str(namespace.uid), {}),
            tier_limits=_tier_limits(namespace, rows, node, granted, waits=waits),
        )
    revocations: dict[str, list[Revocation]] = defaultdict(list)
    for revoked in rows.revocations:
        if revoked.tenant_id is not None:  # nodes take no token of the platform
            revocations[revoked.tenant_id].append(Revocation(revoked.token_id_prefix, revoked.issued_before_s))
    return NodePolicy(
        version=rows.version,
        tenants={
            TenantId(tenant.id): TenantPolicy(
                state=tenant.state,
                tiers=quotas[tenant.id],
                namespaces=namespaces[tenant.id],
                min_issue_time_s=ceiling_s(tenant.min_issue_time),
                rates=rates.get(tenant.id, NO_RATE_LIMITS),
                revocations=RevocationSet(revocations[tenant.id]) if tenant.id in revocations else NO_REVOCATIONS,
                uid=str(tenant.uid),
            )
            for tenant in rows.tenants
        },
    )


def _groups(shared: Iterable[SharedNamespace]) -> dict[str, dict[str, GroupPolicy]]:
    """The sharing groups of each namespace, by its uid: members that have accepted are each other's peers (I2)."""
    members: dict[str, list[SharedNamespace]] = defaultdict(list)
    for one in shared:
        members[one.group_uid].append(one)
    groups: dict[str, dict[str, GroupPolicy]] = defaultdict(dict)
    for group_uid, of_group in members.items():
        peers = [GroupPeer(one.tenant, one.namespace, one.namespace_uid) for one in of_group]
        for one, peer in zip(of_group, peers, strict=True):
            others = tuple(other for other in peers if other is not peer)
            groups[one.namespace_uid][group_uid] = GroupPolicy(epochs=(one.epoch,), peers=others)
    return groups


def _tier_limits(
    namespace: models.Namespace,
    rows: PolicyRows,
    node: NodeId,
    granted: Mapping[QuotaKey, int],
    *,
    waits: bool,
) -> dict[Tier, int]:
    """The node's share of the namespace's own limits (I4): what it is leased, as with the tenant's quota.

    A limit that was set this moment is not leased yet: nobody must evict everything for the time until it is.
    """
    tenant = TenantId(namespace.tenant_id)
    shares = {}
    for tier, limit_bytes in namespace.tier_limits.items():
        leased = rows.namespace_granted_bytes.get((tenant, NamespaceId(namespace.id), tier))
        if leased is None:
            quota_bytes = sum(row.limit_bytes for row in rows.quotas if row.tenant_id == tenant and row.tier is tier)
            of_quota_bytes = min(granted.get((tenant, tier), 0), quota_bytes)
            share_bytes = share_before_leased(limit_bytes, of_quota_bytes, quota_bytes)
        else:
            share_bytes = min(leased.get(node, 0), limit_bytes)
        shares[tier] = 0 if waits else share_bytes
    return shares


def _capacities(nodes: Iterable[models.Node], tier: Tier) -> dict[NodeId, int]:
    return {NodeId(node.id): capacity_bytes(node, tier) for node in nodes}
