"""Stretches of audit chains, read from the database in the form of exports: oldest first, without gaps.

Chains are written one event at a time (``controlplane.db.locks``), so a sequence that is seen is the last one that will
ever be below the next: whoever goes on after it misses nothing. Each page is a transaction of its own, so that a long
export holds no snapshot and no connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Select, Text, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.models import AuditEvent
from saltern.audit.chain import whole_number
from saltern.audit.lines import ExportedEvent

PAGE_EVENTS: Final = 1000
_RESOURCE: Final = msgspec.json.Decoder(dict[str, object], float_hook=lambda text: whole_number(float(text)))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Events ``first..last`` of a chain; none if ``last < first``."""

    chain: str
    first: int
    last: int


async def find_stretch(
    session: AsyncSession, chain: str, first: int, *, since: datetime | None = None, until: datetime | None = None
) -> Stretch:
    """The stretch of ``chain`` from ``first`` on that begins at ``since`` and ends before ``until``.

    It has no gaps, whatever the clocks of several control planes said: it begins with the first event that is late
    enough, and ends with the last one that is early enough.
    """
    if since is not None:
        late = select(func.min(AuditEvent.sequence)).where(
            AuditEvent.chain == chain, AuditEvent.sequence >= first, AuditEvent.event_time >= since
        )
        found = await session.scalar(late)
        if found is None:
            return Stretch(chain, first, first - 1)
        first = found
    newest = select(func.max(AuditEvent.sequence)).where(AuditEvent.chain == chain)
    if until is not None:
        newest = newest.where(AuditEvent.event_time < until)
    return Stretch(chain, first, await session.scalar(newest) or 0)


async def read_events(session: AsyncSession, chain: str, first: int, last: int) -> list[ExportedEvent]:
    """The events ``first..last`` of ``chain``, at most ``PAGE_EVENTS`` of them."""
    rows = (await session.execute(_page(chain, first, last))).all()
    return [ExportedEvent(row[0], row[1], _resource(row[2]), _resource(row[3]), *row[4:]) for row in rows]


def _page(chain: str, first: int, last: int) -> Select[Any]:
    """In the order of the fields of ``ExportedEvent``; JSON as text, which is faster to read than objects are."""
    event = AuditEvent.__table__.c  # columns, not attributes: rows come as the driver made them
    return (
        select(
            event.actor,
            event.actor_role,
            cast(event.after, Text),
            cast(event.before, Text),
            event.chain,
            event.event_time,
            func.encode(event.hash, "hex"),
            event.hash_format,
            event.method,
            cast(event.outcome, Text),
            event.peer,
            event.policy_version,
            func.encode(event.previous_hash, "hex"),
            event.reason,
            event.request_id,
            event.resource,
            event.sequence,
        )
        .where(event.chain == chain, event.sequence >= first, event.sequence <= last)
        .order_by(event.sequence)
        .limit(PAGE_EVENTS)
    )


def _resource(text: str | None) -> dict[str, object] | None:
    return None if text is None else _RESOURCE.decode(text)
