"""Quotas of a replay's tenants on each of its nodes: those that were set up, and the walls to compare them with.

A quota over all nodes is split evenly, as the control plane does among nodes that are alike; a block is one granule of
the simulated core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dataplane.core.admission import open_partition
from dataplane.core.extents import GRANULE_BYTES, round_up
from dataplane.core.partition import Partition
from saltern.errors import InvalidArgumentError
from saltern.names import NamespaceId, TenantId
from saltern.replay.setup import ReplaySetup, TenantQuota
from saltern.traces.request import Trace
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota

_NAMESPACE: Final = NamespaceId("replay")
_EPOCH: Final = 1
#: Index and key of one block: what the simulator needs of the machine that it runs on, about.
_INDEX_BYTES: Final = 400
_BLOCKS_MAX: Final = 200_000_000
_NO_QUOTA: Final = TenantQuota()


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the nodes, in blocks.

    Attributes:
        block_bytes: of keys and values of a whole block.
        node_blocks: that one node holds.
    """

    block_bytes: int
    node_blocks: int
    nodes: int

    @classmethod
    def of(cls, trace: Trace, setup: ReplaySetup) -> Room:
        """Of a trace without prefix identity there are no blocks.

        Raises:
            InvalidArgumentError: INVALID_REPLAY: a node holds not one, or all hold more than can be simulated.
        """
        block_bytes = trace.block_tokens * setup.model.kv_bytes_per_token
        node_blocks = setup.node_bytes // round_up(block_bytes) if block_bytes else 0
        if block_bytes and not (node_blocks and node_blocks * setup.nodes <= _BLOCKS_MAX):
            raise InvalidArgumentError(
                f"cannot replay with nodes of {node_blocks} blocks of {block_bytes} bytes",
                reason="INVALID_REPLAY",
                hint=f"choose memory for at least one block on each node and at most {_BLOCKS_MAX} on all; here each "
                f"takes about {_INDEX_BYTES} bytes",
            )
        return cls(block_bytes, node_blocks, setup.nodes)

    def blocks_of(self, size_bytes: int) -> int:
        """Of a quota over all nodes, on each."""
        return min(self.node_blocks, size_bytes // self.nodes // round_up(self.block_bytes))


def shared_quotas(setup: ReplaySetup, tenants: Sequence[str], room: Room) -> dict[str, TierQuota]:
    """What was set up: reservations and limits; without a limit, all there is."""
    quotas = {}
    for name in tenants:
        quota = setup.quotas.get(name, _NO_QUOTA)
        limit = room.node_blocks if quota.limit_bytes is None else room.blocks_of(quota.limit_bytes)
        reserved = room.blocks_of(quota.reserved_bytes or 0)
        quotas[name] = TierQuota(reserved * GRANULE_BYTES, max(reserved, limit) * GRANULE_BYTES, quota.weight)
    return quotas


def wall_quotas(setup: ReplaySetup, tenants: Sequence[str], room: Room) -> dict[str, TierQuota]:
    """Each tenant by itself: its reservation; tenants without one have equal shares of what nobody has reserved."""
    reserved = {
        name: room.blocks_of(quota.reserved_bytes)
        for name in tenants
        if (quota := setup.quotas.get(name, _NO_QUOTA)).reserved_bytes is not None
    }
    others = len(tenants) - len(reserved)
    share = (room.node_blocks - sum(reserved.values())) // others if others else 0
    walls = {name: reserved.get(name, share) * GRANULE_BYTES for name in tenants}
    return {name: TierQuota(size_bytes, size_bytes) for name, size_bytes in walls.items()}


def policy_of(quotas: Mapping[str, TierQuota]) -> NodePolicy:
    """Of a node: one namespace for each tenant, of blocks of one granule."""
    namespaces = {_NAMESPACE: NamespacePolicy("replay", GRANULE_BYTES, (_EPOCH,))}
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
            claims_namespace=_NAMESPACE,
            requested_namespace=_NAMESPACE,
            epoch=_EPOCH,
        )
        for name in tenants
    }


def tenant_id(name: str) -> TenantId:
    """Of a tenant of a trace; a trace that names none has one."""
    return TenantId(name or "-")


def tenant_name(tenant: TenantId) -> str:
    """The other way round."""
    return "" if tenant == "-" else str(tenant)
