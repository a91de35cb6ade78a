"""Records of hours and days through the service: who may read which, pages, times, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import grpc
import pytest
from sqlalchemy import select

from controlplane.db import models
from controlplane.metering import HourCloser, MeterIntake, Registration
from saltern import errors
from saltern.admin.v1 import usage_pb2
from saltern.names import NodeId
from saltern.node.v1 import node_pb2
from saltern.rpc_errors import error_from_rpc
from tenants.quota import Tier
from tenants.roles import Role
from tests.support.admin import GIB, PLATFORM, Admin, admin_of, calling
from tests.support.control import refused

HOUR = timedelta(hours=1)
CAPACITIES_BYTES = {Tier.DRAM: GIB, Tier.SSD: GIB}
GONE = UUID(int=77)
Granularity = usage_pb2.ListUsageRecordsRequest


@pytest.fixture
async def now(admin: Admin) -> datetime:
    """Two tenants, ``acme`` and ``other``, used in each of the last three hours; the oldest one is closed.

    ``acme`` had a namesake that is gone, whose hits were 1,000,000.
    """
    intake, now = MeterIntake(), admin.clock.now.replace(hour=18, minute=30)
    admin.clock.now = now
    uids = {}
    for tenant in ("acme", "other"):
        await admin.create_tenant(tenant)
        async with admin.database.transaction() as session:
            uids[tenant] = str(await session.scalar(select(models.Tenant.uid).where(models.Tenant.id == tenant)))
    for sequence, at in enumerate((now - 3 * HOUR, now - 2 * HOUR, now - HOUR), start=1):
        report = node_pb2.ReportUsageRequest(counters_id="0" * 32, sequence=sequence)
        for tenant in uids:
            report.tenants.add(tenant_id=tenant, tenant_uid=uids[tenant], get_hits=sequence, get_misses=sequence)
        namesake = node_pb2.ReportUsageRequest(counters_id="1" * 32, sequence=sequence)
        namesake.tenants.add(tenant_id="acme", tenant_uid=str(GONE), get_hits=1_000_000)
        async with admin.database.transaction() as session:
            await intake.take_in(session, Registration(NodeId("n1"), GONE, 1), report, at, CAPACITIES_BYTES)
            await intake.take_in(session, Registration(NodeId("n2"), GONE, 1), namesake, at, CAPACITIES_BYTES)
        if sequence == 1:
            await HourCloser(admin.database, lambda: now - 2 * HOUR).step()
    return now


async def listed(admin: Admin, metadata: Any, **fields: Any) -> list[usage_pb2.UsageRecord]:
    """Every page of one record at a time."""
    found, token = [], ""
    while True:
        request = usage_pb2.ListUsageRecordsRequest(parent="tenants/acme", page_size=1, page_token=token, **fields)
        page = await admin.usage.ListUsageRecords(request, metadata=metadata)
        found += page.usage_records
        assert len(page.usage_records) <= 1
        token = page.next_page_token
        if not token:
            return found


async def exported(admin: Admin, metadata: Any, **fields: Any) -> list[usage_pb2.UsageRecord]:
    request = usage_pb2.ExportUsageRecordsRequest(**fields)
    return [
        record
        async for page in admin.usage.ExportUsageRecords(request, metadata=metadata)
        for record in page.usage_records
    ]


async def test_i2_a_tenant_reads_its_own_records_and_nothing_of_a_namesake(admin: Admin, now: datetime) -> None:
    for role in (Role.TENANT_ADMIN, Role.TENANT_AUDITOR, Role.WRITER, Role.READER):
        records = await listed(admin, calling(role, "acme"))
        assert [record.hits for record in records] == [1, 1, 1]
        assert {record.tenant for record in records} == {"tenants/acme"}
    assert [record.is_open for record in records] == [False, True, True]
    starts = [record.start_time.ToDatetime(UTC) for record in records]
    assert starts == sorted(starts) and all(start.minute == 0 for start in starts)
    error = await refused(
        admin.usage.ListUsageRecords(
            usage_pb2.ListUsageRecordsRequest(parent="tenants/acme"), metadata=admin_of("other")
        )
    )
    assert isinstance(error, errors.PermissionDeniedError)


async def test_the_platform_sees_every_tenant_of_a_name_and_those_that_are_gone(admin: Admin, now: datetime) -> None:
    records = await listed(admin, PLATFORM)
    assert sorted(record.hits for record in records) == [1, 1, 1, 1_000_000]
    every = await exported(admin, PLATFORM)
    assert [(record.tenant, record.hits) for record in every if record.start_time == every[0].start_time] == [
        *sorted([("tenants/acme", 1), ("tenants/acme", 1_000_000)], key=lambda pair: uid_order(every, pair)),
        ("tenants/other", 1),
    ]
    assert len(await exported(admin, PLATFORM, closed_only=True)) == 3
    error = await refused(
        admin.usage.ListUsageRecords(usage_pb2.ListUsageRecordsRequest(parent="tenants/never-was"), metadata=PLATFORM)
    )
    assert isinstance(error, errors.NotFoundError)


def uid_order(records: list[usage_pb2.UsageRecord], pair: tuple[str, int]) -> str:
    return next(record.tenant_uid for record in records if (record.tenant, record.hits) == pair)


@pytest.mark.parametrize("metadata", [admin_of("acme"), calling(Role.NODE)], ids=["tenant-admin", "node"])
async def test_an_export_of_every_tenant_is_the_platforms_alone(admin: Admin, now: datetime, metadata: Any) -> None:
    assert isinstance(
        await refused(admin.usage.ListUsages(usage_pb2.ListUsagesRequest(), metadata=metadata)),
        errors.PermissionDeniedError,
    )
    with pytest.raises(grpc.RpcError) as caught:
        await exported(admin, metadata)
    assert isinstance(error_from_rpc(caught.value), errors.PermissionDeniedError)


async def test_days_and_times(admin: Admin, now: datetime) -> None:
    days = await listed(admin, admin_of("acme"), granularity=Granularity.GRANULARITY_DAY)
    assert sum(record.hits for record in days) == 3 and len(days) <= 2
    whole = await listed(admin, admin_of("acme"))
    request = usage_pb2.ListUsageRecordsRequest()
    request.start_time.FromDatetime(now - 2 * HOUR)  # in the midst of an hour: from its beginning
    request.end_time.FromDatetime(now - HOUR)  # and to before the one in the midst of which it ends
    assert await listed(admin, admin_of("acme"), start_time=request.start_time, end_time=request.end_time) == [whole[1]]
    assert await listed(admin, admin_of("acme"), end_time=request.start_time) == [whole[0]]
    assert await listed(admin, admin_of("acme"), by_namespace=True) == []


async def test_page_tokens_of_another_list_and_odd_requests_are_refused(admin: Admin, now: datetime) -> None:
    first = usage_pb2.ListUsageRecordsRequest(parent="tenants/acme", page_size=1)
    token = (await admin.usage.ListUsageRecords(first, metadata=admin_of("acme"))).next_page_token
    for fields, reason in (
        ({"parent": "tenants/other", "page_token": token}, "INVALID_PAGE_TOKEN"),
        ({"page_token": token, "by_namespace": True}, "INVALID_PAGE_TOKEN"),
        ({"page_token": "x"}, "INVALID_PAGE_TOKEN"),
        ({"granularity": 9}, "INVALID_FIELD"),
        ({"page_size": -1}, "INVALID_FIELD"),
    ):
        request = usage_pb2.ListUsageRecordsRequest(**{"parent": "tenants/acme", **fields})  # type: ignore[arg-type]
        error = await refused(admin.usage.ListUsageRecords(request, metadata=PLATFORM))
        assert error.reason == reason, request


async def test_usage_of_every_tenant_comes_in_pages(admin: Admin) -> None:
    for tenant in ("acme", "other", "third"):
        await admin.create_tenant(tenant)
    await admin.set_quota("other", reserved_bytes=0, limit_bytes=GIB)
    found, token = [], ""
    while True:
        request = usage_pb2.ListUsagesRequest(page_size=2, page_token=token)
        page = await admin.usage.ListUsages(request, metadata=PLATFORM)
        found += page.usages
        token = page.next_page_token
        if not token:
            break
    assert [usage.tenant for usage in found] == ["tenants/acme", "tenants/other", "tenants/third"]
    one = await admin.usage.GetUsage(usage_pb2.GetUsageRequest(tenant="tenants/other"), metadata=PLATFORM)
    assert found[1] == one
