"""Reports of nodes over a real Postgres: what becomes of them, and that closed hours stay as they are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from controlplane.db import PlatformScope, TenantScope, models
from controlplane.metering import HourCloser, MeterIntake, RecordQuery, read_records
from controlplane.metering.messages import to_usage_record
from controlplane.metering.records import DAY, HOUR, Record
from saltern.admin.v1 import quotas_pb2, usage_pb2
from saltern.billing.digest import RecordsDigest
from saltern.errors import InvalidArgumentError
from saltern.names import TenantId
from saltern.node.v1 import node_pb2
from tenants.quota import Tier
from tests.controlplane.metering.conftest import CAPACITIES_BYTES, REGISTRATION, START, Metering

ACME, OTHER = UUID(int=1), UUID(int=2)


def usage(
    dram_bytes: int = 0, *, hits: int = 0, tenant: str = "acme", uid: UUID = ACME, **fields: Any
) -> node_pb2.TenantUsage:
    tiers = [node_pb2.TenantTierUsage(tier=quotas_pb2.TIER_DRAM, used_bytes=dram_bytes)]
    return node_pb2.TenantUsage(tenant_id=tenant, tenant_uid=str(uid), tiers=tiers, get_hits=hits, **fields)


async def records(metering: Metering, *, step: timedelta = HOUR, **query: Any) -> list[Record]:
    begin = START - (START - START.replace(hour=0)) % step
    async with metering.database.transaction(PlatformScope(), isolation_level="REPEATABLE READ") as session:
        return await read_records(session, RecordQuery(step, begin, begin + 30 * DAY, **query), limit=1000)


async def count(metering: Metering, table: type[models.Base]) -> int:
    async with metering.database.transaction(PlatformScope()) as session:
        return await session.scalar(select(func.count()).select_from(table)) or 0


async def test_i8_every_count_of_a_report_has_its_column(metering: Metering) -> None:
    ssd = usage_pb2.SsdActivity(read_bytes=11, written_bytes=12)
    await metering.report(
        usage(
            hits=1, get_misses=2, hit_tokens=3, get_bytes=4, put_bytes=5, puts_stored=6, puts_refused=7, evictions=8,
            evicted_bytes=9, ssd=ssd, refused_by_reason={"NODE_FULL": 7}, evictions_by_cause={"own-limit": 8},
        ),
        sequence=1,
    )  # fmt: skip
    (record,) = await records(metering)
    assert record.amounts == {
        "hits": 1, "misses": 2, "tokens_saved": 3, "read_bytes": 4, "stored_bytes": 5, "puts_stored": 6,
        "puts_refused": 7, "evictions": 8, "evicted_bytes": 9, "ssd_read_bytes": 11, "ssd_written_bytes": 12,
    }  # fmt: skip
    assert record.maps == {"puts_refused_by_reason": {"NODE_FULL": 7}, "evictions_by_cause": {"own-limit": 8}}
    assert (record.tenant, record.tenant_uid, record.namespace) == ("acme", ACME, "") and record.is_open


async def test_i8_a_restart_of_the_control_plane_loses_and_repeats_nothing(metering: Metering) -> None:
    await metering.report(usage(100, hits=5), sequence=1)
    await metering.report(usage(100, hits=7), sequence=2, after_s=2)
    for sequence in (3, 4, 5):  # each by a control plane that remembers nothing
        await metering.report(usage(100, hits=7 + sequence), sequence=sequence, after_s=2, intake=MeterIntake())
    await metering.report(usage(100, hits=20), sequence=6, after_s=2)  # the first one again: what it remembers is old
    (record,) = await records(metering)
    assert record.amounts == {"hits": 20, "dram_byte_seconds": 100 * 10}


async def test_i8_reports_that_come_late_twice_or_not_at_all(metering: Metering) -> None:
    await metering.report(usage(hits=5), sequence=1)
    await metering.report(usage(hits=9), sequence=3, after_s=2)  # the second is on its way
    await metering.report(usage(hits=7), sequence=2, after_s=1)
    await metering.report(usage(hits=9), sequence=3, after_s=1)
    await metering.report(usage(hits=10), sequence=5, after_s=1)  # the fourth was lost
    (record,) = await records(metering)
    assert record.amounts == {"hits": 10}


async def test_i8_what_was_not_stored_is_not_remembered_either(metering: Metering) -> None:
    await metering.report(usage(100, hits=5), sequence=1)
    with pytest.raises(ZeroDivisionError):
        async with metering.database.transaction(PlatformScope()) as session:
            request = node_pb2.ReportUsageRequest(counters_id=f"{1:032x}", sequence=2, tenants=[usage(100, hits=6)])
            await metering.intake.take_in(session, REGISTRATION, request, metering.now, CAPACITIES_BYTES)
            raise ZeroDivisionError
    await metering.report(usage(100, hits=8), sequence=3, after_s=2)
    (record,) = await records(metering)
    assert record.amounts == {"hits": 8, "dram_byte_seconds": 200}


async def test_i8_two_processes_under_one_name_each_count_for_themselves(metering: Metering) -> None:
    """Also the one that was fenced off and comes back."""
    await metering.report(usage(hits=100), sequence=1, counters=1)
    await metering.report(usage(hits=3), sequence=1, counters=2, after_s=2)
    await metering.report(usage(hits=101), sequence=2, counters=1, after_s=2)
    (record,) = await records(metering)
    assert record.amounts == {"hits": 104}


async def test_i8_counters_of_a_deleted_tenant_are_never_those_of_its_namesake(metering: Metering) -> None:
    await metering.report(usage(10, hits=100), sequence=1)
    await metering.report(usage(10, hits=2, uid=OTHER), sequence=2, after_s=2)
    first, second = await records(metering)
    assert (first.tenant_uid, first.amounts) == (ACME, {"hits": 100})
    assert (second.tenant_uid, second.amounts) == (OTHER, {"hits": 2})
    assert await records(metering, tenant=TenantId("acme"), tenant_uid=OTHER) == [second]


async def test_a_tenant_of_which_the_node_does_not_know_the_uid_and_a_node_that_numbers_nothing(
    metering: Metering,
) -> None:
    unknown = usage(hits=1)
    unknown.tenant_uid = ""
    await metering.report(unknown, sequence=1)
    await metering.report(usage(hits=1), sequence=0)
    assert await records(metering) == []


async def test_what_a_node_must_not_send(metering: Metering) -> None:
    await metering.report(usage(hits=1), sequence=1)
    with pytest.raises(InvalidArgumentError):
        await metering.report(usage(hits=1), sequence=2, node="n2")  # the counters of n1
    bad = usage(hits=1)
    bad.tenant_uid = "x" * 36
    with pytest.raises(InvalidArgumentError):
        await metering.report(bad, sequence=2)


async def test_namespaces_are_metered_beside_their_tenant(metering: Metering) -> None:
    def parts(chat: int, code: int) -> list[node_pb2.NamespaceUsage]:
        return [
            node_pb2.NamespaceUsage(
                namespace_id=name,
                uid=f"uid-{name}",
                tiers=[node_pb2.NamespaceTierUsage(tier=quotas_pb2.TIER_DRAM, used_bytes=10)],
                get_hits=hits,
                hit_tokens=16 * hits,
            )
            for name, hits in (("chat", chat), ("code", code))
        ]

    await metering.report(usage(20, hits=3, namespaces=parts(1, 2)), sequence=1)
    await metering.report(usage(20, hits=7, namespaces=parts(2, 5)), sequence=2, after_s=2)
    chat, code = await records(metering, by_namespace=True)
    assert (chat.namespace, chat.amounts) == ("chat", {"hits": 2, "tokens_saved": 32, "dram_byte_seconds": 20})
    assert (code.namespace, code.amounts) == ("code", {"hits": 5, "tokens_saved": 80, "dram_byte_seconds": 20})
    (whole,) = await records(metering)
    assert whole.amounts["hits"] == 7


async def closed_hour(metering: Metering) -> None:
    """One hour of two processes and two tenants, closed."""
    begin = metering.now
    for sequence in (1, 2):
        for counters, node in ((1, "n1"), (2, "n2")):
            await metering.report(
                usage(100, hits=10 * sequence, refused_by_reason={"NODE_FULL": sequence}, puts_refused=sequence),
                usage(2**52, tenant="other", uid=OTHER),
                sequence=sequence, after_s=1, counters=counters, node=node,
            )  # fmt: skip
    metering.now = begin + timedelta(hours=1, minutes=4)
    assert await metering.closer.step() == 0  # not for another minute
    metering.now += timedelta(minutes=1)
    assert await metering.closer.step() == 2


async def test_an_hour_that_is_over_becomes_one_record_for_each_tenant(metering: Metering) -> None:
    await closed_hour(metering)
    acme, other = await records(metering)
    assert not acme.is_open and not other.is_open
    assert (acme.amounts["hits"], acme.maps["puts_refused_by_reason"]) == (40, {"NODE_FULL": 4})
    assert acme.amounts["dram_byte_seconds"] == 2 * 100 * 2
    # More than 2^53: exact all the same, and booked although the processes never reported again.
    assert other.amounts["dram_byte_seconds"] == 2 * 2 * 2**52
    assert await count(metering, models.OpenUsage) == 0
    assert await metering.closer.step() == 0


async def test_i8_what_belongs_to_a_closed_hour_goes_to_the_oldest_open_one(metering: Metering) -> None:
    await closed_hour(metering)
    closed = await records(metering)
    await metering.report(usage(100, hits=30, puts_refused=2, refused_by_reason={"NODE_FULL": 2}), sequence=3)
    *still, late = await records(metering)
    assert still == closed
    silent_s = int((metering.now - START).total_seconds()) - 3  # since this process's report in the third second
    assert late.start == START + HOUR and late.is_open
    assert late.amounts["hits"] == 10 and late.amounts["dram_byte_seconds"] == 100 * silent_s
    assert late.amounts["late_seconds"] == 3600 - 3 and late.amounts["gap_seconds"] == silent_s


async def test_days_are_sums_of_hours_and_pages_of_them_lose_nothing(metering: Metering) -> None:
    await closed_hour(metering)
    await metering.report(usage(0, hits=100), usage(0, hits=1, tenant="other", uid=OTHER), sequence=9)
    acme, other = await records(metering, step=DAY)
    assert acme.is_open and acme.amounts["hits"] == 40 + 80 and other.amounts["hits"] == 1
    every = await records(metering)
    paged: list[Record] = []
    while True:
        async with metering.database.transaction(PlatformScope(), isolation_level="REPEATABLE READ") as session:
            page = await read_records(
                session, RecordQuery(HOUR, START, START + DAY), after=paged[-1].position if paged else None, limit=1
            )
        if not page:
            break
        paged += page
    assert paged == every and len(every) == 4
    assert await records(metering, closed_only=True) == every[:2]


async def refusal(metering: Metering, statement: str) -> str:
    with pytest.raises(DBAPIError) as caught:
        async with metering.database.transaction(PlatformScope()) as session:
            await session.execute(text(statement))
    return str(caught.value.orig)


async def test_i11_nobody_changes_a_closed_hour(metering: Metering, postgres: Any) -> None:
    metering.now += timedelta(days=89)
    await closed_hour(metering)
    columns = ", ".join(column.name for column in models.UsageRecord.__table__.columns)
    earlier = columns.replace("hour", "hour - interval '5 hours'")
    for statement, why in (
        ("UPDATE usage_records SET hits = 0", "permission denied"),
        ("TRUNCATE usage_records", "permission denied"),
        ("DELETE FROM metering_state", "permission denied"),
        ("DELETE FROM usage_records", "holds closed hours"),
        (f"INSERT INTO usage_records ({columns}) SELECT {earlier} FROM usage_records", "holds closed hours"),
        ("UPDATE metering_state SET closed_until = 'epoch'", "closed once"),
        (
            "UPDATE metering_state SET closed_from = closed_until, closed_until = now() + interval '1 day'",
            "closed once",
        ),
    ):
        assert why in await refusal(metering, statement), statement
    assert await count(metering, models.UsageRecord) == 2


async def test_i11_the_audit_trail_has_the_digest_of_each_closed_hour(metering: Metering) -> None:
    await closed_hour(metering)
    digest = RecordsDigest()
    for record in await records(metering):
        digest.add(to_usage_record(record))
    async with metering.database.transaction(PlatformScope()) as session:
        (event,) = await session.scalars(select(models.AuditEvent))
    assert event.chain == models.PLATFORM_CHAIN and event.actor == "system/metering"
    assert event.after == {"hour": START.isoformat(), "records": 2, "digest": digest.hexdigest()}


async def test_records_older_than_the_retention_are_removed(metering: Metering) -> None:
    await closed_hour(metering)
    closer = HourCloser(metering.database, lambda: metering.now, retention=timedelta(days=1))  # 62 days is the least
    metering.now = START + timedelta(days=62)
    await closer.step()
    assert await count(metering, models.UsageRecord) == 2
    metering.now += timedelta(hours=2)
    await closer.step()
    assert await count(metering, models.UsageRecord) == 0


async def test_i2_a_tenant_reads_its_own_hours_alone(metering: Metering) -> None:
    await closed_hour(metering)
    async with metering.database.transaction(TenantScope(TenantId("acme")), isolation_level="REPEATABLE READ") as own:
        found = await read_records(own, RecordQuery(HOUR, START, START + DAY), limit=10)
    assert [record.tenant for record in found] == ["acme"]


async def test_i8_a_node_that_lies_makes_nobodys_bill_larger_than_it_could_have_been(metering: Metering) -> None:
    """More than the node has room for is held by nobody there."""
    ssd = node_pb2.TenantTierUsage(tier=quotas_pb2.TIER_SSD, used_bytes=2**62)
    for sequence in (1, 2):
        lie = usage(2**62)
        lie.tiers.append(ssd)
        await metering.report(lie, sequence=sequence, after_s=60)
    (record,) = await records(metering)
    assert {name: record.amounts[name] for name in ("dram_byte_seconds", "ssd_byte_seconds")} == {
        "dram_byte_seconds": CAPACITIES_BYTES[Tier.DRAM] * 60,
        "ssd_byte_seconds": CAPACITIES_BYTES[Tier.SSD] * 60,
    }


async def test_i8_counts_beyond_all_reason_do_not_keep_hours_from_being_closed(metering: Metering) -> None:
    """One process that counts up and begins again, over and over, for a sum that no column holds."""
    most = 2**63 - 1
    for sequence in range(1, 8):
        count_now = most if sequence % 2 else 0
        lie = usage(hits=count_now, refused_by_reason={"NODE_FULL": count_now})
        await metering.report(lie, usage(hits=sequence, tenant="other", uid=OTHER), sequence=sequence, after_s=2)
    metering.now += timedelta(hours=2)
    assert await metering.closer.step() == 2
    by_tenant = {record.tenant: record for record in await records(metering) if not record.is_open}
    assert by_tenant[TenantId("acme")].amounts["hits"] == most
    assert by_tenant[TenantId("acme")].maps["puts_refused_by_reason"] == {"NODE_FULL": most}
    assert by_tenant[TenantId("other")].amounts["hits"] == 7
