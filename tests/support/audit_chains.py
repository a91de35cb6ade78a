"""Chains of audit events made at once: for exports and verifications that want many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
from msgspec.structs import replace
from sqlalchemy import URL

from saltern.audit.chain import AuditRecord, ChainedRecord, ChainHead, append, genesis
from saltern.audit.lines import ExportedEvent, time_of

START_US = 1_764_000_000_000_000
STEP_US = 1_000_000
RECORD = AuditRecord(
    event_time_us=START_US,
    actor="tenants/acme/apiKeys/ci",
    actor_role="tenant-admin",
    peer="192.0.2.7:50412",
    method="saltern.admin.v1.NamespaceService/CreateNamespace",
    resource="tenants/acme/namespaces/chat",
    outcome="success",
    reason="",
    request_id="9b2f0a7e-3a39-4b4e-9a9e-0e1d0d3f7a11",
    policy_version=7,
    before=None,
    after={"name": "tenants/acme/namespaces/chat", "block_tokens": 16, "block_bytes": "65536", "label": 'ü "quoted"\n'},
)


def chain_of(count: int, chain: str = "acme", record: AuditRecord = RECORD) -> Iterator[ChainedRecord]:
    """``count`` events, a second apart."""
    head = genesis(chain)
    for number in range(count):
        event = append(
            chain, head, replace(record, event_time_us=START_US + number * STEP_US, policy_version=number + 1)
        )
        head = ChainHead(event.sequence, event.hash)
        yield event


def exported(event: ChainedRecord, chain: str = "acme") -> ExportedEvent:
    """The event as an export holds it."""
    record = event.record
    return ExportedEvent(
        actor=record.actor,
        actor_role=record.actor_role,
        after=record.after,
        before=record.before,
        chain=chain,
        event_time=time_of(record.event_time_us),
        hash=event.hash.hex(),
        hash_format=event.hash_format,
        method=record.method,
        outcome=record.outcome,
        peer=record.peer,
        policy_version=record.policy_version,
        previous_hash=event.previous_hash.hex(),
        reason=record.reason,
        request_id=record.request_id,
        resource=record.resource,
        sequence=event.sequence,
    )


def store(owner: URL, events: Iterator[ChainedRecord], chain: str = "acme") -> None:
    """Write events into the database as they are, past the service."""
    columns = (
        "chain, sequence, event_time, actor, actor_role, method, resource, outcome, reason, request_id, before, after,"
        " previous_hash, hash, hash_format, peer, policy_version"
    )
    url = owner.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT set_config('saltern.tenant', '*', true)")
        insert = f"INSERT INTO audit_events ({columns}) VALUES ({', '.join(['%s'] * 17)})"
        cursor.executemany(insert, [_row(chain, event) for event in events])


def _row(chain: str, event: ChainedRecord) -> tuple[Any, ...]:
    record = event.record
    return (
        chain,
        event.sequence,
        time_of(record.event_time_us),
        record.actor,
        record.actor_role,
        record.method,
        record.resource,
        record.outcome,
        record.reason,
        record.request_id,
        None if record.before is None else json.dumps(record.before),
        None if record.after is None else json.dumps(record.after),
        event.previous_hash,
        event.hash,
        event.hash_format,
        record.peer,
        record.policy_version,
    )
