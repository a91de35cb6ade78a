"""Repeated requests (AIP-155): the same request id and request get the same answer, and nothing happens twice."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from uuid import UUID

from google.protobuf.message import Message
from sqlalchemy import delete, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.models import RequestLog
from saltern.errors import InvalidArgumentError
from saltern.names import TenantId, tenant_name

#: How long a request id is remembered; nobody retries a request for longer.
RETENTION = timedelta(hours=24)
_PURGE_ROWS = 100


async def claim_request(
    session: AsyncSession, *, actor: str, method: str, request_id: UUID, request: Message, now: datetime
) -> bytes | None:
    """Claim a request id for this transaction; return the stored answer if the request was answered before.

    Where another transaction holds the same id, this waits for its end.

    Raises:
        InvalidArgumentError: reason REQUEST_ID_REUSED: the id belongs to another request.
    """
    content = type(request)()
    content.CopyFrom(request)
    content.ClearField("request_id")  # the id may be written in other letters
    request_sha256 = hashlib.sha256(content.SerializeToString(deterministic=True)).digest()
    claim = insert(RequestLog).values(
        actor=actor, method=method, request_id=request_id, request_sha256=request_sha256, create_time=now
    )
    if (await session.execute(claim.on_conflict_do_nothing().returning(RequestLog.actor))).first() is not None:
        await _purge(session, now)
        return None
    known = await session.get_one(RequestLog, (actor, method, request_id))
    if known.request_sha256 != request_sha256:
        raise InvalidArgumentError(
            "request_id was used before for another request",
            reason="REQUEST_ID_REUSED",
            hint="give every new request a fresh UUID; repeat a request unchanged",
            metadata={"field": "request_id"},
        )
    return known.response


async def store_response(
    session: AsyncSession, *, actor: str, method: str, request_id: UUID, response: Message
) -> None:
    """Keep the answer of a claimed request; ``response`` holds no secret."""
    await session.execute(
        update(RequestLog)
        .where(RequestLog.actor == actor, RequestLog.method == method, RequestLog.request_id == request_id)
        .values(response=response.SerializeToString())
    )


async def forget_requests_of_key(session: AsyncSession, key_name: str) -> None:
    """Forget what a deleted API key asked, so that a later key of that name is not answered with it."""
    await session.execute(delete(RequestLog).where(RequestLog.actor == key_name))


async def forget_requests_of_tenant(session: AsyncSession, tenant: TenantId) -> None:
    """Forget what every key of a deleted tenant asked (I12)."""
    await session.execute(delete(RequestLog).where(RequestLog.actor.startswith(f"{tenant_name(tenant)}/")))


async def _purge(session: AsyncSession, now: datetime) -> None:
    """Drop some of what is older than the retention: each claim drops more than it adds, so the table stays small."""
    key = (RequestLog.actor, RequestLog.method, RequestLog.request_id)
    old = (
        select(*key)
        .where(RequestLog.create_time < now - RETENTION)
        .limit(_PURGE_ROWS)
        .with_for_update(skip_locked=True)
    )
    await session.execute(
        delete(RequestLog).where(tuple_(*key).in_(old)), execution_options={"synchronize_session": False}
    )
