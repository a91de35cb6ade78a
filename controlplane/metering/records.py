"""Usage by hour or day: closed hours and those that are open, in one order, for whoever may read them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import merge
from itertools import groupby, islice
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import func, literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.models import MeteringState, OpenUsage, UsageRecord
from controlplane.db.models.metering import RECORD_COUNTERS, RECORD_INTEGRALS, RECORD_MAPS
from controlplane.metering.readings import NAME_SEPARATOR
from saltern.names import TenantId

HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)
_UNITS: Final = {HOUR: "hour", DAY: "day"}
_NUMBERS: Final = (*RECORD_INTEGRALS, *RECORD_COUNTERS)
_NIL: Final = UUID(int=0)

#: Start, tenant, uid of the tenant, namespace: the order of records.
Position: TypeAlias = tuple[datetime, str, UUID, str]
_Totals: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Record:
    """What one subject used in one hour or day.

    Attributes:
        amounts: by the columns of ``usage_records`` that are numbers; those that are 0 may be left out.
        maps: by the columns that are counters by name.
        is_open: it may still grow.
    """

    tenant: TenantId
    tenant_uid: UUID
    namespace: str
    start: datetime
    end: datetime
    is_open: bool
    amounts: Mapping[str, int] = field(default_factory=dict)
    maps: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        """Where it stands in the order of records."""
        return self.start, self.tenant, self.tenant_uid, self.namespace


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Which records.

    Attributes:
        step: ``HOUR`` or ``DAY`` (UTC).
        begin, end: those that start at ``begin`` or later and before ``end``; both are whole steps.
        tenant: only this one's; None for every tenant's. tenant_uid: and not those of another one of that name.
        by_namespace: of namespaces instead of tenants as a whole.
        closed_only: leave out what may still grow.
    """

    step: timedelta
    begin: datetime
    end: datetime
    tenant: TenantId | None = None
    tenant_uid: UUID | None = None
    by_namespace: bool = False
    closed_only: bool = False


async def read_records(
    session: AsyncSession, query: RecordQuery, *, after: Position | None = None, limit: int
) -> list[Record]:
    """Up to ``limit`` records behind ``after``, by time, then by tenant.

    Args:
        session: REPEATABLE READ, because an hour that closes moves from one table to the other.
    """
    closed_until = await session.scalar(select(MeteringState.closed_until))
    assert closed_until is not None, "the migration makes the row, and its trigger keeps it"
    numbers = [getattr(UsageRecord, name) for name in (*_NUMBERS, *RECORD_MAPS)]
    closed = _select(UsageRecord, numbers, query, after).limit(limit * (query.step // HOUR))
    still_open = _select(OpenUsage, [OpenUsage.totals], query, after)
    parts = merge(
        [(_position(row), _flatten(row)) for row in await session.execute(closed)],
        [(_position(row), row.totals) for row in await session.execute(still_open)],
        key=lambda part: part[0],
    )
    records = (
        _to_record(position, [totals for _, totals in group], query.step, closed_until)
        for position, group in groupby(parts, key=lambda part: part[0])
    )
    return list(islice((record for record in records if not (query.closed_only and record.is_open)), limit))


async def first_hour(session: AsyncSession) -> datetime | None:
    """The oldest hour of which anything is known; None where nothing is."""
    hours = [await session.scalar(select(func.min(table.hour))) for table in (UsageRecord, OpenUsage)]
    return min((hour for hour in hours if hour is not None), default=None)


async def has_records(session: AsyncSession, tenant: TenantId) -> bool:
    """Whether anything is known of a tenant of this name, be it gone or not."""
    for table in (UsageRecord, OpenUsage):
        if await session.scalar(select(select(table.hour).where(table.tenant_id == tenant).exists())):
            return True
    return False


def _select(
    table: type[UsageRecord] | type[OpenUsage], columns: list[Any], query: RecordQuery, after: Position | None
) -> Any:
    start = func.date_trunc(_UNITS[query.step], table.hour, "UTC").label("start")
    position = (start, table.tenant_id, table.tenant_uid, table.namespace_id)
    statement = (
        select(*position, *columns)
        .where(table.hour >= query.begin, table.hour < query.end)
        .where(table.namespace_id != "" if query.by_namespace else table.namespace_id == "")
        .order_by(*position)
    )
    if query.tenant is not None:
        statement = statement.where(table.tenant_id == query.tenant)
    if query.tenant_uid is not None:
        statement = statement.where(table.tenant_uid == query.tenant_uid)
    if after is not None:
        statement = statement.where(table.hour >= after[0], tuple_(*position) > tuple_(*map(literal, after)))
    return statement


def _position(row: Any) -> Position:
    return row.start, row.tenant_id, row.tenant_uid, row.namespace_id


def _flatten(row: Any) -> _Totals:
    """A closed hour in the form of an open one."""
    totals = {name: int(getattr(row, name)) for name in _NUMBERS}
    for column in RECORD_MAPS:
        totals.update((f"{column}{NAME_SEPARATOR}{name}", count) for name, count in getattr(row, column).items())
    return totals


def sum_totals(totals: list[_Totals]) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Sums of totals, by the columns that are numbers and by those that are counters by name."""
    sums: Counter[str] = Counter()
    for part in totals:
        sums.update(part)
    amounts: dict[str, int] = {}
    maps: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for key, total in sums.items():
        column, _, name = key.partition(NAME_SEPARATOR)
        if name:
            maps[column][name] = total
        else:
            amounts[column] = total
    return amounts, maps


def _to_record(position: Position, totals: list[_Totals], step: timedelta, closed_until: datetime) -> Record:
    start, tenant, tenant_uid, namespace = position
    amounts, maps = sum_totals(totals)
    end = start + step
    return Record(TenantId(tenant), tenant_uid, namespace, start, end, end > closed_until, amounts, maps)


def by_step(query: RecordQuery) -> Iterator[RecordQuery]:
    """``query`` step by step: of every tenant, one hour or day is as much as a statement should sort."""
    begin = query.begin
    while begin < query.end:
        yield RecordQuery(
            query.step, begin, begin + query.step, query.tenant, query.tenant_uid, query.by_namespace, query.closed_only
        )
        begin += query.step
