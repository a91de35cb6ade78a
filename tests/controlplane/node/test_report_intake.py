"""What a report says of tenants is stored apart from the lease that it renews: neither waits for the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest
from sqlalchemy import func, select

from controlplane.db import models
from controlplane.node import registry, report_intake
from saltern import errors
from saltern.admin.v1 import credentials_pb2, quotas_pb2
from saltern.auth.v1 import auth_pb2
from saltern.node.v1 import node_pb2
from tests.support.control import Control, refused

Metadata = tuple[tuple[str, str], ...]
COUNTERS = "0" * 31 + "1"


@pytest.fixture
async def as_node(control: Control) -> Metadata:
    await control.add_tenant("acme", "chat", limit_bytes=2**20)
    return await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))


async def register(control: Control, as_node: Metadata) -> int:
    request = node_pb2.RegisterNodeRequest(
        node_id="node-1",
        endpoint=auth_pb2.NodeEndpoint(wire_endpoint="127.0.0.1:7701"),
        capacities=[node_pb2.TierCapacity(tier=quotas_pb2.TIER_DRAM, capacity_bytes=2**26)],
    )
    epoch: int = (await control.node.RegisterNode(request, metadata=as_node)).fencing_epoch
    return epoch


async def report(control: Control, as_node: Metadata, hits: int, *, fencing_epoch: int = 1) -> None:
    """The report number ``hits``: so many hits, and as many bytes held."""
    tier = node_pb2.TenantTierUsage(tier=quotas_pb2.TIER_DRAM, used_bytes=hits, entries=1)
    async with control.database.transaction() as session:
        uid = await session.scalar(select(models.Tenant.uid).where(models.Tenant.id == "acme"))
    usage = node_pb2.TenantUsage(tenant_id="acme", tenant_uid=str(uid), tiers=[tier], get_hits=hits)
    request = node_pb2.ReportUsageRequest(
        node_id="node-1", fencing_epoch=fencing_epoch, counters_id=COUNTERS, sequence=hits, tenants=[usage]
    )
    await control.node.ReportUsage(request, metadata=as_node)


@asynccontextmanager
async def slow_books(control: Control) -> AsyncIterator[None]:
    """For the time of the block nothing that a report says of tenants can be stored."""
    async with control.database.transaction() as session:
        await session.execute(select(models.Tenant.id).with_for_update())
        yield


async def used_bytes(control: Control) -> int:
    async with control.database.transaction() as session:
        return await session.scalar(select(func.sum(models.NodeTierUsage.used_bytes))) or 0


async def hits_metered(control: Control) -> int:
    async with control.database.transaction() as session:
        totals = await session.scalars(select(models.OpenUsage.totals))
        return sum(int(total.get("hits", 0)) for total in totals)


async def reported(control: Control) -> datetime:
    async with control.database.transaction() as session:
        time = await session.scalar(select(models.Node.last_report_time))
    assert time is not None
    return time


async def stored(control: Control, used: int) -> None:
    """Return when the books say ``used`` and the meters are as far."""
    async with asyncio.timeout(20):
        while (await used_bytes(control), await hits_metered(control)) != (used, used):
            await asyncio.sleep(0.02)


async def test_i9_a_lease_is_renewed_while_books_cannot_be_stored(
    control: Control, as_node: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_intake, "ANSWER_WITHIN_S", 0.01)
    await register(control, as_node)
    async with slow_books(control):
        await report(control, as_node, 1)
        first = await reported(control)
        await report(control, as_node, 2)
        assert await reported(control) > first
        assert await used_bytes(control) == 0
    await stored(control, 2)


async def test_i8_of_reports_that_wait_the_newest_is_stored_and_nothing_is_lost(
    control: Control, as_node: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_intake, "ANSWER_WITHIN_S", 0.01)
    await register(control, as_node)
    async with slow_books(control):
        for hits in range(1, 8):
            await report(control, as_node, hits)
    await stored(control, 7)


async def test_i8_a_report_is_stored_when_it_is_answered_where_nothing_holds_it_up(
    control: Control, as_node: Metadata
) -> None:
    await register(control, as_node)
    for hits in (1, 2, 3):
        await report(control, as_node, hits)
        assert (await used_bytes(control), await hits_metered(control)) == (hits, hits)


async def test_i8_what_waited_for_a_fenced_process_is_not_stored(
    control: Control, as_node: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = await register(control, as_node)
    assert await register(control, as_node) == epoch + 1
    assert isinstance(await refused(report(control, as_node, 5, fencing_epoch=epoch)), errors.AbortedError)
    async with control.database.transaction() as session:
        with pytest.raises(errors.AbortedError):
            await registry.hold_epoch(session, "node-1", epoch)  # type: ignore[arg-type]
    assert await used_bytes(control) == 0


async def test_the_row_of_a_lease_is_free_while_books_hold_the_epoch(control: Control, as_node: Metadata) -> None:
    """And a registration is not: it waits for the books of the process that it replaces."""
    epoch = await register(control, as_node)
    async with control.database.transaction() as books, control.database.transaction() as lease:
        await registry.hold_epoch(books, "node-1", epoch)  # type: ignore[arg-type]
        row = await registry.require_current(lease, "node-1", epoch, lock=True)  # type: ignore[arg-type]
        row.last_report_time += timedelta(seconds=1)
        await lease.flush()
        replacing = asyncio.create_task(register(control, as_node))
        done, _ = await asyncio.wait({replacing}, timeout=0.2)
        assert not done
    assert await replacing == epoch + 1


async def test_a_control_plane_that_stops_stores_what_it_has_answered(
    control: Control, as_node: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_intake, "ANSWER_WITHIN_S", 0.01)
    intake = report_intake.ReportIntake(control.database)
    await intake.finish()  # nothing to do
    epoch = await register(control, as_node)
    message = node_pb2.ReportUsageRequest(node_id="node-1", fencing_epoch=epoch)
    tiers = {registry.Tier.DRAM: registry.TierBooks(42, 1, 0, 0)}
    counters = dict.fromkeys(models.USAGE_COUNTERS, 0)
    books = registry.TenantBooks("acme", tiers, counters, {}, None)  # type: ignore[arg-type]
    async with slow_books(control):
        await intake.take_in(report_intake.Report("node-1", message, [books], await reported(control)))  # type: ignore[arg-type]
        finishing = asyncio.create_task(intake.finish())
        done, _ = await asyncio.wait({finishing}, timeout=0.1)
        assert not done
    await finishing
    assert await used_bytes(control) == 42


async def test_a_control_plane_that_stops_does_not_wait_for_books_without_end(
    control: Control, as_node: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_intake, "ANSWER_WITHIN_S", 0.01)
    monkeypatch.setattr(report_intake, "FINISH_WITHIN_S", 0.01)
    intake = report_intake.ReportIntake(control.database)
    message = node_pb2.ReportUsageRequest(node_id="node-1", fencing_epoch=await register(control, as_node))
    books = registry.TenantBooks("acme", {}, dict.fromkeys(models.USAGE_COUNTERS, 0), {}, None)  # type: ignore[arg-type]
    async with slow_books(control):
        await intake.take_in(report_intake.Report("node-1", message, [books], await reported(control)))  # type: ignore[arg-type]
        await intake.finish()
        assert not intake._working
