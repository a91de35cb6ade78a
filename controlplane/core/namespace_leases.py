"""Sharing a namespace's own limit between nodes: at every instant all that nodes may go by fits the limit (I4).

A namespace may hold a part of its tenant's quota, so its limit lies where the quota lies: each node's share is in
proportion to what is placed there of the quota. How a share moves from one node to another is the same as for quotas
(:mod:`controlplane.core.leases`): what one gains another has given back before, by settling a policy in which it has
less, with nothing of the namespace above it, or by losing its lease.

The proportion alone would not do. While a quota changes, nodes go by policies of different versions, and a share of the
old quota and one of the new may together be more than the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.core.leases import Holding, Holdings, Members, step
from controlplane.core.quota_split import split_bytes
from saltern.names import NodeId


def lease_namespace(
    limit_bytes: int, holdings: Holdings, members: Members, version: int, placed_bytes: Mapping[NodeId, int]
) -> dict[NodeId, Holding]:
    """Follow a limit, the quota that it is within, and what nodes have settled: one step towards the targets.

    Args:
        holdings: of the limit, by members only; one that is not named holds nothing.
        version: of the policy that will carry the result.
        placed_bytes: where the tenant's quota is to lie; a member that is not named has nothing of it.

    Returns:
        The holdings that change.
    """
    targets = split_bytes(limit_bytes, {node: placed_bytes.get(node, 0) for node in members})
    return step(limit_bytes, holdings, members, targets, version)


def share_before_leased(limit_bytes: int, granted_bytes: int, quota_bytes: int) -> int:
    """A node's share of a limit that was set this moment, until the first step: in proportion to its grant.

    Rounded down, so that the shares of all nodes together are at most the limit.
    """
    return limit_bytes * granted_bytes // quota_bytes if quota_bytes else 0
