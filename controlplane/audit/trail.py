"""Append to the audit trail in the caller's own transaction: if the row cannot be written, the act does not happen."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit.redaction import require_no_secrets
from controlplane.core.audit_chain import AuditRecord, ChainedRecord, ChainHead, EventHash, append, genesis
from controlplane.db.locks import lock_audit_chain
from controlplane.db.models import PLATFORM_CHAIN, AuditEvent, AuditOutcome
from saltern.names import TenantId

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


async def record(
    session: AsyncSession,
    *,
    tenant: TenantId | None,
    actor: str,
    method: str,
    resource: str,
    now: datetime,
    outcome: AuditOutcome = AuditOutcome.SUCCESS,
    reason: str = "",
    request_id: str = "",
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
) -> int:
    """Append one event to the chain of ``tenant`` (None: the platform's) and return its sequence.

    Holds the chain until the transaction ends, so do it after the act. Writes at once, so that a refusal of the
    database undoes the act with it (I11).

    Args:
        actor: resource name of the API key that acted; ``bootstrap``; ``anonymous``.
        method: such as ``saltern.admin.v1.TenantService/CreateTenant``.
        before, after: the resource as JSON values; integers only.

    Raises:
        InternalError: a value looks like a secret.
        InvalidArgumentError: a text holds an API key or a token, or a value has no canonical form.
    """
    require_no_secrets(before)
    require_no_secrets(after)
    require_no_secrets([actor, resource, request_id])
    chain = tenant or PLATFORM_CHAIN
    await lock_audit_chain(session, chain)
    event = append(
        chain,
        await _head(session, chain),
        AuditRecord(
            event_time_us=(now - _EPOCH) // _MICROSECOND,
            actor=actor,
            method=method,
            resource=resource,
            outcome=outcome.value,
            reason=reason,
            request_id=request_id,
            before=before,
            after=after,
        ),
    )
    session.add(
        AuditEvent(
            chain=chain,
            sequence=event.sequence,
            event_time=now,
            actor=actor,
            method=method,
            resource=resource,
            outcome=outcome,
            reason=reason,
            request_id=request_id,
            before=None if before is None else dict(before),
            after=None if after is None else dict(after),
            previous_hash=event.previous_hash,
            hash=event.hash,
        )
    )
    await session.flush()
    return event.sequence


async def next_sequence(session: AsyncSession, tenant: TenantId | None) -> int:
    """The sequence that the next event of this transaction gets in the chain; holds the chain from here on."""
    chain = tenant or PLATFORM_CHAIN
    await lock_audit_chain(session, chain)
    return (await _head(session, chain)).sequence + 1


def to_chained_record(event: AuditEvent) -> ChainedRecord:
    """A stored event as the pure chain takes it, for ``controlplane.core.audit_chain.verify``."""
    return ChainedRecord(
        sequence=event.sequence,
        record=AuditRecord(
            event_time_us=(event.event_time - _EPOCH) // _MICROSECOND,
            actor=event.actor,
            method=event.method,
            resource=event.resource,
            outcome=event.outcome.value,
            reason=event.reason,
            request_id=event.request_id,
            before=event.before,
            after=event.after,
        ),
        previous_hash=EventHash(event.previous_hash),
        hash=EventHash(event.hash),
    )


async def _head(session: AsyncSession, chain: str) -> ChainHead:
    last = (
        select(AuditEvent.sequence, AuditEvent.hash)
        .where(AuditEvent.chain == chain)
        .order_by(AuditEvent.sequence.desc())
        .limit(1)
    )
    row = (await session.execute(last)).one_or_none()
    return genesis(chain) if row is None else ChainHead(row.sequence, EventHash(row.hash))
