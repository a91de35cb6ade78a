"""Append to the audit trail in the caller's own transaction: if the row cannot be written, the act does not happen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit.redaction import require_no_secrets
from controlplane.caller import current_peer, role_of
from controlplane.db.locks import lock_audit_chain, lock_audit_chains
from controlplane.db.models import PLATFORM_CHAIN, AuditEvent, AuditOutcome, PolicyState
from controlplane.db.session import driver_of
from saltern.audit.chain import AuditRecord, ChainedRecord, ChainHead, EventHash, append, append_many, genesis
from saltern.names import TenantId
from tenants.roles import Role

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
    role: Role | None = None,
    outcome: AuditOutcome = AuditOutcome.SUCCESS,
    reason: str = "",
    request_id: str = "",
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
    bump_policy: Callable[[], Awaitable[int]] | None = None,
    peer: str | None = None,
) -> int:
    """Append one event to the chain of ``tenant`` (None: the platform's) and return its sequence.

    Holds the chain until the transaction ends, so do it after the act. Writes at once, so that a refusal of the
    database undoes the act with it (I11). Where the call came from is known already (``controlplane.caller``).

    Args:
        actor: resource name of the API key that acted; ``bootstrap``; ``anonymous``.
        method: such as ``saltern.admin.v1.TenantService/CreateTenant``.
        role: the actor's; by default that of the current caller, if that is the actor.
        before, after: the resource as JSON values; integers only.
        bump_policy: raises the policy version and returns it, for an act that nodes must hear of. It is done in here,
            because the event names the version and the chain is locked before it (``controlplane.db.locks``).
        peer: where the call came from; by default that of the current call.

    Raises:
        InternalError: a value looks like a secret.
        InvalidArgumentError: a text holds an API key or a token, or a value has no canonical form.
    """
    require_no_secrets(before)
    require_no_secrets(after)
    require_no_secrets([actor, resource, request_id])
    role = role or role_of(actor)
    chain = tenant or PLATFORM_CHAIN
    await lock_audit_chain(session, chain)
    head = await _head(session, chain)
    policy_version = await (_policy_version(session) if bump_policy is None else bump_policy())
    event = append(
        chain,
        head,
        AuditRecord(
            event_time_us=(now - _EPOCH) // _MICROSECOND,
            actor=actor,
            actor_role=role.value if role else "",
            peer=current_peer() if peer is None else peer,
            method=method,
            resource=resource,
            outcome=outcome.value,
            reason=reason,
            request_id=request_id,
            policy_version=policy_version,
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
            actor_role=event.record.actor_role,
            peer=event.record.peer,
            method=method,
            resource=resource,
            outcome=outcome,
            reason=reason,
            request_id=request_id,
            policy_version=policy_version,
            before=None if before is None else dict(before),
            after=None if after is None else dict(after),
            previous_hash=event.previous_hash,
            hash=event.hash,
            hash_format=event.hash_format,
        )
    )
    await session.flush()
    return event.sequence


#: Columns of an event, as ``_columns`` gives them.
EVENT_COLUMNS: Final = {
    "chain": "text",
    "sequence": "bigint",
    "event_time": "timestamptz",
    "actor": "text",
    "actor_role": "text",
    "peer": "text",
    "method": "text",
    "resource": "text",
    "outcome": "text",
    "reason": "text",
    "request_id": "text",
    "policy_version": "bigint",
    "before": "jsonb",
    "after": "jsonb",
    "previous_hash": "bytea",
    "hash": "bytea",
    "hash_format": "smallint",
}
#: All rows as one JSON document, which costs this process the least; bytes in it are hex digits.
_INSERT_MANY: Final = (
    f"INSERT INTO audit_events ({', '.join(EVENT_COLUMNS)}) SELECT "  # noqa: S608 (constants)
    + ", ".join(f"decode({name}, 'hex')" if kind == "bytea" else name for name, kind in EVENT_COLUMNS.items())
    + " FROM json_to_recordset(%s::json) AS events ("
    + ", ".join(f"{name} {'text' if kind == 'bytea' else kind}" for name, kind in EVENT_COLUMNS.items())
    + ")"
)
#: The policy version, and the heads of chains, each one step down its index however long it is; NULL for none yet.
_HEADS: Final = """
SELECT (SELECT version FROM policy_state), named.chain, last.sequence, last.hash
FROM unnest(%s::text[]) AS named (chain) LEFT JOIN LATERAL (
    SELECT sequence, hash FROM audit_events WHERE audit_events.chain = named.chain ORDER BY sequence DESC LIMIT 1
) AS last ON true
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One successful act of many that are recorded together; the fields are those of :func:`record`."""

    tenant: TenantId | None
    actor: str
    role: Role
    peer: str
    method: str
    resource: str
    after: Mapping[str, object]


async def record_many(session: AsyncSession, acts: Iterable[Act], now: datetime) -> None:
    """Append one event for each act to its chain, in order, with the statements of one; as :func:`record` otherwise.

    Holds the chains until the transaction ends. It changes no policy.

    Raises:
        InternalError, InvalidArgumentError: as :func:`record`; then nothing is written.
    """
    by_chain: dict[str, list[Act]] = defaultdict(list)
    for act in acts:
        require_no_secrets(act.after)
        require_no_secrets([act.actor, act.resource])
        by_chain[act.tenant or PLATFORM_CHAIN].append(act)
    if not by_chain:
        return
    await session.flush()  # the acts before their events; what follows goes past the session
    await lock_audit_chains(session, by_chain)
    driver = await driver_of(session)
    # A statement of its own: it has to see what whoever held the chains before has written.
    heads = await (await driver.execute(_HEADS, (list(by_chain),))).fetchall()
    rows = []
    for policy_version, chain, sequence, hash_ in heads:
        head = genesis(chain) if sequence is None else ChainHead(sequence, EventHash(hash_))
        records = (_successful(act, policy_version, now) for act in by_chain[chain])
        rows += [_columns(chain, event, now) for event in append_many(chain, head, records)]
    await driver.execute(_INSERT_MANY, (msgspec.json.encode(rows).decode(),))


def _successful(act: Act, policy_version: int, now: datetime) -> AuditRecord:
    return AuditRecord(
        event_time_us=(now - _EPOCH) // _MICROSECOND,
        actor=act.actor,
        actor_role=act.role.value,
        peer=act.peer,
        method=act.method,
        resource=act.resource,
        outcome=AuditOutcome.SUCCESS.value,
        reason="",
        request_id="",
        policy_version=policy_version,
        before=None,
        after=act.after,
    )


def _columns(chain: str, event: ChainedRecord, now: datetime) -> dict[str, object]:
    """A row for ``_INSERT_MANY``."""
    record = event.record
    return {
        "chain": chain,
        "sequence": event.sequence,
        "event_time": now,
        "actor": record.actor,
        "actor_role": record.actor_role,
        "peer": record.peer,
        "method": record.method,
        "resource": record.resource,
        "outcome": record.outcome,
        "reason": record.reason,
        "request_id": record.request_id,
        "policy_version": record.policy_version,
        "before": record.before,
        "after": record.after,
        "previous_hash": event.previous_hash.hex(),
        "hash": event.hash.hex(),
        "hash_format": event.hash_format,
    }


async def next_sequence(session: AsyncSession, tenant: TenantId | None) -> int:
    """The sequence that the next event of this transaction gets in the chain; holds the chain from here on."""
    chain = tenant or PLATFORM_CHAIN
    await lock_audit_chain(session, chain)
    return (await _head(session, chain)).sequence + 1


def to_chained_record(event: AuditEvent) -> ChainedRecord:
    """A stored event as the pure chain takes it, for ``saltern.audit.chain.verify``."""
    return ChainedRecord(
        sequence=event.sequence,
        record=AuditRecord(
            event_time_us=(event.event_time - _EPOCH) // _MICROSECOND,
            actor=event.actor,
            actor_role=event.actor_role,
            peer=event.peer,
            method=event.method,
            resource=event.resource,
            outcome=event.outcome.value,
            reason=event.reason,
            request_id=event.request_id,
            policy_version=event.policy_version,
            before=event.before,
            after=event.after,
        ),
        previous_hash=EventHash(event.previous_hash),
        hash=EventHash(event.hash),
        hash_format=event.hash_format,
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


async def _policy_version(session: AsyncSession) -> int:
    return (await session.execute(select(PolicyState.version))).scalar_one()
