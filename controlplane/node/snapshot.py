"""The policy snapshot of one node: read in one consistent view, composed as pure values, encoded for the wire.

Every administrative change raises ``policy_state.version`` in its own transaction. Version and content are read in one
REPEATABLE READ transaction, so a snapshot holds exactly the changes up to its version: a node that has applied version
v serves nothing that v or an earlier version took away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.auth.key_set import encode_key_set
from controlplane.auth.signing_keys import load_key_set
from controlplane.clock import ceiling_s
from controlplane.core.quota_split import split_rates, split_reserved
from controlplane.db import Database, ServiceScope, ServiceTask, models
from controlplane.node.lease_rows import QuotaKey, read_granted_bytes
from controlplane.node.registry import capacity_bytes
from saltern.admin.v1 import quotas_pb2, tenants_pb2
from saltern.names import NamespaceId, NodeId, TenantId
from saltern.node.v1 import node_pb2
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import NO_RATE_LIMITS, RateLimits, Tier, TierQuota
from tenants.revocation import NO_REVOCATIONS, Revocation, RevocationSet
from tenants.tokens import KeySet

TIER_TO_PROTO = {Tier.DRAM: quotas_pb2.TIER_DRAM, Tier.SSD: quotas_pb2.TIER_SSD}
TIER_FROM_PROTO = {proto: tier for tier, proto in TIER_TO_PROTO.items()}
_STATE_TO_PROTO = {
    TenantState.ACTIVE: tenants_pb2.Tenant.STATE_ACTIVE,
    TenantState.SUSPENDED: tenants_pb2.Tenant.STATE_SUSPENDED,
}


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """The rows that one snapshot is composed of, of one consistent view."""

    version: int
    tenants: list[models.Tenant]
    quotas: list[models.TierQuota]
    rates: list[models.RateLimits]
    namespaces: list[models.Namespace]
    salt_policies: list[models.SaltPolicy]
    nodes: list[models.Node]
    granted_bytes: Mapping[QuotaKey, int]
    revocations: list[models.TokenRevocation]
    key_set: KeySet


async def read_policy_rows(database: Database, node: NodeId) -> PolicyRows:
    """Read everything that the policy of ``node`` depends on, in one REPEATABLE READ transaction."""
    scope = ServiceScope(ServiceTask.POLICY_SNAPSHOT)
    async with database.transaction(scope, isolation_level="REPEATABLE READ") as session:
        return PolicyRows(
            version=await read_version(session),
            tenants=list(await session.scalars(select(models.Tenant).order_by(models.Tenant.id))),
            quotas=list(await session.scalars(select(models.TierQuota))),
            rates=list(await session.scalars(select(models.RateLimits))),
            namespaces=list(await session.scalars(select(models.Namespace).order_by(models.Namespace.id))),
            salt_policies=list(await session.scalars(select(models.SaltPolicy))),
            nodes=list(await session.scalars(select(models.Node))),
            granted_bytes=await read_granted_bytes(session, node),
            revocations=list(await session.scalars(select(models.TokenRevocation))),
            key_set=await load_key_set(session),
        )


async def read_version(session: AsyncSession) -> int:
    """The current policy version."""
    return (await session.execute(select(models.PolicyState.version))).scalar_one()


def compose_policy(rows: PolicyRows, node: NodeId) -> NodePolicy:
    """What ``node`` must know: its share of quotas and rates (I4) and the namespaces that exist. Holds no secret.

    The limit is what it is leased, and nothing while an earlier process of the node may hold that; its part of the
    reservation fits in there (I5).
    """
    capacities = {tier: _capacities(rows.nodes, tier) for tier in Tier}
    waits = any(row.id == node and row.lease_from_time is not None for row in rows.nodes)
    quotas: dict[str, dict[Tier, TierQuota]] = defaultdict(dict)
    for row in rows.quotas:
        quota = TierQuota(reserved_bytes=row.reserved_bytes, limit_bytes=row.limit_bytes, weight=row.weight)
        granted_bytes = 0 if waits else rows.granted_bytes.get((TenantId(row.tenant_id), row.tier), 0)
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
    epochs = {row.tenant_id: (row.epoch,) for row in rows.salt_policies}
    namespaces: dict[str, dict[NamespaceId, NamespacePolicy]] = defaultdict(dict)
    for namespace in rows.namespaces:
        namespaces[namespace.tenant_id][NamespaceId(namespace.id)] = NamespacePolicy(
            uid=str(namespace.uid), block_bytes=namespace.block_bytes, epochs=epochs.get(namespace.tenant_id, ())
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
            )
            for tenant in rows.tenants
        },
    )


def encode_policy(
    policy: NodePolicy, key_set: KeySet, create_time: datetime, lease_duration: timedelta | None = None
) -> node_pb2.PolicySnapshot:
    """Encode a snapshot for the wire; ``lease_duration`` is how long its limits hold, None for ever."""
    snapshot = node_pb2.PolicySnapshot(version=policy.version, key_set=encode_key_set(key_set))
    snapshot.create_time.FromDatetime(create_time)
    if lease_duration is not None:
        snapshot.lease_duration.FromTimedelta(lease_duration)
    snapshot.tenants.extend(_encode_tenants(policy.tenants))
    return snapshot


def _encode_tenants(tenants: Mapping[TenantId, TenantPolicy]) -> Iterable[node_pb2.TenantPolicy]:
    for tenant_id, tenant in tenants.items():
        encoded = node_pb2.TenantPolicy(
            tenant_id=tenant_id,
            state=_STATE_TO_PROTO[tenant.state],
            tiers=[
                quotas_pb2.TierQuota(
                    tier=TIER_TO_PROTO[tier],
                    reserved_bytes=quota.reserved_bytes,
                    limit_bytes=quota.limit_bytes,
                    weight=quota.weight,
                )
                for tier, quota in tenant.tiers.items()
            ],
            namespaces=[
                node_pb2.NamespacePolicy(
                    namespace_id=namespace_id,
                    uid=namespace.uid,
                    block_bytes=namespace.block_bytes,
                    epochs=namespace.epochs,
                )
                for namespace_id, namespace in tenant.namespaces.items()
            ],
            rates=quotas_pb2.RateLimits(
                operations_per_s=tenant.rates.operations_per_s,
                bytes_per_s=tenant.rates.bytes_per_s,
                ssd_write_bytes_per_s=tenant.rates.ssd_write_bytes_per_s,
            ),
            revocations=[
                node_pb2.TokenRevocation(
                    token_id_prefix=revocation.token_id_prefix, issued_before_s=revocation.issued_before_s
                )
                for revocation in tenant.revocations
            ],
        )
        encoded.min_issue_time.FromSeconds(tenant.min_issue_time_s)
        yield encoded


def _capacities(nodes: Iterable[models.Node], tier: Tier) -> dict[NodeId, int]:
    return {NodeId(node.id): capacity_bytes(node, tier) for node in nodes}
