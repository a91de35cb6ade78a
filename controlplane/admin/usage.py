"""UsageService: what each tenant holds and what the cache did for it, as the nodes last reported; and the nodes."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.fields import parse_page_size, to_timestamp
from controlplane.admin.pages import cut_page, decode_identifier_token, encode_page_token
from controlplane.admin.resources import TIER_TO_PROTO
from controlplane.admin.service import AdminServicer, load_tenant, method
from controlplane.caller import authorise
from controlplane.db.models import Node, NodeTierUsage, NodeUsage, TierQuota
from controlplane.rpc import Context
from saltern.admin.v1 import usage_pb2, usage_pb2_grpc
from saltern.names import NodeId, TenantId, node_name, parse_tenant_name, tenant_name
from tenants.roles import Permission

_COLLECTION = "nodes"
_INT64_MAX = 2**63 - 1
_COUNTERS = (
    "get_hits",
    "get_misses",
    "get_bytes",
    "put_bytes",
    "puts_stored",
    "puts_refused",
    "evictions",
    "evicted_bytes",
)


class UsageService(AdminServicer, usage_pb2_grpc.UsageServiceServicer):
    service = "saltern.admin.v1.UsageService"

    @method
    async def GetUsage(self, request: usage_pb2.GetUsageRequest, context: Context) -> usage_pb2.Usage:
        tenant = parse_tenant_name(request.tenant)
        caller = authorise(Permission.USAGE_READ, tenant)
        async with self._database.transaction() as session:
            await load_tenant(session, tenant, caller)
            tiers = await _tier_usage(session, tenant)
            sums = [func.coalesce(func.sum(getattr(NodeUsage, name)), 0) for name in _COUNTERS]
            totals = select(func.min(NodeUsage.report_time), *sums).where(NodeUsage.tenant_id == tenant)
            report_time, *counters = (await session.execute(totals)).one()
        return usage_pb2.Usage(
            tenant=tenant_name(tenant),
            tiers=tiers,
            report_time=to_timestamp(report_time),
            **{name: _saturated(total) for name, total in zip(_COUNTERS, counters, strict=True)},
        )

    @method
    async def ListNodes(self, request: usage_pb2.ListNodesRequest, context: Context) -> usage_pb2.ListNodesResponse:
        authorise(Permission.NODES_READ, None)
        page_size = parse_page_size(request.page_size)
        after = decode_identifier_token(request.page_token, _COLLECTION)
        async with self._database.transaction() as session:
            statement = select(Node).where(Node.id > after).order_by(Node.id).limit(page_size + 1)
            rows, last = cut_page((await session.scalars(statement)).all(), page_size)
        return usage_pb2.ListNodesResponse(
            nodes=map(self._to_node, rows), next_page_token=encode_page_token(_COLLECTION, last.id) if last else ""
        )

    def _to_node(self, row: Node) -> usage_pb2.Node:
        live = self._parts.clock() - row.last_report_time < self._parts.node_lost_after
        return usage_pb2.Node(
            name=node_name(NodeId(row.id)),
            state=usage_pb2.Node.STATE_LIVE if live else usage_pb2.Node.STATE_LOST,
            wire_endpoint=row.wire_endpoint,
            grpc_endpoint=row.grpc_endpoint,
            dram_capacity_bytes=row.dram_capacity_bytes,
            policy_version=row.applied_version,
            last_report_time=to_timestamp(row.last_report_time),
        )


async def _tier_usage(session: AsyncSession, tenant: TenantId) -> list[usage_pb2.TierUsage]:
    """Quota and use of every tier, summed over the nodes."""
    statement = (
        select(
            TierQuota,
            func.coalesce(func.sum(NodeTierUsage.used_bytes), 0).label("used_bytes"),
            func.coalesce(func.sum(NodeTierUsage.entries), 0).label("entries"),
        )
        .outerjoin(
            NodeTierUsage,
            (NodeTierUsage.tenant_id == TierQuota.tenant_id) & (NodeTierUsage.tier == TierQuota.tier),
        )
        .where(TierQuota.tenant_id == tenant)
        .group_by(TierQuota.tenant_id, TierQuota.tier)  # the primary key: it determines the other columns
        .order_by(TierQuota.tier)
    )
    return [
        usage_pb2.TierUsage(
            tier=TIER_TO_PROTO[row.TierQuota.tier],
            used_bytes=_saturated(row.used_bytes),
            limit_bytes=row.TierQuota.limit_bytes,
            reserved_bytes=row.TierQuota.reserved_bytes,
            entries=_saturated(row.entries),
        )
        for row in await session.execute(statement)
    ]


def _saturated(total: int) -> int:
    """A sum as int64: each counter of a node fits, their sum need not."""
    return min(int(total), _INT64_MAX)
