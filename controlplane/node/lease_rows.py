"""Leases as rows: read for some tenants or all, and written in one statement however many there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from sqlalchemy import ARRAY, BigInteger, Text, any_, bindparam, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.lease_terms import LeaseTerms
from controlplane.core.leases import Holding, Member, Members
from controlplane.db import models
from saltern.names import NodeId, TenantId
from tenants.quota import Tier, TierQuota

#: One tenant's quota on one tier.
QuotaKey: TypeAlias = tuple[TenantId, Tier]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_COLUMNS: Final = ("tenant_id", "tier", "node_id", "granted_bytes", "believed_bytes", "target_bytes", "version")
_TEXTS: Final = 3
_ROWS_AT_ONCE: Final = 10_000
_UPSERT: Final = text(
    f"INSERT INTO quota_leases ({', '.join(_COLUMNS)})"  # noqa: S608 (constants)
    f" SELECT * FROM unnest({', '.join(f':{column}' for column in _COLUMNS)})"
    " ON CONFLICT (tenant_id, tier, node_id) DO UPDATE SET"
    f" {', '.join(f'{column} = excluded.{column}' for column in _COLUMNS[_TEXTS:])}"
).bindparams(
    *(bindparam(column, type_=ARRAY(Text)) for column in _COLUMNS[:_TEXTS]),
    *(bindparam(column, type_=ARRAY(BigInteger)) for column in _COLUMNS[_TEXTS:]),
)


@dataclass(frozen=True, slots=True)
class LeaseBook:
    """Quotas, and what each node holds of them."""

    quotas: dict[QuotaKey, TierQuota] = field(default_factory=dict)
    holdings: dict[QuotaKey, dict[NodeId, Holding]] = field(default_factory=lambda: defaultdict(dict))


async def lock_tenants(session: AsyncSession, tenants: Iterable[TenantId] | None) -> None:
    """Hold tenants against deletion, in the order of their ids.

    Before their leases, as the cascade of a deletion does it, or the two could wait for each other.

    Args:
        tenants: None for all.
    """
    statement = select(models.Tenant.id).order_by(models.Tenant.id)
    if tenants is not None:
        statement = statement.where(models.Tenant.id == any_(bindparam("names", list(tenants), ARRAY(Text))))
    await session.execute(statement.with_for_update(read=True, key_share=True))


async def read_book(session: AsyncSession, tenants: Iterable[TenantId] | None) -> LeaseBook:
    """The leases of ``tenants``; None for all."""
    quota, lease = models.TierQuota, models.QuotaLease
    quotas = select(quota.tenant_id, quota.tier, quota.reserved_bytes, quota.limit_bytes, quota.weight)
    leases = select(
        lease.tenant_id,
        lease.tier,
        lease.node_id,
        lease.granted_bytes,
        lease.believed_bytes,
        lease.target_bytes,
        lease.version,
    )
    if tenants is not None:
        # One array, not a parameter for each name: the statements are the same for any number of them.
        names = bindparam("names", list(tenants), ARRAY(Text))
        quotas, leases = quotas.where(quota.tenant_id == any_(names)), leases.where(lease.tenant_id == any_(names))
    book = LeaseBook()
    for tenant, tier, reserved, limit, weight in await session.execute(quotas):
        book.quotas[TenantId(tenant), tier] = TierQuota(reserved, limit, weight)
    for tenant, tier, node, *values in await session.execute(leases):
        book.holdings[TenantId(tenant), tier][NodeId(node)] = Holding(*values)
    return book


async def write_holdings(session: AsyncSession, changed: Mapping[QuotaKey, Mapping[NodeId, Holding]]) -> None:
    """Write holdings over those that are there."""
    rows = [
        (tenant, tier.value, node, holding.granted_bytes, holding.believed_bytes, holding.target_bytes, holding.version)
        for (tenant, tier), by_node in changed.items()
        for node, holding in by_node.items()
    ]
    for at in range(0, len(rows), _ROWS_AT_ONCE):  # each statement well within its time limit
        columns = map(list, zip(*rows[at : at + _ROWS_AT_ONCE], strict=True))
        await session.execute(_UPSERT, dict(zip(_COLUMNS, columns, strict=True)))


async def read_members(session: AsyncSession) -> dict[Tier, Members]:
    """Every node, as the split of each tier sees it."""
    rows = list(await session.scalars(select(models.Node).order_by(models.Node.id)))
    return {
        tier: {
            NodeId(row.id): Member(
                capacity_bytes=row.dram_capacity_bytes if tier is Tier.DRAM else row.ssd_capacity_bytes,
                settled_version=row.settled_version,
                takes_leases=terms_of(row).takes_leases and not is_draining(row),
            )
            for row in rows
        }
        for tier in Tier
    }


def is_draining(row: models.Node) -> bool:
    return row.admin_state is models.NodeAdminState.DRAINING


def terms_of(row: models.Node) -> LeaseTerms:
    """The terms of a node's leases."""
    return LeaseTerms(
        state_id=row.state_id,
        settled_version=row.settled_version,
        lease_version=row.lease_version,
        expire_ms=None if row.lease_expire_time is None else to_ms(row.lease_expire_time),
        from_ms=None if row.lease_from_time is None else to_ms(row.lease_from_time),
    )


def store_terms(row: models.Node, terms: LeaseTerms) -> None:
    """Write the terms into the row; the session flushes them."""
    row.state_id = terms.state_id
    row.settled_version = terms.settled_version
    row.lease_version = terms.lease_version
    row.lease_expire_time = None if terms.expire_ms is None else _EPOCH + terms.expire_ms * _MS
    row.lease_from_time = None if terms.from_ms is None else _EPOCH + terms.from_ms * _MS


def to_ms(time: datetime) -> int:
    """Unix milliseconds."""
    return (time - _EPOCH) // _MS
