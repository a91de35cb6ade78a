"""Splitting a tenant's quota and rate limits over nodes: the sum of the shares never passes the whole (I4).

Shares are proportional to the nodes' capacities, in integer bytes, by the largest-remainder method (Hamilton): every
node first gets its quotient rounded down, then the bytes left over go one each to the largest remainders. Ties go to
the smaller node identifier, so every process computes the same split.

Limits are leased, so that they can follow demand and leave lost nodes (:mod:`controlplane.core.leases`); a split by
capacity is where they begin. Reservations and rates are split here and nowhere else: by the capacities of all nodes
that are registered, whether they can be reached or not.

Rates follow the bytes: a node that holds a quarter of a tenant's quota serves a quarter of its rate, so what is
promised to a cluster holds however clients are spread, without nodes that talk to each other. The price is the same as
with bytes: a whole namespace lives on one node, so a tenant whose namespaces all live on one of four equal nodes meets
a quarter of its rate there. Following the namespaces instead would leave them almost nothing on the node that takes
over from a lost one, until somebody noticed; and giving every node the whole rate would multiply what was agreed.
"""

from __future__ import annotations

from collections.abc import Mapping

from saltern.errors import InvalidArgumentError
from saltern.names import NodeId
from tenants.quota import RateLimits, TierQuota


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


def split_reserved(quota: TierQuota, capacities_bytes: Mapping[NodeId, int]) -> dict[NodeId, int]:
    """Split the reservation of a quota over nodes, those that cannot be reached included.

    Reservations are rounded down on every node: where all reservations together fit the cluster's capacity, each
    node's shares then fit its own (I5). Rounding up could promise a node a byte more than it has. What is lost is less
    than one byte for each node. The part of a node that is lost stays its own: the others may not have the room.
    """
    capacity_bytes = sum(capacities_bytes.values())
    return {
        node: quota.reserved_bytes * own_bytes // capacity_bytes if capacity_bytes else 0
        for node, own_bytes in capacities_bytes.items()
    }


def split_rate(rate_per_s: int, capacities_bytes: Mapping[NodeId, int]) -> dict[NodeId, int]:
    """Split one rate as bytes are split; 0, no limit, is 0 for every node.

    A share of a limit is never 0, which would lift it on that node (I4): a node whose share comes out as 0 gets 1, and
    the node with the largest share gives it.

    Returns:
        A share for every node. They sum to exactly ``rate_per_s``; where that is less than 1 for each node, or no node
        has capacity, every share is 1.

    Raises:
        InvalidArgumentError: a number is negative.
    """
    shares = split_bytes(rate_per_s, capacities_bytes)
    if rate_per_s == 0:
        return shares
    if rate_per_s < len(shares) or not any(shares.values()):
        return dict.fromkeys(shares, 1)
    for node in [node for node, share in shares.items() if share == 0]:
        giver = max(shares, key=lambda other: (shares[other], -capacities_bytes[other], other))
        shares[giver] -= 1
        shares[node] = 1
    return shares


def split_rates(
    rates: RateLimits, dram_bytes: Mapping[NodeId, int], ssd_bytes: Mapping[NodeId, int]
) -> dict[NodeId, RateLimits]:
    """Split rate limits over the nodes of ``dram_bytes``: operations and bytes by it, writes to SSD by ``ssd_bytes``.

    Both name the same nodes.
    """
    operations = split_rate(rates.operations_per_s, dram_bytes)
    moved = split_rate(rates.bytes_per_s, dram_bytes)
    ssd_written = split_rate(rates.ssd_write_bytes_per_s, ssd_bytes)
    return {
        node: RateLimits(
            operations_per_s=operations[node], bytes_per_s=moved[node], ssd_write_bytes_per_s=ssd_written[node]
        )
        for node in dram_bytes
    }
