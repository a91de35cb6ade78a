"""The policies of nodes, composed of rows as pure values; reading them is :mod:`controlplane.node.policy_rows`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeAlias

from controlplane.clock import ceiling_s
from controlplane.core.namespace_leases import share_before_leased
from controlplane.core.quota_split import split_rates, split_reserved
from controlplane.db import models
from controlplane.node.lease_rows import QuotaKey
from controlplane.node.policy_rows import NamespaceRow, PolicyRows, SharedNamespace
from controlplane.node.registry import capacity_bytes
from controlplane.salts.epochs import readable_epochs
from saltern.names import NamespaceId, NodeId, TenantId
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy, NodePolicy, TenantPolicy
from tenants.quota import NO_RATE_LIMITS, RateLimits, Tier, TierQuota
from tenants.revocation import NO_REVOCATIONS, Revocation, RevocationSet

_Namespaces: TypeAlias = Mapping[NamespaceId, NamespacePolicy]


class PolicyComposer:
    """Composes the policies of several nodes of the same rows; what does not differ between nodes is made once.

    Of rows that were narrowed to the tenants that changed they are those tenants' parts of the policies. They hold no
    secret. Namespaces of a tenant that are the same for two nodes are the same object.
    """

    def __init__(self, rows: PolicyRows) -> None:
        self.rows = rows
        self._capacities = {tier: _capacities(rows.nodes, tier) for tier in Tier}
        self._quotas: dict[TenantId, dict[Tier, TierQuota]] = defaultdict(dict)
        for row in rows.quotas:
            self._quotas[row.tenant_id][row.tier] = _quota(row.reserved_bytes, row.limit_bytes, row.weight)
        self._reserved = {
            (tenant, tier): split_reserved(quota, self._capacities[tier])
            for tenant, by_tier in self._quotas.items()
            for tier, quota in by_tier.items()
            if quota.reserved_bytes
        }
        dram, ssd = self._capacities[Tier.DRAM], self._capacities[Tier.SSD]
        self._rates = {
            row.tenant_id: split_rates(
                RateLimits(
                    operations_per_s=row.operations_per_s,
                    bytes_per_s=row.bytes_per_s,
                    ssd_write_bytes_per_s=row.ssd_write_bytes_per_s,
                ),
                dram,
                ssd,
            )
            for row in rows.rates
        }
        self._revocations: dict[TenantId, list[Revocation]] = defaultdict(list)
        for revoked in rows.revocations:
            if revoked.tenant_id is not None:  # nodes take no token of the platform
                self._revocations[revoked.tenant_id].append(
                    Revocation(revoked.token_id_prefix, revoked.issued_before_s)
                )
        self._epochs = readable_epochs(rows.salt_epochs)
        self._groups = _groups(rows.shared)
        self._unlimited, self._limited = self._namespaces()
        self._same = {
            tenant.id: TenantPolicy(
                state=tenant.state,
                tiers={},
                namespaces=self._unlimited.get(tenant.id, {}),
                min_issue_time_s=ceiling_s(tenant.min_issue_time),
                revocations=RevocationSet(self._revocations[tenant.id])
                if tenant.id in self._revocations
                else NO_REVOCATIONS,
                uid=str(tenant.uid),
            )
            for tenant in rows.tenants
        }

    def policy(self, node: NodeId) -> NodePolicy:
        """What ``node`` must know: its share of quotas and rates (I4) and the namespaces that exist.

        The limit is what it is leased, and nothing while an earlier process of the node may hold that; its part of the
        reservation fits in there (I5).
        """
        granted = self.rows.granted_bytes.get(node, {})
        waits = any(row.id == node and row.lease_from_time is not None for row in self.rows.nodes)
        return NodePolicy(
            version=self.rows.version,
            tenants={
                tenant: TenantPolicy(
                    state=same.state,
                    tiers=self._shares(tenant, node, {} if waits else granted),
                    namespaces=same.namespaces
                    if tenant not in self._limited
                    else self._limited_namespaces(tenant, node, granted, waits=waits),
                    min_issue_time_s=same.min_issue_time_s,
                    rates=self._rates[tenant].get(node, NO_RATE_LIMITS) if tenant in self._rates else NO_RATE_LIMITS,
                    revocations=same.revocations,
                    uid=same.uid,
                )
                for tenant, same in self._same.items()
            },
        )

    def _shares(self, tenant: TenantId, node: NodeId, granted: Mapping[QuotaKey, int]) -> dict[Tier, TierQuota]:
        shares = {}
        for tier, quota in self._quotas[tenant].items():
            # Leases follow a lowered quota with the next version; this one must not grant more than is left.
            limit_bytes = min(granted.get((tenant, tier), 0), quota.limit_bytes)
            reserved_bytes = self._reserved[tenant, tier].get(node, 0) if quota.reserved_bytes else 0
            shares[tier] = _quota(min(reserved_bytes, limit_bytes), limit_bytes, quota.weight)
        return shares

    def _namespaces(self) -> tuple[dict[TenantId, _Namespaces], dict[TenantId, list[NamespaceRow]]]:
        """Of tenants without limits of namespaces, the namespaces as every node has them; of the others, their rows."""
        rows: dict[TenantId, list[NamespaceRow]] = defaultdict(list)
        for row in self.rows.namespaces:
            rows[row.tenant_id].append(row)
        limited = {tenant: own for tenant, own in rows.items() if any(row.tier_limits for row in own)}
        unlimited: dict[TenantId, _Namespaces] = {
            tenant: {row.id: self._namespace(row, {}) for row in own}
            for tenant, own in rows.items()
            if tenant not in limited
        }
        return unlimited, limited

    def _limited_namespaces(
        self, tenant: TenantId, node: NodeId, granted: Mapping[QuotaKey, int], *, waits: bool
    ) -> _Namespaces:
        return {
            row.id: self._namespace(row, self._tier_limits(row, node, granted, waits=waits))
            for row in self._limited[tenant]
        }

    def _namespace(self, row: NamespaceRow, tier_limits: Mapping[Tier, int]) -> NamespacePolicy:
        uid = str(row.uid)
        return NamespacePolicy(
            uid=uid,
            block_bytes=row.block_bytes,
            epochs=self._epochs.get(row.tenant_id, ()),
            block_tokens=row.block_tokens,
            groups=self._groups.get(uid, {}),
            tier_limits=tier_limits,
        )

    def _tier_limits(
        self, row: NamespaceRow, node: NodeId, granted: Mapping[QuotaKey, int], *, waits: bool
    ) -> dict[Tier, int]:
        """The node's share of the namespace's own limits (I4): what it is leased, as with the tenant's quota.

        A limit that was set this moment is not leased yet: nobody must evict everything for the time until it is.
        """
        tenant = row.tenant_id
        shares = {}
        for tier, limit_bytes in row.tier_limits.items():
            leased = self.rows.namespace_granted_bytes.get((tenant, row.id, tier))
            if leased is None:
                quota = self._quotas[tenant].get(tier)
                quota_bytes = 0 if quota is None else quota.limit_bytes
                of_quota_bytes = min(granted.get((tenant, tier), 0), quota_bytes)
                share_bytes = share_before_leased(limit_bytes, of_quota_bytes, quota_bytes)
            else:
                share_bytes = min(leased.get(node, 0), limit_bytes)
            shares[tier] = 0 if waits else share_bytes
        return shares


def compose_policy(rows: PolicyRows, node: NodeId) -> NodePolicy:
    """The policy of one node, see :class:`PolicyComposer`."""
    return PolicyComposer(rows).policy(node)


@lru_cache(maxsize=4096)
def _quota(reserved_bytes: int, limit_bytes: int, weight: int) -> TierQuota:
    """Thousands of tenants have the same few quotas, and each is checked when it is made."""
    return TierQuota(reserved_bytes, limit_bytes, weight)


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


def _capacities(nodes: Iterable[models.Node], tier: Tier) -> dict[NodeId, int]:
    return {NodeId(node.id): capacity_bytes(node, tier) for node in nodes}
