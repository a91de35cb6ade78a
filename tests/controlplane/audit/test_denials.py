from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from controlplane.audit import DenialLog
from controlplane.audit.denials import ROWS_PER_ACTOR, ROWS_PER_CHAIN, ROWS_PER_KIND
from controlplane.db import Database, connect
from controlplane.db.models import AuditEvent, AuditOutcome
from saltern.errors import PermissionDeniedError, UnauthenticatedError
from saltern.names import TenantId
from tests.support.admin import FakeClock
from tests.support.control import migrate
from tests.support.scopes import connect_to_all

DENIED = PermissionDeniedError("no", reason="ROLE_REQUIRED")
ANONYMOUS = UnauthenticatedError("no", reason="TOKEN_MISSING")


@pytest.fixture
async def database(postgres: Any) -> AsyncIterator[Database]:
    with postgres.fresh_database(migrate) as urls:
        opened = connect_to_all(urls.app)
        yield opened
        await opened.close()


async def rows(database: Database) -> list[AuditEvent]:
    async with database.transaction() as session:
        return list(await session.scalars(select(AuditEvent).order_by(AuditEvent.chain, AuditEvent.sequence)))


async def test_a_denied_attempt_is_one_row_with_its_reason(database: Database) -> None:
    denials = DenialLog(database, FakeClock())

    await denials.record_denied(
        DENIED, method="S/M", resource="tenants/a\0\x1b[31m", tenant=TenantId("acme"), actor="tenants/acme/apiKeys/ci"
    )
    await denials.record_denied(ANONYMOUS, method="S/M" + "x" * 10_000)

    tenants, platforms = await rows(database)
    assert (tenants.chain, tenants.outcome, tenants.reason) == ("acme", AuditOutcome.DENIED, "ROLE_REQUIRED")
    assert tenants.resource == "tenants/a\ufffd\ufffd[31m"
    assert (platforms.chain, platforms.actor, platforms.reason) == ("platform", "anonymous", "TOKEN_MISSING")
    assert len(platforms.method) == 256


async def test_a_flood_fills_nothing_and_hides_nobody_else(database: Database) -> None:
    clock = FakeClock()
    denials = DenialLog(database, clock)

    with capture_logs() as logs:
        for number in range(200):
            await denials.record_denied(ANONYMOUS, method=f"S/M{number % 40}")
        await denials.record_denied(DENIED, method="S/M", tenant=TenantId("acme"), actor="a")
        clock.now += timedelta(minutes=1)
        await denials.record_denied(ANONYMOUS, method="S/M0")

    written = await rows(database)
    assert sum(row.chain == "platform" for row in written) == ROWS_PER_ACTOR + 1
    assert sum(row.chain == "acme" for row in written) == 1
    assert max(sum(row.method == f"S/M{number}" for row in written) for number in range(40)) <= ROWS_PER_KIND + 1
    # What was not recorded is counted.
    assert [log["attempts"] for log in logs if "attempts" in log] == [200 - ROWS_PER_ACTOR]


async def test_i11_no_key_hides_the_attempts_of_another(database: Database) -> None:
    denials = DenialLog(database, FakeClock())

    for number in range(200):
        await denials.record_denied(ANONYMOUS, method=f"S/M{number}")
    await denials.record_denied(DENIED, method="S/M", actor="apiKeys/stolen")
    for actor in range(200):
        await denials.record_denied(DENIED, method="S/M", actor=f"apiKeys/key-{actor}")

    written = await rows(database)
    assert sum(row.actor == "apiKeys/stolen" for row in written) == 1
    assert len(written) == ROWS_PER_CHAIN


async def test_a_database_that_is_gone_does_not_turn_a_denial_into_something_else() -> None:
    database = connect("postgresql://nobody@127.0.0.1:1/none")
    denials = DenialLog(database)

    with capture_logs() as logs:
        await denials.record_denied(DENIED, method="S/M")

    assert [log["event"] for log in logs] == ["denied attempt not recorded"]
    await database.close()
