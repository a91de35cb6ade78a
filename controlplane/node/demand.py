"""What nodes have reported since the last look: where a tenant presses against its quota, and what it earns by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final, TypeAlias

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.lease_demand import Demand
from controlplane.db import models
from controlplane.db.row_parts import in_parts
from controlplane.node.lease_rows import QuotaKey
from saltern.names import NodeId, TenantId
from tenants.quota import Tier

#: (bytes of hits, entries evicted or puts refused for want of quota), since the node's process started.
_Counts: TypeAlias = tuple[int, int]

_EVICTED_AT_LIMIT: Final = ("own-limit", "soft-mark")
_REFUSED_AT_LIMIT: Final = "QUOTA_EXCEEDED"
_ROWS_AT_ONCE: Final = 1_000


class DemandMeter:
    """Remembers the counters of the last look. A first look finds nothing: there is nothing to compare with."""

    def __init__(self) -> None:
        self._last: dict[tuple[TenantId, Tier, NodeId], _Counts] = {}

    async def look(self, session: AsyncSession) -> dict[QuotaKey, dict[NodeId, Demand]]:
        """Demand since the last look, of the quotas that are pressed somewhere with hits; nodes without are left out.

        A counter below the one before is a new process's: all it says is new.
        """
        usage, books = models.NodeUsage, models.NodeTierUsage
        statement = select(
            books.tenant_id,
            books.tier,
            books.node_id,
            books.used_bytes,
            usage.get_bytes,
            usage.evictions_by_cause,
            usage.refused_by_reason,
            usage.ssd,
            usage.demotions_dropped_by_reason,
        ).join(usage, (usage.node_id == books.node_id) & (usage.tenant_id == books.tenant_id))
        last, self._last = self._last, {}
        demands: dict[QuotaKey, dict[NodeId, Demand]] = defaultdict(dict)
        # In parts: 10,000 tenants on many nodes take a second, in which others have the event loop.
        async for part in in_parts(session, statement, _ROWS_AT_ONCE):
            for tenant, tier, node, used_bytes, get_bytes, evictions, refusals, ssd, dropped in part:
                key = (TenantId(tenant), tier, NodeId(node))
                counts = _dram(get_bytes, evictions, refusals) if tier is Tier.DRAM else _ssd(ssd or {}, dropped)
                self._last[key] = counts
                if key in last:
                    goes_on = all(new >= old for new, old in zip(counts, last[key], strict=True))
                    before = last[key] if goes_on else (0, 0)
                    demands[key[:2]][key[2]] = Demand(used_bytes, counts[0] - before[0], counts[1] - before[1])
        return {
            key: by_node
            for key, by_node in demands.items()
            if any(demand.pressed and demand.hit_bytes for demand in by_node.values())
        }


def _dram(get_bytes: int, evictions: Mapping[str, int], refusals: Mapping[str, int]) -> _Counts:
    return get_bytes, sum(evictions.get(cause, 0) for cause in _EVICTED_AT_LIMIT) + refusals.get(_REFUSED_AT_LIMIT, 0)


def _ssd(activity: Mapping[str, int], dropped: Mapping[str, int]) -> _Counts:
    return activity.get("read_bytes", 0), activity.get("evictions", 0) + dropped.get("no-room", 0)
