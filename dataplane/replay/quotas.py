"""Quotas of a replay's tenants on each of its nodes; a block is one granule of the simulated core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dataplane.core.admission import open_partition
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.replay.ssd import quota_bytes
from saltern.replay.naming import NAMESPACE, tenant_id
from saltern.replay.room import Share
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota

_EPOCH: Final = 1


Quotas = Mapping[str, Mapping[Tier, TierQuota]]  #: of tenants by name


def quotas_of(shares: Mapping[str, Share]) -> Quotas:
    """Shares of a node's blocks as quotas of the simulated core."""
    return {name: _tiers(share) for name, share in shares.items()}


def _tiers(share: Share) -> dict[Tier, TierQuota]:
    dram = TierQuota(share.reserved_blocks * GRANULE_BYTES, share.limit_blocks * GRANULE_BYTES, share.weight)
    if not share.ssd_limit_blocks:
        return {Tier.DRAM: dram}
    ssd = TierQuota(quota_bytes(share.ssd_reserved_blocks), quota_bytes(share.ssd_limit_blocks), share.weight)
    return {Tier.DRAM: dram, Tier.SSD: ssd}


def policy_of(quotas: Quotas) -> NodePolicy:
    """Of a node: one namespace for each tenant, of blocks of one granule."""
    namespaces = {NAMESPACE: NamespacePolicy("replay", GRANULE_BYTES, (_EPOCH,))}
    return NodePolicy(
        1,
        {tenant_id(name): TenantPolicy(TenantState.ACTIVE, dict(tiers), namespaces) for name, tiers in quotas.items()},
    )


def partitions_of(tenants: Sequence[str]) -> dict[str, Partition]:
    """Where each tenant's blocks are."""
    policy = policy_of({name: {Tier.DRAM: TierQuota(0, 0)} for name in tenants})
    return {
        name: open_partition(
            policy,
            claims_tenant=tenant_id(name),
            claims_namespace=NAMESPACE,
            requested_namespace=NAMESPACE,
            epoch=_EPOCH,
        )
        for name in tenants
    }
