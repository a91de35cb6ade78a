"""AuditService: reading the audit trail, newest first in pages or oldest first as an export; keys that verify it."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Final

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.fields import (
    parse_integer,
    parse_page_size,
    parse_parent,
    parse_text,
    parse_timestamp,
    to_timestamp,
)
from controlplane.admin.pages import cut_page, decode_sequence_token, encode_page_token
from controlplane.admin.resources import to_audit_event
from controlplane.admin.service import AdminServicer, Change, absent, load_tenant, method, streaming_method
from controlplane.audit.checkpoint_keys import rotate_checkpoint_key
from controlplane.audit.stretches import PAGE_EVENTS, Stretch, find_stretch, read_events
from controlplane.caller import Caller, authorise, current_caller
from controlplane.db.models import PLATFORM_CHAIN, AuditCheckpointKey, AuditEvent, AuditOutcome, Tenant
from controlplane.rpc import Context
from saltern.admin.v1 import audit_pb2, audit_pb2_grpc
from saltern.audit.lines import ExportedEvent, encode_events
from saltern.errors import InvalidArgumentError
from saltern.names import TenantId, tenant_name
from tenants.roles import Permission

CHECKPOINT_KEYS: Final = "checkpointKeys"
#: Events that one page of a filtered list looks at: what is rare must not run past the limit of a statement.
LOOKED_AT_MAX: Final = 50_000
_SEQUENCE_MAX: Final = 2**63 - 2
_FILTER_MAX_CHARS: Final = 256


class AuditService(AdminServicer, audit_pb2_grpc.AuditServiceServicer):
    service = "saltern.admin.v1.AuditService"

    @method
    async def ListAuditEvents(
        self, request: audit_pb2.ListAuditEventsRequest, context: Context
    ) -> audit_pb2.ListAuditEventsResponse:
        tenant = parse_parent(request.parent)
        caller = authorise(Permission.AUDIT_READ, tenant)
        collection = f"{request.parent}/auditEvents"
        page_size = parse_page_size(request.page_size)
        below = decode_sequence_token(request.page_token, collection)
        wanted = _conditions(request)
        since, until = _times(request)
        async with self._database.transaction() as session:
            first = await _first_readable(session, tenant, caller) if tenant else 1
            stretch = await find_stretch(session, tenant or PLATFORM_CHAIN, first, since=since, until=until)
            last = stretch.last if below is None else min(stretch.last, below - 1)
            lowest = max(stretch.first, last + 1 - LOOKED_AT_MAX) if wanted else stretch.first
            statement = (
                select(AuditEvent)
                .where(AuditEvent.chain == stretch.chain, AuditEvent.sequence.between(lowest, last), *wanted)
                .order_by(AuditEvent.sequence.desc())
                .limit(page_size + 1)
            )
            rows, more = cut_page((await session.scalars(statement)).all(), page_size)
        next_below = more.sequence if more else lowest if lowest > stretch.first else 0
        return audit_pb2.ListAuditEventsResponse(
            audit_events=map(to_audit_event, rows),
            next_page_token=encode_page_token(collection, next_below) if next_below else "",
        )

    @streaming_method
    async def ExportAuditEvents(
        self, request: audit_pb2.ExportAuditEventsRequest, context: Context
    ) -> AsyncIterator[audit_pb2.ExportAuditEventsResponse]:
        tenant = parse_parent(request.parent)
        caller = authorise(Permission.AUDIT_READ, tenant)
        after = parse_integer(request.after_sequence, "after_sequence", 0, _SEQUENCE_MAX)
        since, until = _times(request)
        async with self._database.transaction() as session:
            first = await _first_readable(session, tenant, caller) if tenant else 1
            stretch = await find_stretch(
                session, tenant or PLATFORM_CHAIN, max(first, after + 1), since=since, until=until
            )
        async for events in self._pages(stretch):
            yield audit_pb2.ExportAuditEventsResponse(
                lines=encode_events(events), events=len(events), last_sequence=events[-1].sequence
            )

    async def _pages(self, stretch: Stretch) -> AsyncIterator[list[ExportedEvent]]:
        """The events of ``stretch`` in pages; while one is being sent, the database looks for the next."""
        firsts = range(stretch.first, stretch.last + 1, PAGE_EVENTS)
        coming: asyncio.Task[list[ExportedEvent]] | None = None
        try:
            for first in firsts:
                events = await (coming or self._page(stretch, first))
                coming = None
                if first + PAGE_EVENTS in firsts:
                    coming = asyncio.create_task(
                        self._page(stretch, first + PAGE_EVENTS), name="next page of an export"
                    )
                    await asyncio.sleep(0)  # it sends its statement before this page is made into lines
                yield events
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.wait({coming})

    async def _page(self, stretch: Stretch, first: int) -> list[ExportedEvent]:
        async with self._database.transaction() as session:
            return await read_events(session, stretch.chain, first, stretch.last)

    @method
    async def ListCheckpointKeys(
        self, request: audit_pb2.ListCheckpointKeysRequest, context: Context
    ) -> audit_pb2.ListCheckpointKeysResponse:
        # Public, but a door that tells anybody anything is one more to watch: whoever may read a trail may have them.
        authorise(Permission.AUDIT_READ, current_caller().tenant)
        async with self._database.transaction() as session:
            rows = await session.scalars(
                select(AuditCheckpointKey).order_by(AuditCheckpointKey.create_time, AuditCheckpointKey.id)
            )
            return audit_pb2.ListCheckpointKeysResponse(checkpoint_keys=map(_to_checkpoint_key, rows))

    @method
    async def RotateCheckpointKey(
        self, request: audit_pb2.RotateCheckpointKeyRequest, context: Context
    ) -> audit_pb2.CheckpointKey:
        authorise(Permission.SIGNING_KEYS_MANAGE, None)

        async def act(session: AsyncSession, now: datetime) -> Change[audit_pb2.CheckpointKey]:
            row = await rotate_checkpoint_key(session, self._parts.key_encryption_key, now)
            return Change(tenant=None, resource=f"{CHECKPOINT_KEYS}/{row.id}", response=_to_checkpoint_key(row))

        return await self._change("RotateCheckpointKey", request, audit_pb2.CheckpointKey, act)


def _times(
    request: audit_pb2.ListAuditEventsRequest | audit_pb2.ExportAuditEventsRequest,
) -> tuple[datetime | None, datetime | None]:
    """``since`` and ``until`` of a request; None where they are not set."""
    return (
        parse_timestamp(request.since, "since") if request.HasField("since") else None,
        parse_timestamp(request.until, "until") if request.HasField("until") else None,
    )


def _conditions(request: audit_pb2.ListAuditEventsRequest) -> list[ColumnElement[bool]]:
    """What a filter asks of each event; texts are looked for as they stand, never as patterns."""
    wanted: list[ColumnElement[bool]] = []
    for field, column in (("actor", AuditEvent.actor), ("method", AuditEvent.method)):
        text = parse_text(getattr(request, field), field, max_chars=_FILTER_MAX_CHARS)
        if text:
            wanted.append(func.strpos(column, text) > 0)
    if request.outcome:
        wanted.append(AuditEvent.outcome == _to_outcome(request.outcome))
    return wanted


def _to_outcome(number: audit_pb2.AuditEvent.Outcome.ValueType) -> AuditOutcome:
    try:
        return AuditOutcome(audit_pb2.AuditEvent.Outcome.Name(number).removeprefix("OUTCOME_").lower())
    except ValueError:
        raise InvalidArgumentError(
            f"the outcome {number} is not one that events have",
            reason="INVALID_OUTCOME",
            hint="use OUTCOME_SUCCESS or OUTCOME_DENIED, or leave it out",
        ) from None


def _to_checkpoint_key(row: AuditCheckpointKey) -> audit_pb2.CheckpointKey:
    return audit_pb2.CheckpointKey(
        key_id=row.id,
        public_key=row.public_key,
        create_time=to_timestamp(row.create_time),
        retire_time=to_timestamp(row.retire_time),
    )


async def _first_readable(session: AsyncSession, tenant: TenantId, caller: Caller) -> int:
    """The sequence from which ``caller`` may read: a tenant sees nothing of an earlier one of the same id (I2).

    The platform sees the whole chain, also after the tenant is gone.
    """
    if not caller.is_platform:
        return (await load_tenant(session, tenant, caller)).first_audit_sequence
    known = select(exists().where(Tenant.id == tenant) | exists().where(AuditEvent.chain == tenant))
    if not await session.scalar(known):
        raise absent(caller, tenant_name(tenant))
    return 1
