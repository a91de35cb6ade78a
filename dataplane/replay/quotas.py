"""Quotas of a replay's tenants on each of its nodes; a block is one granule of the simulated core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dataplane.core.admission import open_partition
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from saltern.replay.naming import NAMESPACE, tenant_id
from saltern.replay.room import Share
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota

_EPOCH: Final = 1


def quotas_of(shares: Mapping[str, Share]) -> dict[str, TierQuota]:
    """Shares of a node's blocks as quotas of the simulated core."""
    return {
        name: TierQuota(share.reserved_blocks * GRANULE_BYTES, share.limit_blocks * GRANULE_BYTES, share.weight)
        for name, share in shares.items()
    }


def policy_of(quotas: Mapping[str, TierQuota]) -> NodePolicy:
    """Of a node: one namespace for each tenant, of blocks of one granule."""
    namespaces = {NAMESPACE: NamespacePolicy("replay", GRANULE_BYTES, (_EPOCH,))}
    return NodePolicy(
        1,
        {
            tenant_id(name): TenantPolicy(TenantState.ACTIVE, {Tier.DRAM: quota}, namespaces)
            for name, quota in quotas.items()
        },
    )


def partitions_of(tenants: Sequence[str]) -> dict[str, Partition]:
    """Where each tenant's blocks are."""
    policy = policy_of(dict.fromkeys(tenants, TierQuota(0, 0)))
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
