"""The registry of cache nodes: rows of nodes and of what they report. Every function runs in the caller's transaction.

A node proves that it is the current process of its name by the fencing epoch: each registration raises it, and whatever
comes with an older one is refused, so a process that was cut off and replaced cannot overwrite the books of its
successor (I8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core import lease_terms
from controlplane.db import models
from controlplane.db.locks import lock_quotas
from controlplane.node.lease_rows import store_terms, terms_of, to_ms
from saltern.errors import AbortedError
from saltern.names import NodeId, TenantId
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
class TierBooks:
    """What a tenant holds on one tier of one node (I8), and how that compares with its reservation there."""

    used_bytes: int
    entries: int
    lent_bytes: int
    borrowed_bytes: int


@dataclass(frozen=True, slots=True)
class TenantBooks:
    """Absolute books of one tenant on one node: what it holds, and counters since the node's process started.

    Attributes:
        counters: by the names of ``USAGE_COUNTERS``.
        maps: counters by name (a cause, a reason), by the names of ``USAGE_MAPS``.
        ssd: by the names of the fields of ``SsdActivity``; None without an SSD tier.
    """

    tenant: TenantId
    tiers: Mapping[Tier, TierBooks]
    counters: Mapping[str, int]
    maps: Mapping[str, Mapping[str, int]]
    ssd: Mapping[str, int] | None


async def register(session: AsyncSession, node: NodeId, facts: NodeFacts, now: datetime) -> models.Node:
    """Store a registration under a new fencing epoch; return the row, locked, for :func:`begin_lease` to complete.

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
    if row is None:
        row = models.Node(id=node, fencing_epoch=1, settled_version=0, lease_version=0, state_id="", **columns)
        session.add(row)
    else:
        for name, value in columns.items():
            setattr(row, name, value)
        row.fencing_epoch += 1
    await session.flush()
    return row


def begin_lease(row: models.Node, state_id: str, now: datetime, duration: timedelta, version: int) -> None:
    """Begin the lease of the process that registers, with policy ``version``."""
    store_terms(row, lease_terms.registered(terms_of(row), state_id, to_ms(now), duration // _MS, version))


def renew_lease(row: models.Node, now: datetime, duration: timedelta, version: int) -> None:
    """The node has reported, and is answered that it may grow for ``duration`` from when it sent the report.

    Args:
        version: of the newest policy, read with the row locked.
    """
    store_terms(row, lease_terms.renewed(terms_of(row), to_ms(now), duration // _MS, version))


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


async def replace_usage(session: AsyncSession, node: NodeId, books: Iterable[TenantBooks], now: datetime) -> None:
    """Replace everything that was reported for ``node``: a report is the whole truth, not a difference (I8).

    Books of tenants that were deleted meanwhile are dropped.
    """
    books = list(books)
    # Tenants before usage, as the cascade of a deletion does it, or the two could wait for each other.
    named = select(models.Tenant.id).where(models.Tenant.id.in_([book.tenant for book in books]))
    known = set(await session.scalars(named.order_by(models.Tenant.id).with_for_update(read=True, key_share=True)))
    kept = [book for book in books if book.tenant in known]
    await session.execute(delete(models.NodeTierUsage).where(models.NodeTierUsage.node_id == node))
    await session.execute(delete(models.NodeUsage).where(models.NodeUsage.node_id == node))
    usage = [
        {
            "node_id": node,
            "tenant_id": book.tenant,
            "report_time": now,
            "ssd": book.ssd,
            **book.counters,
            **book.maps,
        }
        for book in kept
    ]
    tiers = [
        {
            "node_id": node,
            "tenant_id": book.tenant,
            "tier": tier,
            "used_bytes": tier_books.used_bytes,
            "entries": tier_books.entries,
            "lent_bytes": tier_books.lent_bytes,
            "borrowed_bytes": tier_books.borrowed_bytes,
        }
        for book in kept
        for tier, tier_books in book.tiers.items()
    ]
    if usage:
        await session.execute(insert(models.NodeUsage), usage)
    if tiers:
        await session.execute(insert(models.NodeTierUsage), tiers)


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


def capacities_of(row: models.Node) -> dict[Tier, int]:
    """The capacity of a node on every tier, in bytes."""
    return {tier: capacity_bytes(row, tier) for tier in Tier}


def capacity_bytes(row: models.Node, tier: Tier) -> int:
    """The capacity of a node on one tier, in bytes."""
    return row.dram_capacity_bytes if tier is Tier.DRAM else row.ssd_capacity_bytes
