"""A tenant's usage against its quota, and what it costs."""

from __future__ import annotations

import asyncio
from datetime import datetime

from starlette.responses import Response

from controlplane.console.views.cost import cost_view, find_month, months_until
from controlplane.console.views.usage import PERIODS, find_period, usage_view
from controlplane.console.visit import Visit, page
from saltern.admin.v1.tenants_pb2 import GetTenantRequest, Tenant
from saltern.admin.v1.usage_pb2 import GetUsageRequest, ListUsageRecordsRequest, UsageRecord
from saltern.billing.columns import COLUMNS, csv_head, csv_line, to_row
from saltern.billing.prices import COST_COLUMNS


@page
async def overview(visit: Visit) -> Response:
    period = find_period(visit.query.get("period"))
    tenant, usage, records = await asyncio.gather(
        visit.calls(visit.services.tenants.GetTenant, GetTenantRequest(name=visit.parent)),
        visit.calls(visit.services.usage.GetUsage, GetUsageRequest(tenant=visit.parent)),
        _records(visit, period.granularity, period.begin(visit.now), None),
    )
    return visit.render(
        "overview.html",
        f"{visit.tenant} overview",
        display_name=tenant.display_name,
        is_suspended=tenant.state == Tenant.STATE_SUSPENDED,
        view=usage_view(usage, records, period, visit.now),
        period=period,
        periods=PERIODS,
    )


@page
async def cost(visit: Visit) -> Response:
    month = find_month(visit.query.get("month"), visit.now)
    records = await _records(visit, ListUsageRecordsRequest.GRANULARITY_DAY, month.begin, month.end)
    return visit.render(
        "cost.html",
        f"{visit.tenant} cost",
        view=cost_view(records, visit.console.prices),
        month=month,
        months=months_until(visit.now),
    )


@page
async def cost_csv(visit: Visit) -> Response:
    """The days of a month as ``saltern usage --by day -o csv`` prints them."""
    month, prices = find_month(visit.query.get("month"), visit.now), visit.console.prices
    records = await _records(visit, ListUsageRecordsRequest.GRANULARITY_DAY, month.begin, month.end)
    lines = [csv_head((*COLUMNS, *(COST_COLUMNS if prices else ())))]
    lines += (csv_line({**to_row(record), **(prices.columns(record) if prices else {})}) for record in records)
    return Response(
        "".join(lines),
        media_type="text/csv; charset=utf-8",
        headers={"content-disposition": f'attachment; filename="{visit.tenant}-{month.name}.csv"'},
    )


async def _records(
    visit: Visit,
    granularity: ListUsageRecordsRequest.Granularity.ValueType,
    begin: datetime,
    end: datetime | None,
) -> list[UsageRecord]:
    request = ListUsageRecordsRequest(parent=visit.parent, granularity=granularity)
    request.start_time.FromDatetime(begin)
    if end is not None:
        request.end_time.FromDatetime(end)
    return await visit.calls.list(visit.services.usage.ListUsageRecords, request, "usage_records")
