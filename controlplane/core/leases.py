"""Leasing one tenant's quota on one tier to nodes: at every instant all that nodes may go by fits the quota (I4).

::

    targets      where the quota should lie: by capacity at first, then by demand (lease_demand)
    granted      what the newest policy tells a node; moves towards its target
    believed     the most that the node may still go by: granted, or more until it has said that it follows

A grant is *shrunk at once and grown later*: what one node gains, another must have given back first, by settling a
policy version that holds the smaller grant (nothing of the tenant is left above it), or by losing its lease
(:mod:`controlplane.core.lease_terms`). So whatever is lost, late, repeated or out of order on the way,

    sum of believed <= quota

holds again and again after each step; only a lowered quota is passed until those that hold too much have settled, and
nothing grows meanwhile.

Everything here is a value in and a value out: who stores it, and when, is the shell's business
(:mod:`controlplane.node.lease_keeper`), and the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from controlplane.core.quota_split import split_bytes
from saltern.names import NodeId


@dataclass(frozen=True, slots=True)
class Holding:
    """What one node holds of one quota, in bytes.

    Attributes:
        granted_bytes: in policies from ``version`` on.
        believed_bytes: the most it may go by until it settles ``version``; at least ``granted_bytes``.
        target_bytes: what it is to hold in the end.
        version: the policy version that brought ``granted_bytes``.
    """

    granted_bytes: int
    believed_bytes: int
    target_bytes: int
    version: int


Holdings: TypeAlias = Mapping[NodeId, Holding]
NOTHING = Holding(granted_bytes=0, believed_bytes=0, target_bytes=0, version=0)


@dataclass(frozen=True, slots=True)
class Member:
    """One node, as the split of one tier sees it.

    Attributes:
        capacity_bytes: of the tier.
        settled_version: what it has settled; it goes by this policy or a later one.
        takes_leases: it may be given something: it has a lease and is not to be drained.
    """

    capacity_bytes: int
    settled_version: int
    takes_leases: bool = True


Members: TypeAlias = Mapping[NodeId, Member]


def believed_bytes(holding: Holding, member: Member) -> int:
    """The most that a node may go by."""
    return holding.granted_bytes if member.settled_version >= holding.version else holding.believed_bytes


def lease(
    quota_bytes: int, holdings: Holdings, members: Members, version: int, reserved_bytes: Mapping[NodeId, int]
) -> dict[NodeId, Holding]:
    """Follow a quota, its members and what they have settled: one step towards the targets.

    Args:
        holdings: of members only; one that is not named holds nothing.
        version: of the policy that will carry the result.
        reserved_bytes: each member's part of the reservation, by capacity.

    Returns:
        The holdings that change.
    """
    if _is_at_rest(quota_bytes, holdings, members, reserved_bytes):
        return {}
    targets = place(quota_bytes, holdings, members, reserved_bytes)
    return step(quota_bytes, holdings, members, targets, version)


def _is_at_rest(quota_bytes: int, holdings: Holdings, members: Members, reserved_bytes: Mapping[NodeId, int]) -> bool:
    """Whether all is plainly where it should be: :func:`place` would leave the targets, and :func:`step` the rest.

    That is so of nearly every quota in nearly every step, and the long way takes twenty times as long.
    """
    placed_bytes = 0
    for node, member in members.items():
        holding = holdings.get(node, NOTHING)
        target_bytes = holding.target_bytes
        if holding.granted_bytes != target_bytes:
            return False
        if not member.takes_leases:
            if target_bytes:
                return False
        elif target_bytes < reserved_bytes.get(node, 0) or (quota_bytes and member.capacity_bytes and not target_bytes):
            return False
        placed_bytes += target_bytes
    return placed_bytes == quota_bytes


def place(
    quota_bytes: int, holdings: Holdings, members: Members, reserved_bytes: Mapping[NodeId, int]
) -> dict[NodeId, int]:
    """Where the quota should lie now: a target for every member.

    As long as the members stay, so do the proportions. Who leaves is followed by the others in proportion, so that
    nobody loses because of it; who joins gets what its capacity is of all, and everybody gives for it in proportion.
    Where that would leave a node less than its part of the reservation, it begins again by capacity (I5). Where nobody
    takes leases, the targets stay: a quota that nobody could use is not worth moving.
    """
    targets = {node: holdings.get(node, NOTHING).target_bytes for node in members}
    takers = {node: member.capacity_bytes for node, member in members.items() if member.takes_leases}
    taker_bytes = sum(takers.values())
    if not taker_bytes:
        return split_bytes(quota_bytes, targets) if sum(targets.values()) > quota_bytes else targets
    by_capacity = split_bytes(quota_bytes, takers)
    if any(targets[node] < min(reserved_bytes.get(node, 0), by_capacity[node]) for node in takers):
        targets = dict.fromkeys(members, 0)
    is_placed = sum(targets[node] for node in takers) == quota_bytes == sum(targets.values())
    if is_placed and all(targets[node] or not by_capacity[node] for node in takers):
        return targets
    settled = {node: targets[node] for node in takers if targets[node]}
    settled_bytes, settled_capacity_bytes = sum(settled.values()), sum(takers[node] for node in settled)
    if settled_capacity_bytes:
        weights = {
            node: settled.get(node) or settled_bytes * capacity // settled_capacity_bytes
            for node, capacity in takers.items()
        }
        placed = split_bytes(quota_bytes, weights)
    else:
        placed = by_capacity
    return {node: placed.get(node, 0) for node in members}


def step(
    quota_bytes: int, holdings: Holdings, members: Members, targets: Mapping[NodeId, int], version: int
) -> dict[NodeId, Holding]:
    """Shrink what is above its target; grow what is below, out of what nobody believes to hold.

    Args:
        targets: for every member; their sum is at most ``quota_bytes``.

    Returns:
        The holdings that change.
    """
    before = {node: holdings.get(node, NOTHING) for node in members}
    believed = {node: believed_bytes(before[node], member) for node, member in members.items()}
    granted = {node: min(before[node].granted_bytes, targets[node]) for node in members}
    free_bytes = quota_bytes - sum(believed.values())
    # Below zero the quota was lowered, and some node may go by more or by less than it is granted: nothing grows.
    if free_bytes >= 0:
        # What it has not given back yet costs nobody anything to leave there.
        for node in members:
            granted[node] += min(targets[node] - granted[node], believed[node] - granted[node])
        wanted = {node: targets[node] - granted[node] for node in members}
        for node, gained_bytes in split_bytes(min(free_bytes, sum(wanted.values())), wanted).items():
            granted[node] += gained_bytes
    changed: dict[NodeId, Holding] = {}
    for node, old in before.items():
        is_new = granted[node] != old.granted_bytes
        holding = Holding(
            granted_bytes=granted[node],
            believed_bytes=max(believed[node], granted[node]) if is_new else old.believed_bytes,
            target_bytes=targets[node],
            version=version if is_new else old.version,
        )
        if holding != old:
            changed[node] = holding
    return changed
