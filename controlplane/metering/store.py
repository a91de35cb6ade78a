"""Meters and open hours in the database: many rows in one statement each, as one JSON document.

A report of 10,000 tenants changes some hundreds of meters; statements built row by row would take longer than the
database does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec
from sqlalchemy import delete, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.metering import Bookings, Meter, Process, Reading, Subject
from controlplane.db import models
from saltern.names import NodeId, TenantId

_UPSERT_METERS: Final = text(
    """
    INSERT INTO meters AS m
        (counters_id, tenant_id, tenant_uid, namespace_uid, namespace_id, since, dram_bytes, ssd_bytes, counters)
    SELECT :counters_id, tenant_id, tenant_uid, namespace_uid, namespace_id, to_timestamp(since_s), dram_bytes,
        ssd_bytes, counters
    FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r (
        tenant_id text, tenant_uid uuid, namespace_uid text, namespace_id text, since_s bigint, dram_bytes bigint,
        ssd_bytes bigint, counters jsonb
    )
    ON CONFLICT (counters_id, tenant_id, tenant_uid, namespace_uid) DO UPDATE SET
        since = EXCLUDED.since, dram_bytes = EXCLUDED.dram_bytes, ssd_bytes = EXCLUDED.ssd_bytes,
        counters = EXCLUDED.counters
    """
)
_ADD_TO_HOURS: Final = text(
    """
    INSERT INTO open_usage AS u (hour, tenant_id, tenant_uid, namespace_id, counters_id, totals)
    SELECT to_timestamp(hour_s), tenant_id, tenant_uid, namespace_id, :counters_id, totals
    FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r (
        hour_s bigint, tenant_id text, tenant_uid uuid, namespace_id text, totals jsonb
    )
    ON CONFLICT (hour, tenant_id, tenant_uid, namespace_id, counters_id) DO UPDATE SET totals = (
        SELECT jsonb_object_agg(key, total) FROM (
            SELECT key, sum(value::numeric) AS total
            FROM (
                SELECT * FROM jsonb_each_text(u.totals) UNION ALL SELECT * FROM jsonb_each_text(EXCLUDED.totals)
            ) AS parts
            GROUP BY key
        ) AS sums
    )
    """
)


async def lock_process(session: AsyncSession, counters_id: str) -> models.MeteredProcess | None:
    """The row of a process, held to the end of the transaction; None for one that is new."""
    return await session.get(models.MeteredProcess, counters_id, with_for_update=True, populate_existing=True)


async def read_open_from_s(session: AsyncSession) -> int:
    """The first second of the oldest hour that is open; it stays open to the end of the transaction."""
    closed_until = await session.scalar(select(models.MeteringState.closed_until).with_for_update(read=True))
    assert closed_until is not None, "the migration makes the row, and its trigger keeps it"
    return to_unix_s(closed_until)


async def read_process(session: AsyncSession, row: models.MeteredProcess) -> Process:
    """All that is known of a process."""
    statement = select(
        models.Meter.tenant_id,
        models.Meter.tenant_uid,
        models.Meter.namespace_uid,
        models.Meter.namespace_id,
        models.Meter.since,
        models.Meter.dram_bytes,
        models.Meter.ssd_bytes,
        models.Meter.counters,
    ).where(models.Meter.counters_id == row.counters_id)
    meters = {
        Subject(TenantId(meter.tenant_id), str(meter.tenant_uid), meter.namespace_uid, meter.namespace_id): Meter(
            to_unix_s(meter.since), Reading(meter.dram_bytes, meter.ssd_bytes, meter.counters)
        )
        for meter in await session.execute(statement)
    }
    return Process(row.sequence, to_unix_s(row.report_time), meters)


async def write_process(
    session: AsyncSession, row: models.MeteredProcess | None, counters_id: str, node: NodeId, process: Process
) -> UUID:
    """Store the newest report of a process; return the ``write_id`` under which its meters are known now."""
    assert process.last_s is not None, "a process is stored with its first report"
    write_id = uuid4()
    if row is None:
        row = models.MeteredProcess(counters_id=counters_id, node_id=node)
        session.add(row)
    row.sequence, row.report_time, row.write_id = process.sequence, to_time(process.last_s), write_id
    await session.flush()
    return write_id


async def write_meters(
    session: AsyncSession, counters_id: str, changed: Mapping[Subject, Meter], gone: Iterable[Subject] = ()
) -> None:
    """Store the meters that have changed and remove those that there are no more."""
    rows = [
        {
            "tenant_id": subject.tenant,
            "tenant_uid": subject.tenant_uid,
            "namespace_uid": subject.namespace_uid,
            "namespace_id": subject.namespace,
            "since_s": meter.since_s,
            "dram_bytes": meter.reading.dram_bytes,
            "ssd_bytes": meter.reading.ssd_bytes,
            "counters": meter.reading.counters,
        }
        for subject, meter in changed.items()
    ]
    if rows:
        await session.execute(_UPSERT_METERS, {"counters_id": counters_id, "rows": _to_json(rows)})
    keys = [(subject.tenant, UUID(subject.tenant_uid), subject.namespace_uid) for subject in gone]
    if keys:
        named = tuple_(models.Meter.tenant_id, models.Meter.tenant_uid, models.Meter.namespace_uid).in_(keys)
        await session.execute(delete(models.Meter).where(models.Meter.counters_id == counters_id, named))


async def add_to_hours(session: AsyncSession, counters_id: str, booked: Mapping[Subject, Bookings]) -> None:
    """Add what was booked to the open hours of its subjects."""
    sums: dict[tuple[int, str, str, str], dict[str, int]] = {}
    for subject, bookings in booked.items():
        for hour_s, amounts in bookings.by_hour.items():
            # Two namespaces of one name, a deleted one and the one made after it, share a row.
            totals = sums.setdefault((hour_s, subject.tenant, subject.tenant_uid, subject.namespace), {})
            for name, amount in amounts.items():
                totals[name] = totals.get(name, 0) + amount
    rows = [
        {"hour_s": hour_s, "tenant_id": tenant, "tenant_uid": uid, "namespace_id": namespace, "totals": totals}
        for (hour_s, tenant, uid, namespace), totals in sorted(sums.items(), key=lambda item: item[0])
    ]
    if rows:
        await session.execute(_ADD_TO_HOURS, {"counters_id": counters_id, "rows": _to_json(rows)})


def to_unix_s(time: datetime) -> int:
    """Whole Unix seconds, rounded down."""
    return int(time.timestamp() // 1)


def to_time(unix_s: int) -> datetime:
    """The time of Unix seconds."""
    return datetime.fromtimestamp(unix_s, UTC)


def _to_json(rows: list[dict[str, Any]]) -> str:
    return msgspec.json.encode(rows).decode()
