"""Moving a quota to the nodes where it earns more: from idle room first, then from bytes that hardly see a hit.

Where nothing presses, nothing moves: a node must have evicted its tenant's own entries, or refused its puts, for want
of quota, *and* have served hits, before it is given more. A scan, which has no hits, gains nothing. Every move is
damped (a part of what could move) and has to be worth it, and no node goes below its floor: its part of the reservation
(I5), and of its share by capacity enough to begin again with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.core.quota_split import split_bytes
from saltern.names import NodeId

#: The floor is one part in so many of the share by capacity.
FLOOR_PARTS: Final = 4
#: Of what could move, one part in so many does at a time.
DAMPING: Final = 4
#: Less than one part in so many of the quota is not worth a move.
WORTH_PARTS: Final = 64
#: What is given away earns at most one part in so many, byte for byte, of what it earns where it goes.
EARNING_RATIO: Final = 2
#: Room kept above use: one part in so many of it.
HEADROOM_PARTS: Final = 8


@dataclass(frozen=True, slots=True)
class Demand:
    """What one tenant did on one tier of one node since the last look.

    Attributes:
        used_bytes: held now.
        hit_bytes: served from the cache.
        pressed: entries evicted, or puts refused, because the tenant had no more quota there.
    """

    used_bytes: int = 0
    hit_bytes: int = 0
    pressed: int = 0


def rebalance(
    targets: Mapping[NodeId, int],
    demands: Mapping[NodeId, Demand],
    capacities_bytes: Mapping[NodeId, int],
    reserved_bytes: Mapping[NodeId, int],
) -> dict[NodeId, int] | None:
    """New targets with the same sum, or None if the quota lies well as it is.

    Args:
        targets, demands, capacities_bytes, reserved_bytes: of the same nodes, those that take leases.
    """
    quota_bytes = sum(targets.values())
    receivers = {
        node: max(1, demand.used_bytes) for node, demand in demands.items() if demand.pressed and demand.hit_bytes
    }
    if not receivers or len(receivers) == len(targets):
        return None
    earned_bytes = sum(demands[node].hit_bytes for node in receivers)
    by_capacity = split_bytes(quota_bytes, capacities_bytes)
    given: dict[NodeId, int] = {}
    for node, target in targets.items():
        if node in receivers:
            continue
        demand = demands[node]
        spare_bytes = max(0, target - max(by_capacity[node] // FLOOR_PARTS, reserved_bytes[node]))
        idle_bytes = max(0, target - demand.used_bytes - demand.used_bytes // HEADROOM_PARTS)
        # Hits of a byte here against hits of a byte there, without dividing.
        earns_less = demand.hit_bytes * EARNING_RATIO * sum(receivers.values()) <= earned_bytes * demand.used_bytes
        given[node] = min(spare_bytes, max(idle_bytes, spare_bytes if earns_less else 0)) // DAMPING
    moved_bytes = sum(given.values())
    if moved_bytes * WORTH_PARTS < quota_bytes or not moved_bytes:
        return None
    gained = split_bytes(moved_bytes, receivers)
    return {node: target - given.get(node, 0) + gained.get(node, 0) for node, target in targets.items()}
