"""Leases of namespaces' limits as rows: the shell around :mod:`controlplane.core.namespace_leases`.

The keeper of leases (:mod:`controlplane.node.lease_keeper`) does a step of these with each step of quotas, in the same
transaction and carried by the same policy version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from sqlalchemy import ARRAY, BigInteger, Text, any_, bindparam, delete, or_, select, text, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.leases import Holding, Members
from controlplane.core.namespace_leases import lease_namespace
from controlplane.db import models
from controlplane.node.lease_rows import LeaseBook, QuotaKey
from saltern.names import NamespaceId, NodeId, TenantId
from tenants.quota import Tier

#: One namespace's limit on one tier.
NamespaceKey: TypeAlias = tuple[TenantId, NamespaceId, Tier]

_COLUMNS: Final = (
    "tenant_id",
    "namespace_id",
    "tier",
    "node_id",
    "granted_bytes",
    "believed_bytes",
    "target_bytes",
    "version",
)
_TEXTS: Final = 4
_UPSERT: Final = text(
    f"INSERT INTO namespace_leases ({', '.join(_COLUMNS)})"  # noqa: S608 (constants)
    f" SELECT * FROM unnest({', '.join(f':{column}' for column in _COLUMNS)})"
    " ON CONFLICT (tenant_id, namespace_id, tier, node_id) DO UPDATE SET"
    f" {', '.join(f'{column} = excluded.{column}' for column in _COLUMNS[_TEXTS:])}"
).bindparams(
    *(bindparam(column, type_=ARRAY(Text)) for column in _COLUMNS[:_TEXTS]),
    *(bindparam(column, type_=ARRAY(BigInteger)) for column in _COLUMNS[_TEXTS:]),
)


async def step_namespaces(
    session: AsyncSession,
    tenants: Iterable[TenantId] | None,
    members: Mapping[Tier, Members],
    book: LeaseBook,
    *,
    moved: Mapping[QuotaKey, Mapping[NodeId, Holding]],
    version: int,
) -> dict[NamespaceKey, dict[NodeId, Holding]]:
    """One step of the limits of ``tenants``; None for all. Leases of limits that were lifted are removed.

    Holds the namespaces against deletion before it looks at their leases, as the cascade of a deletion comes to them.

    Args:
        book, moved: where the tenants' quotas lie, and what of that changes with the same step.

    Returns:
        The holdings that change: to be written with :func:`write_namespace_holdings`.
    """
    limits = await _lock_limits(session, tenants)
    holdings = await _read_holdings(session, tenants)
    lifted = holdings.keys() - limits.keys()
    if lifted:
        lease = models.NamespaceLease
        key = tuple_(lease.tenant_id, lease.namespace_id, lease.tier)
        await session.execute(delete(lease).where(key.in_(list(lifted))))
    changed: dict[NamespaceKey, dict[NodeId, Holding]] = {}
    for (tenant, namespace, tier), limit_bytes in limits.items():
        placed = {**book.holdings.get((tenant, tier), {}), **moved.get((tenant, tier), {})}
        placed_bytes = {node: holding.target_bytes for node, holding in placed.items()}
        own = holdings.get((tenant, namespace, tier), {})
        new = lease_namespace(limit_bytes, own, members[tier], version, placed_bytes)
        if new:
            changed[tenant, namespace, tier] = new
    return changed


async def write_namespace_holdings(
    session: AsyncSession, changed: Mapping[NamespaceKey, Mapping[NodeId, Holding]]
) -> None:
    """Write holdings over those that are there."""
    rows = [
        (*key, node, holding.granted_bytes, holding.believed_bytes, holding.target_bytes, holding.version)
        for key, by_node in changed.items()
        for node, holding in by_node.items()
    ]
    if rows:
        await session.execute(_UPSERT, dict(zip(_COLUMNS, map(list, zip(*rows, strict=True)), strict=True)))


async def tenants_with_unmet_limits(session: AsyncSession) -> set[TenantId]:
    """Tenants of which a namespace's limit is not where it should be."""
    lease = models.NamespaceLease
    rows = await session.scalars(select(lease.tenant_id).where(lease.granted_bytes != lease.target_bytes).distinct())
    return {TenantId(tenant) for tenant in rows}


async def reclaim_namespaces(session: AsyncSession, node: NodeId, version: int) -> None:
    """Everything leased to a node is taken back; its lease has run out before."""
    await session.execute(
        update(models.NamespaceLease)
        .where(models.NamespaceLease.node_id == node)
        .values(granted_bytes=0, believed_bytes=0, target_bytes=0, version=version)
    )


async def _lock_limits(session: AsyncSession, tenants: Iterable[TenantId] | None) -> dict[NamespaceKey, int]:
    row = models.Namespace
    statement = (
        select(row.tenant_id, row.id, row.dram_limit_bytes, row.ssd_limit_bytes)
        .where(or_(row.dram_limit_bytes.is_not(None), row.ssd_limit_bytes.is_not(None)))
        .order_by(row.tenant_id, row.id)
        .with_for_update(read=True, key_share=True)
    )
    if tenants is not None:
        statement = statement.where(row.tenant_id == any_(bindparam("names", list(tenants), ARRAY(Text))))
    return {
        (TenantId(tenant), NamespaceId(namespace), tier): limit_bytes
        for tenant, namespace, dram_bytes, ssd_bytes in await session.execute(statement)
        for tier, limit_bytes in ((Tier.DRAM, dram_bytes), (Tier.SSD, ssd_bytes))
        if limit_bytes is not None
    }


async def _read_holdings(
    session: AsyncSession, tenants: Iterable[TenantId] | None
) -> dict[NamespaceKey, dict[NodeId, Holding]]:
    lease = models.NamespaceLease
    statement = select(
        lease.tenant_id,
        lease.namespace_id,
        lease.tier,
        lease.node_id,
        lease.granted_bytes,
        lease.believed_bytes,
        lease.target_bytes,
        lease.version,
    )
    if tenants is not None:
        statement = statement.where(lease.tenant_id == any_(bindparam("names", list(tenants), ARRAY(Text))))
    holdings: dict[NamespaceKey, dict[NodeId, Holding]] = defaultdict(dict)
    for tenant, namespace, tier, node, *values in await session.execute(statement):
        holdings[TenantId(tenant), NamespaceId(namespace), tier][NodeId(node)] = Holding(*values)
    return holdings
