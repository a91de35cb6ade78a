"""What nodes report of tenants, as rows: what it says now, never a difference (I8); in the caller's transaction.

A report names every tenant, and of 10,000 most are as they were two seconds before. Only rows that say something else
are written: who calls knows what is stored (:mod:`controlplane.metering.intake`). They go in as one JSON document,
which takes a tenth of the time that as many parameters do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import ARRAY, Text, any_, bindparam, delete, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db import models
from controlplane.db.models import USAGE_COUNTERS, USAGE_MAPS
from saltern.names import NodeId, TenantId
from tenants.quota import Tier

_TIER_COUNTS: Final = ("used_bytes", "entries", "lent_bytes", "borrowed_bytes")


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


def _insert(table: str, types: Mapping[str, str]) -> Any:
    """A statement that takes ``rows`` as JSON; columns that are not in ``types`` come as parameters of their names."""
    record = ", ".join(f"{column} {kind}" for column, kind in types.items())
    fixed = {"node_usage": ("node_id", "report_time"), "node_tier_usage": ("node_id",)}[table]
    return text(
        f"INSERT INTO {table} ({', '.join((*fixed, *types))})"  # noqa: S608 (constants)
        f" SELECT {', '.join((*(f':{column}' for column in fixed), *types))}"
        f" FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r ({record})"
    )


_INSERT_USAGE: Final = _insert(
    "node_usage",
    {"tenant_id": "text"}
    | dict.fromkeys(USAGE_COUNTERS, "bigint")
    | dict.fromkeys(USAGE_MAPS, "jsonb")
    | {"ssd": "jsonb"},
)
_INSERT_TIERS: Final = _insert(
    "node_tier_usage", {"tenant_id": "text", "tier": "text"} | dict.fromkeys(_TIER_COUNTS, "bigint")
)


async def write_books(
    session: AsyncSession,
    node: NodeId,
    books: Sequence[TenantBooks],
    now: datetime,
    *,
    gone: Collection[TenantId] | None = None,
) -> None:
    """Store what a report of ``node`` says; books of tenants that were deleted meanwhile are dropped.

    Args:
        books: of the tenants that are not stored like this already.
        gone: tenants that are stored and that the report does not name any more; None: nobody knows what is stored,
            ``books`` are of every tenant that it names, and take the place of everything.
    """
    names = bindparam("names", [*(one.tenant for one in books), *(gone or ())], ARRAY(Text))
    # Tenants before usage, as the cascade of a deletion does it, or the two could wait for each other.
    row = models.Tenant
    named = select(row.id).where(row.id == any_(names)).order_by(row.id)
    known = set(await session.scalars(named.with_for_update(read=True, key_share=True)))
    for model in (models.NodeTierUsage, models.NodeUsage):
        stored = delete(model).where(model.node_id == node)
        await session.execute(stored if gone is None else stored.where(model.tenant_id == any_(names)))
    kept = [one for one in books if one.tenant in known]
    if not kept:
        return
    usage = [{"tenant_id": one.tenant, "ssd": one.ssd, **one.counters, **_maps(one)} for one in kept]
    await session.execute(_INSERT_USAGE, {"node_id": node, "report_time": now, "rows": _to_json(usage)})
    tiers = [
        {"tenant_id": one.tenant, "tier": tier.value} | {name: getattr(tier_books, name) for name in _TIER_COUNTS}
        for one in kept
        for tier, tier_books in one.tiers.items()
    ]
    if tiers:
        await session.execute(_INSERT_TIERS, {"node_id": node, "rows": _to_json(tiers)})


def _maps(books: TenantBooks) -> dict[str, Mapping[str, int]]:
    return {name: books.maps.get(name, {}) for name in USAGE_MAPS}


def _to_json(rows: list[dict[str, Any]]) -> str:
    return msgspec.json.encode(rows).decode()
