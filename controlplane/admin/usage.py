"""UsageService: what each tenant holds and what the cache did for it, now and in every hour; and the nodes."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.fields import parse_page_size, to_timestamp
from controlplane.admin.nodes import leased_bytes, to_node
from controlplane.admin.pages import cut_page, decode_identifier_token, encode_page_token
from controlplane.admin.resources import TIER_TO_PROTO
from controlplane.admin.service import AdminServicer, absent, load_tenant, method, streaming_method
from controlplane.admin.usage_records import collection_of, decode_position, encode_position, parse_query
from controlplane.caller import authorise
from controlplane.db.models import (
    USAGE_COUNTERS,
    USAGE_MAPS,
    MeteredProcess,
    Node,
    NodeTierUsage,
    NodeUsage,
    Tenant,
    TierQuota,
)
from controlplane.metering.messages import to_usage_record
from controlplane.metering.records import by_step, has_records, read_records
from controlplane.node.policy_rows import read_version
from controlplane.rpc import Context
from saltern.admin.v1 import usage_pb2, usage_pb2_grpc
from saltern.names import TenantId, parse_tenant_name, tenant_name
from tenants.roles import Permission

_COLLECTION = "nodes"
_USAGES = "usages"
#: Usage records of one message of an export.
_EXPORT_RECORDS = 500
#: And of one statement: hours that are open are read from their beginning by each.
_READ_RECORDS = 5000
_INT64_MAX = 2**63 - 1


class UsageService(AdminServicer, usage_pb2_grpc.UsageServiceServicer):
    service = "saltern.admin.v1.UsageService"

    @method
    async def GetUsage(self, request: usage_pb2.GetUsageRequest, context: Context) -> usage_pb2.Usage:
        tenant = parse_tenant_name(request.tenant)
        caller = authorise(Permission.USAGE_READ, tenant)
        async with self._database.transaction() as session:
            await load_tenant(session, tenant, caller)
            tiers = await _tier_usage(session, [tenant])
            reports = (await session.scalars(select(NodeUsage).where(NodeUsage.tenant_id == tenant))).all()
            times = await _report_times(session)
        return _to_usage(tenant, tiers.get(tenant, []), reports, times)

    @method
    async def ListUsages(self, request: usage_pb2.ListUsagesRequest, context: Context) -> usage_pb2.ListUsagesResponse:
        authorise(Permission.USAGE_READ, None)
        page_size = parse_page_size(request.page_size)
        after = decode_identifier_token(request.page_token, _USAGES)
        async with self._database.transaction() as session:
            statement = select(Tenant.id).where(Tenant.id > after).order_by(Tenant.id).limit(page_size + 1)
            tenants, last = cut_page((await session.scalars(statement)).all(), page_size)
            tiers = await _tier_usage(session, tenants)
            reports: defaultdict[str, list[NodeUsage]] = defaultdict(list)
            for report in await session.scalars(select(NodeUsage).where(NodeUsage.tenant_id.in_(tenants))):
                reports[report.tenant_id].append(report)
            times = await _report_times(session)
        return usage_pb2.ListUsagesResponse(
            usages=[_to_usage(TenantId(tenant), tiers.get(tenant, []), reports[tenant], times) for tenant in tenants],
            next_page_token=encode_page_token(_USAGES, last) if last else "",
        )

    @method
    async def ListUsageRecords(
        self, request: usage_pb2.ListUsageRecordsRequest, context: Context
    ) -> usage_pb2.ListUsageRecordsResponse:
        tenant = parse_tenant_name(request.parent)
        caller = authorise(Permission.USAGE_READ, tenant)
        collection = collection_of(request)
        page_size = parse_page_size(request.page_size)
        after = decode_position(request.page_token, collection)
        async with self._reading() as session:
            row = await session.get(Tenant, tenant)
            # A tenant sees nothing of an earlier one of its name (I2); the platform also what is left of it.
            if row is None and not (caller.is_platform and await has_records(session, tenant)):
                raise absent(caller, request.parent)
            uid = None if caller.is_platform or row is None else row.uid
            query = await parse_query(session, request, self._parts.clock(), tenant=tenant, tenant_uid=uid)
            records = await read_records(session, query, after=after, limit=page_size + 1)
        page, last = cut_page(records, page_size)
        return usage_pb2.ListUsageRecordsResponse(
            usage_records=map(to_usage_record, page),
            next_page_token=encode_position(collection, last.position) if last else "",
        )

    @streaming_method
    async def ExportUsageRecords(
        self, request: usage_pb2.ExportUsageRecordsRequest, context: Context
    ) -> AsyncIterator[usage_pb2.ExportUsageRecordsResponse]:
        authorise(Permission.USAGE_READ, None)
        async with self._reading() as session:
            whole = await parse_query(session, request, self._parts.clock(), closed_only=request.closed_only)
        for query in by_step(whole):
            after = None
            while True:
                async with self._reading() as session:
                    records = await read_records(session, query, after=after, limit=_READ_RECORDS)
                for at in range(0, len(records), _EXPORT_RECORDS):
                    page = records[at : at + _EXPORT_RECORDS]
                    yield usage_pb2.ExportUsageRecordsResponse(usage_records=map(to_usage_record, page))
                if len(records) < _READ_RECORDS:
                    break
                after = records[-1].position

    def _reading(self) -> AbstractAsyncContextManager[AsyncSession]:
        return self._database.transaction(isolation_level="REPEATABLE READ")

    @method
    async def ListNodes(self, request: usage_pb2.ListNodesRequest, context: Context) -> usage_pb2.ListNodesResponse:
        authorise(Permission.NODES_READ, None)
        page_size = parse_page_size(request.page_size)
        after = decode_identifier_token(request.page_token, _COLLECTION)
        async with self._database.transaction() as session:
            statement = select(Node).where(Node.id > after).order_by(Node.id).limit(page_size + 1)
            rows, last = cut_page((await session.scalars(statement)).all(), page_size)
            leased = await leased_bytes(session, [row.id for row in rows])
            newest = await read_version(session)
        now, lost_after = self._parts.clock(), self._parts.node_lost_after
        return usage_pb2.ListNodesResponse(
            nodes=[to_node(row, leased.get(row.id, (0, 0)), now, lost_after, newest) for row in rows],
            next_page_token=encode_page_token(_COLLECTION, last.id) if last else "",
        )


async def _report_times(session: AsyncSession) -> dict[str, datetime]:
    """When what each node reports was last stored, by node; a row of its books is as old as what it says."""
    newest = func.max(MeteredProcess.report_time)
    rows = await session.execute(select(MeteredProcess.node_id, newest).group_by(MeteredProcess.node_id))
    return dict(rows.all())


def _to_usage(
    tenant: TenantId,
    tiers: Sequence[usage_pb2.TierUsage],
    reports: Sequence[NodeUsage],
    times: Mapping[str, datetime],
) -> usage_pb2.Usage:
    """What one tenant holds, and its counters over all nodes; ``report_time`` is the oldest.

    Args:
        times: of the newest reports, by node; a node of an earlier version has none.
    """
    reported = (max(report.report_time, times.get(report.node_id, report.report_time)) for report in reports)
    return usage_pb2.Usage(
        tenant=tenant_name(tenant),
        tiers=tiers,
        report_time=to_timestamp(min(reported, default=None)),
        ssd=_ssd_activity(_sum_by_name(report.ssd for report in reports if report.ssd is not None)),
        **_totals(reports),
    )


def _totals(reports: Sequence[NodeUsage]) -> dict[str, Any]:
    """Fields of ``Usage`` by name: sums, and sums by name."""
    sums = {name: _saturated(sum(getattr(report, name) for report in reports)) for name in USAGE_COUNTERS}
    return sums | {name: _sum_by_name(getattr(report, name) for report in reports) for name in USAGE_MAPS}


def _ssd_activity(counts: Mapping[str, int]) -> usage_pb2.SsdActivity | None:
    """None where no node has an SSD tier. What a later version stored beside is left out."""
    if not counts:
        return None
    known = usage_pb2.SsdActivity.DESCRIPTOR.fields_by_name
    return usage_pb2.SsdActivity(**{name: count for name, count in counts.items() if name in known})


def _sum_by_name(maps: Iterable[Mapping[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for counts in maps:
        totals.update(counts)
    return {name: _saturated(total) for name, total in totals.items()}


async def _tier_usage(session: AsyncSession, tenants: Collection[str]) -> dict[str, list[usage_pb2.TierUsage]]:
    """Quota and use of every tier of each tenant, summed over the nodes."""
    statement = (
        select(
            TierQuota,
            func.coalesce(func.sum(NodeTierUsage.used_bytes), 0).label("used_bytes"),
            func.coalesce(func.sum(NodeTierUsage.entries), 0).label("entries"),
            func.coalesce(func.sum(NodeTierUsage.lent_bytes), 0).label("lent_bytes"),
            func.coalesce(func.sum(NodeTierUsage.borrowed_bytes), 0).label("borrowed_bytes"),
        )
        .outerjoin(
            NodeTierUsage,
            (NodeTierUsage.tenant_id == TierQuota.tenant_id) & (NodeTierUsage.tier == TierQuota.tier),
        )
        .where(TierQuota.tenant_id.in_(tenants))
        .group_by(TierQuota.tenant_id, TierQuota.tier)  # the primary key: it determines the other columns
        .order_by(TierQuota.tier)
    )
    found: defaultdict[str, list[usage_pb2.TierUsage]] = defaultdict(list)
    for row in await session.execute(statement):
        found[row.TierQuota.tenant_id].append(
            usage_pb2.TierUsage(
                tier=TIER_TO_PROTO[row.TierQuota.tier],
                used_bytes=_saturated(row.used_bytes),
                limit_bytes=row.TierQuota.limit_bytes,
                reserved_bytes=row.TierQuota.reserved_bytes,
                entries=_saturated(row.entries),
                lent_bytes=_saturated(row.lent_bytes),
                borrowed_bytes=_saturated(row.borrowed_bytes),
            )
        )
    return found


def _saturated(total: int) -> int:
    """A sum as int64: each counter of a node fits, their sum need not."""
    return min(int(total), _INT64_MAX)
