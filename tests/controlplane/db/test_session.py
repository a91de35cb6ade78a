from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from controlplane.db import connect, models, sqlalchemy_url
from saltern.errors import InvalidArgumentError
from tests.support.control import migrate
from tests.support.scopes import connect_to_all


async def test_a_transaction_commits_whole_or_not_at_all(postgres: Any) -> None:
    with postgres.fresh_database(migrate) as urls:
        database = connect(urls.app)
        try:
            await database.ping()
            with pytest.raises(RuntimeError):
                async with database.transaction() as session:
                    await session.execute(text("UPDATE policy_state SET version = 99"))
                    raise RuntimeError
            async with database.transaction() as session:
                assert (await session.execute(select(models.PolicyState.version))).scalar_one() == 1
        finally:
            await database.close()


async def test_the_database_itself_refuses_what_the_domain_refuses(postgres: Any) -> None:
    tenant = (
        "INSERT INTO tenants (id, uid, display_name, state, min_issue_time,"
        " first_audit_sequence, create_time, update_time, revision)"
        " VALUES ('{}', gen_random_uuid(), '', '{}', now(), 1, now(), now(), 1)"
    )
    quota = (
        "INSERT INTO tier_quotas (tenant_id, tier, reserved_bytes, limit_bytes, weight, update_time, revision)"
        " VALUES ('acme', '{}', {}, {}, {}, now(), 1)"
    )
    key = (
        "INSERT INTO api_keys (uid, tenant_id, id, lookup, secret_sha256, role, display_name, created_by, create_time)"
        " VALUES (gen_random_uuid(), {}, 'k', '{}', sha256('a'), '{}', '', '', now())"
    )
    refused = [
        tenant.format("platform", "active"),
        tenant.format("A", "active"),
        tenant.format("a" * 64, "active"),
        tenant.format("a", "unknown"),
        quota.format("dram", 2, 1, 100),
        quota.format("dram", -1, 1, 100),
        quota.format("dram", 0, 2**53 + 1, 100),
        quota.format("dram", 0, 1, 0),
        quota.format("dram", 0, 1, 1001),
        quota.format("tape", 0, 1, 100),
        key.format("NULL", "0" * 16, "writer"),
        key.format("'acme'", "0" * 16, "node"),
        key.format("'acme'", "0" * 16, "platform-admin"),
        key.format("'acme'", "0" * 15, "writer"),
        "INSERT INTO policy_state (id, version, update_time) VALUES (2, 1, now())",
    ]
    with postgres.fresh_database(migrate) as urls:
        database = connect_to_all(urls.owner)
        try:
            async with database.transaction() as session:
                await session.execute(text(tenant.format("acme", "active")))
            for statement in refused:
                with pytest.raises(IntegrityError, match="ck_"):
                    async with database.transaction() as session:
                        await session.execute(text(statement))
            # Two keys of the platform cannot share an id, though their tenant is NULL.
            with pytest.raises(IntegrityError, match="uq_api_keys_tenant_id_id"):
                async with database.transaction() as session:
                    for number in range(2):
                        await session.execute(text(key.format("NULL", f"{number:016x}", "node")))
        finally:
            await database.close()


async def test_statements_have_a_time_limit(postgres: Any) -> None:
    with postgres.fresh_database(migrate) as urls:
        database = connect(urls.app)
        try:
            async with database.transaction() as session:
                limits = [
                    await session.scalar(text(f"SHOW {name}"))
                    for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
                ]
            assert "0" not in limits
        finally:
            await database.close()


async def test_a_database_that_is_not_there_is_an_operational_error() -> None:
    database = connect("postgresql://nobody:hunter2@127.0.0.1:1/none")
    with pytest.raises((OperationalError, DBAPIError)) as caught:
        await database.ping()
    assert "hunter2" not in str(caught.value)
    await database.close()


@pytest.mark.parametrize(
    "url", ["", "mysql://user:hunter2@h/d", "sqlite://", "no url hunter2", "postgresql://u:hunter2@h:x/d"]
)
def test_a_url_of_something_else_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        sqlalchemy_url(url)

    assert caught.value.reason == "INVALID_DATABASE_URL"
    assert "hunter2" not in str(caught.value)
