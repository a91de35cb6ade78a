from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from controlplane.audit import Act, record, record_many, to_chained_record
from controlplane.db.models import PLATFORM_CHAIN, AuditEvent
from saltern.audit.chain import verify
from saltern.errors import InternalError
from saltern.names import TenantId
from tenants.roles import Role
from tests.support.control import migrate
from tests.support.scopes import connect_to_all

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


async def test_i11_what_is_read_back_verifies_to_the_microsecond(postgres: Any) -> None:
    with postgres.fresh_database(migrate) as urls:
        database = connect_to_all(urls.app)
        try:
            for number in range(3):
                async with database.transaction() as session:
                    sequence = await record(
                        session,
                        tenant=None,
                        actor="bootstrap",
                        method="S/M",
                        resource="apiKeys/ü",
                        now=NOW + timedelta(microseconds=number),
                        before={"z": 2**53, "a": {"limit_bytes": "9007199254740993", "on": True, "none": None}},
                        after=None if number else {},
                    )
                assert sequence == number + 1
            async with database.transaction() as session:
                events = (await session.scalars(select(AuditEvent).order_by(AuditEvent.sequence))).all()
            assert verify(PLATFORM_CHAIN, map(to_chained_record, events)) == []
        finally:
            await database.close()


async def test_i11_many_acts_at_once_verify_whatever_their_texts_are(postgres: Any) -> None:
    texts = [
        "plain",
        "ü \U0001f9c2",
        'quote " back\\slash',
        "'; DROP",
        "line\nfeed\ttab",
        "\u2028",
        "{1,2}",
        "\\x41",
        "",
    ]
    acts = [
        Act(
            tenant=tenant,
            actor=f"apiKeys/{text}",
            role=Role.WRITER,
            peer=text,
            method="S/M",
            resource=text,
            after={"text": text, "many": [text, None, True, 2**53], "none": None, "within": {"limit_bytes": -1}},
        )
        for text in texts
        for tenant in (TenantId("acme"), None)
    ]
    with postgres.fresh_database(migrate) as urls:
        database = connect_to_all(urls.app)
        try:
            async with database.transaction() as session:
                await record(session, tenant=None, actor="a", method="S/M", resource="r", now=NOW)
                await record_many(session, acts[:3], NOW)
            async with database.transaction() as session:
                await record_many(session, acts[3:], NOW + timedelta(microseconds=1))
                await record_many(session, [], NOW)
            async with database.transaction() as session:
                rows = list(await session.scalars(select(AuditEvent).order_by(AuditEvent.sequence)))
        finally:
            await database.close()
    for chain, of_chain in (("acme", acts[::2]), (PLATFORM_CHAIN, acts[1::2])):
        events = [row for row in rows if row.chain == chain]
        assert verify(chain, map(to_chained_record, events)) == []
        told = [(row.actor, row.peer, row.resource, row.after, row.before) for row in events if row.actor != "a"]
        assert told == [(act.actor, act.peer, act.resource, act.after, None) for act in of_chain]


async def test_i11_an_act_that_is_rolled_back_leaves_no_event_and_no_gap(postgres: Any) -> None:
    values: dict[str, Any] = {"tenant": TenantId("acme"), "actor": "a", "method": "S/M", "resource": "r", "now": NOW}
    with postgres.fresh_database(migrate) as urls:
        database = connect_to_all(urls.app)
        try:
            with pytest.raises(RuntimeError, match="later failure"):
                async with database.transaction() as session:
                    await record(session, **values)
                    raise RuntimeError("later failure")
            with pytest.raises(InternalError):
                async with database.transaction() as session:
                    await record(session, **values, after={"secret": "x"})

            async def append() -> int:
                async with database.transaction() as session:
                    return await record(session, **values)

            assert sorted(await asyncio.gather(*(append() for _ in range(6)))) == [1, 2, 3, 4, 5, 6]
        finally:
            await database.close()
