"""Closes hours that are over: what processes added to them becomes one record for each tenant, which never changes.

One control plane does it at a time. The platform's audit trail, which is signed outside the database, says which hours
were closed, how many records they have and their SHA-256 (:mod:`saltern.billing.digest`), so that a bill that was
changed by somebody who got around grants and triggers does not match it (I11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Final

import msgspec
import structlog
from sqlalchemy import delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import record
from controlplane.clock import Clock, utc_now
from controlplane.core.metering import HOUR_S, Bookings, Meter, Subject, settle
from controlplane.db import Database, ServiceScope, ServiceTask, models
from controlplane.db.locks import try_lock_metering
from controlplane.db.models.metering import RECORD_COUNTERS, RECORD_INTEGRALS, RECORD_MAPS
from controlplane.metering.messages import saturated, to_usage_record
from controlplane.metering.records import HOUR, Record, RecordQuery, read_records
from controlplane.metering.store import (
    add_to_hours,
    read_open_from_s,
    read_process,
    to_time,
    to_unix_s,
    write_meters,
    write_process,
)
from controlplane.repeating import repeat
from saltern.billing.digest import RecordsDigest
from saltern.names import NodeId

ACTOR: Final = "system/metering"
CLOSE_METHOD: Final = "saltern.admin.v1.UsageService/CloseHours"
RESOURCE: Final = "usageRecords"
STEP_INTERVAL_S: Final = 20.0
#: An hour stays open for so long after its end, for what nodes report of its last seconds.
CLOSE_AFTER: Final = timedelta(minutes=5)
#: A process that has not reported for so long is silent: what it held is booked up to its last report.
SILENT_AFTER: Final = timedelta(minutes=1)
#: A process that has been silent for so long is forgotten. No node serves that long without its control plane.
FORGET_AFTER: Final = timedelta(days=60)
#: No record is removed before, whatever the settings say; the table's trigger holds the same.
RETENTION_MIN: Final = timedelta(days=62)
RETENTION_DEFAULT: Final = timedelta(days=397)
#: More than there can be of one hour.
_HOUR_RECORDS_MAX: Final = 10_000_000
_INSERTED_AT_ONCE: Final = 500
_PROCESSES_AT_ONCE: Final = 8
_EPOCH_S: Final = 0
_INSERT: Final = text(
    "INSERT INTO usage_records SELECT * FROM jsonb_populate_recordset(NULL::usage_records, CAST(:rows AS jsonb))"
)

_log = structlog.get_logger(__name__)


class HourCloser:
    """Closes hours, books what silent processes held, and forgets what is older than the retention.

    Args:
        retention: how long records are kept, ``RETENTION_MIN`` or longer.
    """

    def __init__(self, database: Database, clock: Clock = utc_now, *, retention: timedelta = RETENTION_DEFAULT) -> None:
        self._database = database
        self._clock = clock
        self._retention = max(retention, RETENTION_MIN)

    async def run(self) -> None:
        """Look every ``STEP_INTERVAL_S`` seconds, until cancelled, through every absence of the database."""

        def warn(reason: str) -> None:
            _log.warning("usage not closed", reason=reason)

        await repeat(self.step, STEP_INTERVAL_S, name=type(self).__name__, warn=warn)

    async def step(self) -> int:
        """Do what is due now, unless another control plane is at it; return how many records were made."""
        now = self._clock()
        while await self._settle_silent(now):
            pass
        made = await self._make_records(now)  # of a step that was cut off
        if await self._end_hours(now):
            made += await self._make_records(now)
            async with self._transaction() as session:
                await _forget(session, now, self._retention)
        return made

    async def _end_hours(self, now: datetime) -> bool:
        """Say that every hour that ended ``CLOSE_AFTER`` ago is closed; whether there was one.

        In a transaction of its own, which is over at once: reports wait for it, and leases hang on reports.
        """
        until = to_time(to_unix_s(now - CLOSE_AFTER) // HOUR_S * HOUR_S)
        async with self._transaction() as session:
            if not await try_lock_metering(session):
                return False
            # Waits for the reports that hold hours open: from here on nobody adds to these.
            state = await session.scalar(select(models.MeteringState).with_for_update())
            assert state is not None, "the migration makes the row, and its trigger keeps it"
            ended = select(models.OpenUsage).where(models.OpenUsage.hour < state.closed_until)
            if until <= state.closed_until or await session.scalar(select(ended.exists())):
                return False
            await session.execute(
                update(models.MeteringState).values(closed_from=state.closed_until, closed_until=until)
            )
        return True

    async def _make_records(self, now: datetime) -> int:
        """Make records of what was booked to closed hours, hour by hour; return how many."""
        made = 0
        while True:
            async with self._transaction() as session:
                if not await try_lock_metering(session):
                    return made
                state = await session.scalar(select(models.MeteringState))
                assert state is not None, "the migration makes the row, and its trigger keeps it"
                hour = await session.scalar(select(func.min(models.OpenUsage.hour)))
                if hour is None or hour >= state.closed_until:
                    return made
                made += await _close(session, hour, now)

    async def _settle_silent(self, now: datetime) -> int:
        """Book what some silent processes held; return how many they were."""
        held = (models.Meter.dram_bytes > 0) | (models.Meter.ssd_bytes > 0)
        owes = (
            select(models.Meter.counters_id)
            .where(models.Meter.counters_id == models.MeteredProcess.counters_id, held)
            .where(models.Meter.since < models.MeteredProcess.report_time)
        )
        async with self._transaction() as session:
            rows = list(
                await session.scalars(
                    select(models.MeteredProcess)
                    .where(models.MeteredProcess.report_time < now - SILENT_AFTER, owes.exists())
                    .order_by(models.MeteredProcess.counters_id)
                    .limit(_PROCESSES_AT_ONCE)
                    .with_for_update(skip_locked=True)
                )
            )
            open_from_s = await read_open_from_s(session) if rows else _EPOCH_S
            for row in rows:
                process = await read_process(session, row)
                last_s = to_unix_s(row.report_time)
                booked: dict[Subject, Bookings] = {}
                moved: dict[Subject, Meter] = {}
                for subject, meter in process.meters.items():
                    if meter.reading.holds and meter.since_s < last_s:
                        moved[subject] = settle(meter, last_s, open_from_s, booked.setdefault(subject, Bookings()))
                await write_process(session, row, row.counters_id, NodeId(row.node_id), process)
                await write_meters(session, row.counters_id, moved)
                await add_to_hours(session, row.counters_id, booked)
        return len(rows)

    def _transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        return self._database.transaction(ServiceScope(ServiceTask.METERING))


async def _close(session: AsyncSession, hour: datetime, now: datetime) -> int:
    """Turn one hour, to which nobody adds any more, into records; return how many."""
    records: list[Record] = []
    for by_namespace in (False, True):
        query = RecordQuery(HOUR, hour, hour + HOUR, by_namespace=by_namespace)
        records += await read_records(session, query, limit=_HOUR_RECORDS_MAX)
    for at in range(0, len(records), _INSERTED_AT_ONCE):
        rows = [_to_row(item) for item in records[at : at + _INSERTED_AT_ONCE]]
        await session.execute(_INSERT, {"rows": msgspec.json.encode(rows).decode()})
    await session.execute(delete(models.OpenUsage).where(models.OpenUsage.hour == hour))
    await _record_hour(session, hour, records, now)
    _log.info("usage closed", hour=hour.isoformat(), records=len(records))
    return len(records)


async def _record_hour(session: AsyncSession, hour: datetime, records: Sequence[Record], now: datetime) -> None:
    """Say in the platform's audit trail what was closed (I11)."""
    digest = RecordsDigest()
    for number, item in enumerate(records):
        digest.add(to_usage_record(item, is_open=False))
        if number % _INSERTED_AT_ONCE == 0:
            await asyncio.sleep(0)
    await record(
        session,
        tenant=None,
        actor=ACTOR,
        method=CLOSE_METHOD,
        resource=RESOURCE,
        now=now,
        after={"hour": hour.isoformat(), "records": len(records), "digest": digest.hexdigest()},
    )


def _to_row(item: Record) -> dict[str, object]:
    return {
        "tenant_id": item.tenant,
        "hour": item.start.isoformat(),
        "tenant_uid": item.tenant_uid,
        "namespace_id": item.namespace,
        **{name: item.amounts.get(name, 0) for name in RECORD_INTEGRALS},
        **{name: saturated(item.amounts.get(name, 0)) for name in RECORD_COUNTERS},
        **{
            column: {name: saturated(count) for name, count in item.maps.get(column, {}).items()}
            for column in RECORD_MAPS
        },
    }


async def _forget(session: AsyncSession, now: datetime, retention: timedelta) -> None:
    """Remove records that are older than ``retention``, and processes that will not come back."""
    await session.execute(delete(models.UsageRecord).where(models.UsageRecord.hour < now - retention))
    await session.execute(delete(models.MeteredProcess).where(models.MeteredProcess.report_time < now - FORGET_AFTER))
