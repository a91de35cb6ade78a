"""What a report says of tenants is stored apart from the lease that it renews: neither waits for the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, func, literal_column, select, update

from controlplane.db import ServiceScope, ServiceTask, models
from controlplane.metering.intake import encode_tenants
from controlplane.node import registry, report_intake
from saltern import errors
from saltern.admin.v1 import credentials_pb2, quotas_pb2, usage_pb2
from saltern.auth.v1 import auth_pb2
from saltern.names import NodeId
from saltern.node.v1 import node_pb2
from tests.support.control import Control, refused

Metadata = tuple[tuple[str, str], ...]
COUNTERS = "0" * 31 + "1"
NODE = NodeId("node-1")


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


def held(tenant: str, used_bytes: int, **fields: int) -> node_pb2.ReportUsageRequest:
    """A report of a node of before the metering."""
    request = node_pb2.ReportUsageRequest(node_id=NODE, **fields)  # type: ignore[arg-type]
    request.tenants.add(tenant_id=tenant).tiers.add(tier=quotas_pb2.TIER_DRAM, used_bytes=used_bytes, entries=1)
    return request


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
    message = held("acme", 42, fencing_epoch=epoch)
    async with slow_books(control):
        await intake.take_in(report_intake.Report(NODE, message, encode_tenants(message), await reported(control)))
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
    message = held("acme", 42, fencing_epoch=await register(control, as_node))
    async with slow_books(control):
        await intake.take_in(report_intake.Report(NODE, message, encode_tenants(message), await reported(control)))
        await intake.finish()
        assert not intake._working


class Reporter:
    """A process of a node that reports tenants by name: (bytes held, hits)."""

    def __init__(self, control: Control, as_node: Metadata, counters: int, uids: dict[str, str]) -> None:
        self.control, self.as_node, self.uids = control, as_node, uids
        self.counters_id, self.sequence, self.epoch = f"{counters:032x}", 0, 0

    async def register(self) -> None:
        self.epoch = await register(self.control, self.as_node)

    async def report(self, **tenants: tuple[int, int]) -> None:
        self.sequence += 1
        request = node_pb2.ReportUsageRequest(
            node_id=NODE, fencing_epoch=self.epoch, counters_id=self.counters_id, sequence=self.sequence
        )
        for tenant, (used, hits) in tenants.items():
            usage = request.tenants.add(tenant_id=tenant, tenant_uid=self.uids[tenant], get_hits=hits)
            usage.tiers.add(tier=quotas_pb2.TIER_DRAM, used_bytes=used, entries=1)
        await self.control.node.ReportUsage(request, metadata=self.as_node)


async def books(control: Control) -> dict[str, tuple[int, int, str]]:
    """(bytes held, hits, which write of the row it is) by tenant."""
    usage, tiers = models.NodeUsage, models.NodeTierUsage
    statement = select(usage.tenant_id, tiers.used_bytes, usage.get_hits, literal_column("node_usage.xmin::text"))
    async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
        rows = await session.execute(statement.join(tiers, tiers.tenant_id == usage.tenant_id))
        return {tenant: (used, hits, write) for tenant, used, hits, write in rows}


@pytest.fixture
async def reporters(control: Control, as_node: Metadata) -> tuple[Reporter, Reporter]:
    for tenant in ("blue", "cyan"):
        await control.add_tenant(tenant, "chat", limit_bytes=2**20)
    async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
        rows = await session.execute(select(models.Tenant.id, models.Tenant.uid))
        uids = {tenant: str(uid) for tenant, uid in rows}
    return Reporter(control, as_node, 1, uids), Reporter(control, as_node, 2, uids)


async def test_i8_of_a_report_only_what_has_changed_is_written_and_what_it_names_no_more_is_removed(
    control: Control, reporters: tuple[Reporter, Reporter]
) -> None:
    one, _ = reporters
    await one.register()
    await one.report(acme=(1, 10), blue=(2, 20), cyan=(3, 30))
    first = await books(control)
    await one.report(acme=(1, 10), blue=(2, 21))
    second = await books(control)
    assert {tenant: said[:2] for tenant, said in second.items()} == {"acme": (1, 10), "blue": (2, 21)}
    assert second["acme"] == first["acme"], "a row that says the same is not written again"
    await one.report(acme=(1, 10), blue=(2, 21), cyan=(3, 30))
    assert {tenant: said[:2] for tenant, said in (await books(control)).items()}["cyan"] == (3, 30)


async def test_i8_books_are_those_of_the_process_that_reported_last(
    control: Control, reporters: tuple[Reporter, Reporter]
) -> None:
    """A process that comes back says what it said before: that is not what is stored any more."""
    one, two = reporters
    await one.register()
    await one.report(acme=(1, 10), blue=(2, 20))
    await two.register()
    await two.report(acme=(7, 70), cyan=(9, 90))
    assert {tenant: said[:2] for tenant, said in (await books(control)).items()} == {"acme": (7, 70), "cyan": (9, 90)}
    await one.register()
    await one.report(acme=(1, 10), blue=(2, 20))
    assert {tenant: said[:2] for tenant, said in (await books(control)).items()} == {"acme": (1, 10), "blue": (2, 20)}


async def test_i8_a_node_that_was_removed_and_comes_back_is_stored_anew(
    control: Control, reporters: tuple[Reporter, Reporter]
) -> None:
    one, _ = reporters
    await one.register()
    await one.report(acme=(1, 10))
    async with control.database.transaction() as session:
        await session.execute(delete(models.Node))
    await one.register()
    assert one.epoch == 1, "as before"
    await one.report(acme=(1, 10))
    assert (await books(control))["acme"][:2] == (1, 10)


async def test_i8_two_control_planes_take_in_one_node(control: Control, reporters: tuple[Reporter, Reporter]) -> None:
    """What one of them remembers is not what is stored once the other has taken in a report."""
    one, _ = reporters
    await one.register()
    await one.report(acme=(1, 10), blue=(2, 20))
    elsewhere = report_intake.ReportIntake(control.database)
    message = node_pb2.ReportUsageRequest(
        node_id=NODE, fencing_epoch=one.epoch, counters_id=one.counters_id, sequence=2
    )
    await elsewhere.take_in(report_intake.Report(NODE, message, {}, await reported(control)))
    assert not await books(control)
    one.sequence = 2
    await one.report(acme=(1, 10), blue=(2, 20))
    assert {tenant: said[:2] for tenant, said in (await books(control)).items()} == {"acme": (1, 10), "blue": (2, 20)}


async def test_usage_says_when_it_was_reported_last_and_not_since_when_it_says_so(
    control: Control, reporters: tuple[Reporter, Reporter]
) -> None:
    one, _ = reporters
    await one.register()
    await one.report(acme=(1, 10))
    async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
        await session.execute(update(models.NodeUsage).values(report_time=datetime(2026, 1, 1, tzinfo=UTC)))
    await one.report(acme=(1, 10))
    admin = await control.bearer(control.admin_key)
    usage = await control.usage.GetUsage(usage_pb2.GetUsageRequest(tenant="tenants/acme"), metadata=admin)
    now_s = (await reported(control)).timestamp()
    assert now_s - 10 < usage.report_time.seconds <= now_s
