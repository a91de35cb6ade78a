"""Splitting a tenant's quota over nodes: the sum of the shares never passes the quota (I4).

Shares are proportional to the nodes' capacities, in integer bytes, by the largest-remainder method (Hamilton): every
node first gets its quotient rounded down, then the bytes left over go one each to the largest remainders. Ties go to
the smaller node identifier, so every process computes the same split.

A share belongs to a node as long as the node is registered, whether it is reachable or not: a node that cannot be
reached may still hold what it was given (I9), so handing its share to others could pass the quota. Shares as leases
that expire, and can then be given to others, build on this function.
"""

from __future__ import annotations

from collections.abc import Mapping

from saltern.errors import InvalidArgumentError
from saltern.names import NodeId
from tenants.quota import TierQuota


def split_bytes(total_bytes: int, capacities_bytes: Mapping[NodeId, int]) -> dict[NodeId, int]:
    """Split ``total_bytes`` in proportion to the capacities.

    Returns:
        A share for every node. They sum to exactly ``total_bytes``, or to 0 where no node has capacity.

    Raises:
        InvalidArgumentError: a number is negative.
    """
    if total_bytes < 0 or any(capacity < 0 for capacity in capacities_bytes.values()):
        raise InvalidArgumentError("bytes to split and capacities cannot be negative", reason="NEGATIVE_BYTES")
    capacity_bytes = sum(capacities_bytes.values())
    if capacity_bytes == 0:
        return dict.fromkeys(capacities_bytes, 0)
    quotients = {node: divmod(total_bytes * own, capacity_bytes) for node, own in capacities_bytes.items()}
    shares = {node: quotient for node, (quotient, _) in quotients.items()}
    by_remainder = sorted(quotients, key=lambda node: (-quotients[node][1], node))
    for node in by_remainder[: total_bytes - sum(shares.values())]:
        shares[node] += 1
    return shares


def split_quota(quota: TierQuota, capacities_bytes: Mapping[NodeId, int]) -> dict[NodeId, TierQuota]:
    """Split the limit and the reservation of a quota; the weight is relative and stays as it is.

    Reservations are rounded down on every node: where all reservations together fit the cluster's capacity, each
    node's shares then fit its own (I5). Rounding up could promise a node a byte more than it has. What is lost is less
    than one byte for each node.
    """
    capacity_bytes = sum(capacities_bytes.values())
    return {
        node: TierQuota(
            reserved_bytes=quota.reserved_bytes * capacities_bytes[node] // capacity_bytes if capacity_bytes else 0,
            limit_bytes=limit_bytes,
            weight=quota.weight,
        )
        for node, limit_bytes in split_bytes(quota.limit_bytes, capacities_bytes).items()
    }
