"""Policies on the wire: snapshots and deltas (``proto/saltern/node/v1``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from controlplane.auth.key_set import encode_key_set
from saltern.admin.v1 import quotas_pb2, tenants_pb2
from saltern.names import NamespaceId, TenantId
from saltern.node.v1 import node_pb2
from tenants.policy import GroupPolicy, NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import NO_RATE_LIMITS, Tier
from tenants.tokens import KeySet

TIER_TO_PROTO = {Tier.DRAM: quotas_pb2.TIER_DRAM, Tier.SSD: quotas_pb2.TIER_SSD}
TIER_FROM_PROTO = {proto: tier for tier, proto in TIER_TO_PROTO.items()}
_STATE_TO_PROTO = {
    TenantState.ACTIVE: tenants_pb2.Tenant.STATE_ACTIVE,
    TenantState.SUSPENDED: tenants_pb2.Tenant.STATE_SUSPENDED,
}


class TenantEncoder:
    """Encodes tenants' parts of the policies of several nodes, composed of the same rows: what nodes share of a tenant
    is encoded once.

    Use one for the policies of one :class:`controlplane.node.snapshot.PolicyComposer` alone: it goes by the identity of
    a tenant's namespaces, and takes all but its quotas and rates to be the same wherever they are.
    """

    def __init__(self) -> None:
        self._shared: dict[TenantId, tuple[Mapping[NamespaceId, NamespacePolicy], bytes]] = {}

    def encode(self, tenants: Mapping[TenantId, TenantPolicy]) -> Iterable[node_pb2.TenantPolicy]:
        """Encode them in their order."""
        for tenant_id, tenant in tenants.items():
            known = self._shared.get(tenant_id)
            if known is None or known[0] is not tenant.namespaces:
                known = tenant.namespaces, _encode_shared(tenant_id, tenant).SerializeToString()
                self._shared[tenant_id] = known
            encoded = node_pb2.TenantPolicy.FromString(known[1])
            for tier, quota in tenant.tiers.items():
                encoded.tiers.add(
                    tier=TIER_TO_PROTO[tier],
                    reserved_bytes=quota.reserved_bytes,
                    limit_bytes=quota.limit_bytes,
                    weight=quota.weight,
                )
            rates = tenant.rates
            encoded.rates.SetInParent()
            if rates is not NO_RATE_LIMITS:
                encoded.rates.operations_per_s = rates.operations_per_s
                encoded.rates.bytes_per_s = rates.bytes_per_s
                encoded.rates.ssd_write_bytes_per_s = rates.ssd_write_bytes_per_s
            yield encoded


def encode_policy(
    policy: NodePolicy,
    key_set: KeySet,
    create_time: datetime,
    lease_duration: timedelta | None = None,
    *,
    encoder: TenantEncoder | None = None,
) -> node_pb2.PolicySnapshot:
    """Encode a snapshot for the wire.

    Args:
        lease_duration: how long its limits hold; None for ever.
        encoder: of the policies of other nodes that are composed of the same rows.
    """
    snapshot = node_pb2.PolicySnapshot(version=policy.version, key_set=encode_key_set(key_set))
    snapshot.create_time.FromDatetime(create_time)
    if lease_duration is not None:
        snapshot.lease_duration.FromTimedelta(lease_duration)
    snapshot.tenants.extend((encoder or TenantEncoder()).encode(policy.tenants))
    return snapshot


def encode_delta(
    policy: NodePolicy,
    base_version: int,
    changed: Collection[TenantId],
    *,
    key_set: KeySet,
    create_time: datetime,
    lease_duration: timedelta,
    encoder: TenantEncoder | None = None,
) -> node_pb2.PolicyDelta:
    """Encode what turns the policy ``base_version`` into that of ``policy.version``.

    Args:
        policy: of the tenants ``changed`` alone; those of them that it does not name are gone.
        encoder: as in :func:`encode_policy`.
    """
    delta = node_pb2.PolicyDelta(base_version=base_version, version=policy.version, key_set=encode_key_set(key_set))
    delta.create_time.FromDatetime(create_time)
    delta.lease_duration.FromTimedelta(lease_duration)
    delta.tenants.extend((encoder or TenantEncoder()).encode(policy.tenants))
    delta.removed_tenant_ids.extend(sorted(set(changed) - policy.tenants.keys()))
    return delta


def _encode_shared(tenant_id: TenantId, tenant: TenantPolicy) -> node_pb2.TenantPolicy:
    """All but the node's shares of quotas and rates."""
    encoded = node_pb2.TenantPolicy(
        tenant_id=tenant_id,
        state=_STATE_TO_PROTO[tenant.state],
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
        revocations=[
            node_pb2.TokenRevocation(
                token_id_prefix=revocation.token_id_prefix, issued_before_s=revocation.issued_before_s
            )
            for revocation in tenant.revocations
        ],
        uid=tenant.uid,
    )
    encoded.min_issue_time.FromSeconds(tenant.min_issue_time_s)
    return encoded


def _encode_groups(groups: Mapping[str, GroupPolicy]) -> Iterable[node_pb2.GroupPolicy]:
    for uid, group in groups.items():
        peers = (
            node_pb2.GroupPeer(tenant_id=peer.tenant, namespace_id=peer.namespace, namespace_uid=peer.namespace_uid)
            for peer in group.peers
        )
        yield node_pb2.GroupPolicy(uid=uid, epochs=group.epochs, peers=peers)
