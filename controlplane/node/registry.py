"""The registry of cache nodes: their rows. Every function runs in the caller's transaction.

A node proves that it is the current process of its name by the fencing epoch: each registration raises it, and whatever
comes with an older one is refused, so a process that was cut off and replaced cannot overwrite the books of its
successor (I8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core import lease_terms
from controlplane.db import models
from controlplane.db.locks import lock_quotas
from controlplane.node.lease_rows import store_terms, terms_of, to_ms
from saltern.errors import AbortedError
from saltern.names import NodeId
from tenants.quota import Tier, check_reservations

REPORT_INTERVAL_S: Final = 2
#: A node that has not reported for so long is taken to be lost.
LOST_AFTER: Final = timedelta(seconds=3 * REPORT_INTERVAL_S)
_MS: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself when it registers; capacities in bytes.

    Attributes:
        tls_server_name: what its certificate is to be verified by; empty for a node that serves plain text.
        state_id: of the state folder that the process has locked; empty if it does not say.
    """

    wire_endpoint: str
    shm_path: str
    grpc_endpoint: str
    host_id: str
    capacities_bytes: Mapping[Tier, int]
    software_version: str
    tls_server_name: str = ""
    state_id: str = ""


@dataclass(frozen=True, slots=True)
class Registered:
    """A registration that :func:`begin_lease` is to complete.

    Attributes:
        row: the node's, locked.
        is_member_change: the node is new, or another one to those who split quotas by capacity: what they gave to whom
            has to be looked at again. A process that follows another one on the same node is not.
    """

    row: models.Node
    is_member_change: bool


async def register(session: AsyncSession, node: NodeId, facts: NodeFacts, now: datetime) -> Registered:
    """Store a registration under a new fencing epoch.

    Raises:
        FailedPreconditionError: RESERVATIONS_ABOVE_CAPACITY: the node comes back smaller, and what is left no longer
            holds what tenants have reserved (I5).
    """
    await _check_capacity(session, node, facts)
    columns = {
        "wire_endpoint": facts.wire_endpoint,
        "shm_path": facts.shm_path,
        "grpc_endpoint": facts.grpc_endpoint,
        "host_id": facts.host_id,
        "dram_capacity_bytes": facts.capacities_bytes.get(Tier.DRAM, 0),
        "ssd_capacity_bytes": facts.capacities_bytes.get(Tier.SSD, 0),
        "software_version": facts.software_version,
        "tls_server_name": facts.tls_server_name,
        "applied_version": 0,
        "register_time": now,
        "last_report_time": now,
    }
    row = await session.get(models.Node, node, with_for_update=True)
    is_known = row is not None and terms_of(row).takes_leases and capacities_of(row) == _capacities_in(facts)
    if row is None:
        row = models.Node(id=node, fencing_epoch=1, settled_version=0, lease_version=0, state_id="", **columns)
        session.add(row)
    else:
        for name, value in columns.items():
            setattr(row, name, value)
        row.fencing_epoch += 1
    await session.flush()
    return Registered(row, is_member_change=not is_known)


def begin_lease(row: models.Node, state_id: str, now: datetime, duration: timedelta, version: int) -> None:
    """Begin the lease of the process that registers, with policy ``version``."""
    store_terms(row, lease_terms.registered(terms_of(row), state_id, to_ms(now), duration // _MS, version))


def renew_lease(row: models.Node, now: datetime, duration: timedelta, version: int) -> None:
    """The node has reported, and is answered that it may grow for ``duration`` from when it sent the report.

    Args:
        version: of the newest policy, read with the row locked.
    """
    store_terms(row, lease_terms.renewed(terms_of(row), to_ms(now), duration // _MS, version))


def go_by(row: models.Node, version: int) -> None:
    """Note the policy that the registered process says it goes by.

    It never goes back to an earlier one: what says so was sent before, and has been overtaken by a later answer.
    """
    row.applied_version = max(row.applied_version, version)


def settle(row: models.Node, version: int) -> bool:
    """Note what the node has settled; return whether that is news, so that others may be given something."""
    before = row.settled_version
    store_terms(row, lease_terms.settled(terms_of(row), version))
    return row.settled_version > before


async def live_nodes(session: AsyncSession, now: datetime) -> list[models.Node]:
    """The nodes that clients are sent to, by id: those that have registered or reported lately.

    Cordoned and draining ones too: clients read from them and store elsewhere.
    """
    statement = select(models.Node).where(models.Node.last_report_time > now - LOST_AFTER).order_by(models.Node.id)
    return list(await session.scalars(statement))


async def require_current(
    session: AsyncSession, node: NodeId, fencing_epoch: int, *, lock: bool = False
) -> models.Node:
    """The row of ``node``, if ``fencing_epoch`` is its current one.

    Args:
        lock: hold the row against a registration, and against another change of it, until the transaction ends.

    Raises:
        AbortedError: the node is unknown or has registered again since (reason FENCED).
    """
    how = {"key_share": True} if lock else None
    return require_epoch(await session.get(models.Node, node, with_for_update=how), node, fencing_epoch)


async def hold_epoch(session: AsyncSession, node: NodeId, fencing_epoch: int) -> models.Node:
    """The row of ``node``, held against a registration alone: its lease is renewed meanwhile.

    Raises as :func:`require_current`.
    """
    how = {"read": True, "key_share": True}
    return require_epoch(await session.get(models.Node, node, with_for_update=how), node, fencing_epoch)


def require_epoch(row: models.Node | None, node: NodeId, fencing_epoch: int) -> models.Node:
    """``row``, if it is that of ``node`` in its current epoch; raises as :func:`require_current`."""
    if row is None or row.fencing_epoch != fencing_epoch:
        current = "it is not registered" if row is None else f"its current one is {row.fencing_epoch}"
        raise AbortedError(
            f"fencing epoch {fencing_epoch} of node {node} is stale: {current}",
            reason="FENCED",
            hint="register the node again; if another process runs under this node id, stop one of the two",
            metadata={"node": node},
        )
    return row


async def _check_capacity(session: AsyncSession, node: NodeId, facts: NodeFacts) -> None:
    # Before the node's row, unlike elsewhere: whoever changes quotas takes no row of a node, so nobody waits crosswise.
    await lock_quotas(session)
    nodes = list(await session.scalars(select(models.Node)))
    quotas = list(await session.scalars(select(models.TierQuota)))
    for tier in Tier:
        own_bytes = facts.capacities_bytes.get(tier, 0)
        before_bytes = {row.id: capacity_bytes(row, tier) for row in nodes}
        if own_bytes < before_bytes.get(node, 0):
            total_bytes = sum((before_bytes | {node: own_bytes}).values())
            check_reservations((quota.reserved_bytes for quota in quotas if quota.tier is tier), total_bytes, tier)


def _capacities_in(facts: NodeFacts) -> dict[Tier, int]:
    return {tier: facts.capacities_bytes.get(tier, 0) for tier in Tier}


def capacities_of(row: models.Node) -> dict[Tier, int]:
    """The capacity of a node on every tier, in bytes."""
    return {tier: capacity_bytes(row, tier) for tier in Tier}


def capacity_bytes(row: models.Node, tier: Tier) -> int:
    """The capacity of a node on one tier, in bytes."""
    return row.dram_capacity_bytes if tier is Tier.DRAM else row.ssd_capacity_bytes
