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

import structlog
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import record
from controlplane.clock import Clock, utc_now
from controlplane.core.metering import HOUR_S, Bookings, Meter, Subject, settle
from controlplane.db import Database, ServiceScope, ServiceTask, models
from controlplane.db.locks import try_lock_metering
from controlplane.db.models.metering import RECORD_COUNTERS, RECORD_INTEGRALS, RECORD_MAPS
from controlplane.metering.messages import to_usage_record
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
from controlplane.rpc import to_saltern_error
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
_PAGE_RECORDS: Final = 1000
_PROCESSES_AT_ONCE: Final = 8
_NO_TIME: Final = timedelta(0)
_EPOCH_S: Final = 0

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
        while True:
            try:
                await self.step()
            except Exception as error:
                reason = to_saltern_error(error, method=type(self).__name__).reason
                _log.warning("usage not closed", reason=reason)
            await asyncio.sleep(STEP_INTERVAL_S)

    async def step(self) -> int:
        """Do what is due now, unless another control plane is at it; return how many records were closed."""
        now = self._clock()
        while await self._settle_silent(now):
            pass
        async with self._transaction() as session:
            if not await try_lock_metering(session):
                return 0
            closed = await _close(session, now)
            if closed is not None:  # once an hour is often enough
                await _forget(session, now, self._retention)
        return closed or 0

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


async def _close(session: AsyncSession, now: datetime) -> int | None:
    """Close every hour that ended ``CLOSE_AFTER`` ago; return how many records that made, None if there was no hour."""
    until = to_time(to_unix_s(now - CLOSE_AFTER) // HOUR_S * HOUR_S)
    # Waits for the reports that hold it open: from here on nobody adds to these hours.
    state = await session.scalar(select(models.MeteringState).with_for_update())
    assert state is not None, "the migration makes the row, and its trigger keeps it"
    if until <= state.closed_until:
        return None
    hours = list(await session.scalars(select(models.OpenUsage.hour).where(models.OpenUsage.hour < until).distinct()))
    records: list[Record] = []
    for by_namespace in (False, True):
        for hour in sorted(hours):
            records += await _read_hour(session, hour, by_namespace=by_namespace)
    await session.execute(update(models.MeteringState).values(closed_from=state.closed_until, closed_until=until))
    for at in range(0, len(records), _PAGE_RECORDS):
        await session.execute(insert(models.UsageRecord), [_to_row(item) for item in records[at : at + _PAGE_RECORDS]])
        await asyncio.sleep(0)
    await session.execute(delete(models.OpenUsage).where(models.OpenUsage.hour < until))
    for hour in sorted(hours):
        await _record_hour(session, hour, [item for item in records if item.start == hour], now)
    if records:
        _log.info("usage closed", closed_until=until.isoformat(), hours=len(hours), records=len(records))
    return len(records)


async def _read_hour(session: AsyncSession, hour: datetime, *, by_namespace: bool) -> list[Record]:
    found: list[Record] = []
    query = RecordQuery(HOUR, hour, hour + HOUR, by_namespace=by_namespace)
    while page := await read_records(session, query, after=found[-1].position if found else None, limit=_PAGE_RECORDS):
        found += page
        await asyncio.sleep(0)
    return found


async def _record_hour(session: AsyncSession, hour: datetime, records: Sequence[Record], now: datetime) -> None:
    """Say in the platform's audit trail what was closed (I11)."""
    digest = RecordsDigest()
    for item in records:
        digest.add(to_usage_record(item, is_open=False))
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
        "hour": item.start,
        "tenant_uid": item.tenant_uid,
        "namespace_id": item.namespace,
        **{name: item.amounts.get(name, 0) for name in (*RECORD_INTEGRALS, *RECORD_COUNTERS)},
        **{name: item.maps.get(name, {}) for name in RECORD_MAPS},
    }


async def _forget(session: AsyncSession, now: datetime, retention: timedelta) -> None:
    """Remove records that are older than ``retention``, and processes that will not come back."""
    await session.execute(delete(models.UsageRecord).where(models.UsageRecord.hour < now - retention))
    await session.execute(delete(models.MeteredProcess).where(models.MeteredProcess.report_time < now - FORGET_AFTER))
