"""Limits of namespaces come beside rows of the version before, and no downgrade lifts one."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, text

import migrations
from saltern.errors import FailedPreconditionError
from tests.migrations.test_migrations import in_transaction

_TENANT = (
    "INSERT INTO tenants (id, uid, display_name, state, min_issue_time, first_audit_sequence, create_time, update_time,"
    " revision) VALUES ('acme', gen_random_uuid(), '', 'active', now(), 1, now(), now(), 1)"
)
_NAMESPACE = (
    "INSERT INTO namespaces (tenant_id, id, uid, model_fingerprint, block_tokens, block_bytes, create_time)"
    " VALUES ('acme', 'chat', gen_random_uuid(), 'm', 16, 4096, now())"
)


def run(database: Any, *statements: str) -> list[tuple[Any, ...]]:
    """What the last of the statements answers."""

    def act(connection: Connection) -> list[tuple[Any, ...]]:
        result = [connection.execute(text(statement)) for statement in statements][-1]
        return [tuple(row) for row in result] if result.returns_rows else []

    return in_transaction(database.owner, act)


def test_a_namespace_of_the_version_before_has_no_limits_and_goes_back(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        migrations.upgrade(database.owner, "0009")
        run(database, _TENANT, _NAMESPACE)
        migrations.upgrade(database.owner, "0010")
        limits = "SELECT dram_limit_bytes, ssd_limit_bytes, revision FROM namespaces"
        assert run(database, limits) == [(None, None, 1)]
        migrations.downgrade(database.owner, "0009")
        assert run(database, "SELECT id FROM namespaces") == [("chat",)]


def test_i4_a_downgrade_lifts_no_limit(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        migrations.upgrade(database.owner, "0010")
        run(database, _TENANT, _NAMESPACE, "UPDATE namespaces SET ssd_limit_bytes = 0")
        with pytest.raises(FailedPreconditionError) as caught:
            migrations.downgrade(database.owner, "0009")
        assert caught.value.reason == "SCHEMA_IN_USE"
        assert migrations.current_revision(database.owner) == "0010"
