"""Policies on the wire: snapshots and deltas (``proto/saltern/node/v1``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from controlplane.auth.key_set import encode_key_set
from saltern.admin.v1 import quotas_pb2, tenants_pb2
from saltern.names import TenantId
from saltern.node.v1 import node_pb2
from tenants.policy import GroupPolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier
from tenants.tokens import KeySet

TIER_TO_PROTO = {Tier.DRAM: quotas_pb2.TIER_DRAM, Tier.SSD: quotas_pb2.TIER_SSD}
TIER_FROM_PROTO = {proto: tier for tier, proto in TIER_TO_PROTO.items()}
_STATE_TO_PROTO = {
    TenantState.ACTIVE: tenants_pb2.Tenant.STATE_ACTIVE,
    TenantState.SUSPENDED: tenants_pb2.Tenant.STATE_SUSPENDED,
}


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


def encode_delta(
    policy: NodePolicy,
    base_version: int,
    changed: Collection[TenantId],
    *,
    key_set: KeySet,
    create_time: datetime,
    lease_duration: timedelta,
) -> node_pb2.PolicyDelta:
    """Encode what turns the policy ``base_version`` into that of ``policy.version``.

    Args:
        policy: of the tenants ``changed`` alone; those of them that it does not name are gone.
    """
    delta = node_pb2.PolicyDelta(base_version=base_version, version=policy.version, key_set=encode_key_set(key_set))
    delta.create_time.FromDatetime(create_time)
    delta.lease_duration.FromTimedelta(lease_duration)
    delta.tenants.extend(_encode_tenants(policy.tenants))
    delta.removed_tenant_ids.extend(sorted(set(changed) - policy.tenants.keys()))
    return delta


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
                    groups=_encode_groups(namespace.groups),
                    block_tokens=namespace.block_tokens,
                    tier_limits=[
                        node_pb2.TierLimit(tier=TIER_TO_PROTO[tier], limit_bytes=limit_bytes)
                        for tier, limit_bytes in namespace.tier_limits.items()
                    ],
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
            uid=tenant.uid,
        )
        encoded.min_issue_time.FromSeconds(tenant.min_issue_time_s)
        yield encoded


def _encode_groups(groups: Mapping[str, GroupPolicy]) -> Iterable[node_pb2.GroupPolicy]:
    for uid, group in groups.items():
        peers = (
            node_pb2.GroupPeer(tenant_id=peer.tenant, namespace_id=peer.namespace, namespace_uid=peer.namespace_uid)
            for peer in group.peers
        )
        yield node_pb2.GroupPolicy(uid=uid, epochs=group.epochs, peers=peers)
