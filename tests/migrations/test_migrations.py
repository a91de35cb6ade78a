from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import URL, Connection, create_engine, text

import migrations
from controlplane.db.models import Base
from controlplane.db.row_security import EVERY_TENANT, TENANT_SETTING
from migrations.grants import APPLICATION_ROLE
from saltern.errors import FailedPreconditionError, UnavailableError

CHECKS = """
    SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND contype IN ('c', 'f', 'u', 'p')
    AND conrelid <> coalesce(to_regclass('alembic_version'), 0::oid)
    ORDER BY 1, 2
"""


def in_transaction(url: URL, act: Any) -> Any:
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            # Row-level security is forced, so the owner must say that it means every tenant's rows.
            connection.execute(
                text("SELECT set_config(:name, :all, true)"), {"name": TENANT_SETTING, "all": EVERY_TENANT}
            )
            return act(connection)
    finally:
        engine.dispose()


def test_the_migrated_schema_is_the_one_of_the_models(postgres: Any) -> None:
    def differences(connection: Connection) -> list[Any]:
        options = {"compare_type": True, "compare_server_default": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata))

    def checks(connection: Connection) -> list[Any]:
        return [tuple(row) for row in connection.execute(text(CHECKS))]

    with postgres.fresh_database() as migrated, postgres.fresh_database() as created:
        migrations.upgrade(migrated.owner)
        in_transaction(created.owner, Base.metadata.create_all)

        assert in_transaction(migrated.owner, differences) == []
        # alembic does not compare CHECK constraints; the catalogue does.
        assert in_transaction(migrated.owner, checks) == in_transaction(created.owner, checks)


def test_an_upgrade_is_repeatable_and_a_downgrade_takes_everything_away(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        assert migrations.current_revision(database.owner) is None
        for _ in range(2):
            migrations.upgrade(database.owner)
            assert migrations.current_revision(database.owner) == migrations.head_revision()
        migrations.downgrade(database.owner)
        assert migrations.current_revision(database.owner) is None

        def tables(connection: Connection) -> list[str]:
            return list(connection.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")))

        assert in_transaction(database.owner, tables) == ["alembic_version"]
        migrations.upgrade(database.owner)


def test_a_downgrade_does_not_destroy_rows(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        migrations.upgrade(database.owner)
        in_transaction(database.owner, insert_event)

        with pytest.raises(FailedPreconditionError) as caught:
            migrations.downgrade(database.owner)

        assert caught.value.reason == "SCHEMA_IN_USE"
        assert migrations.current_revision(database.owner) == migrations.head_revision()


def test_rates_come_and_go_beside_rows_of_the_version_before(postgres: Any) -> None:
    """0002 on a database in use: inserts of the earlier version still work after it, and no rate is lost by mistake."""
    tenant = "INSERT INTO tenants VALUES ('{0}', gen_random_uuid(), '', 'active', now(), 'w', 1, now(), now(), 1)"
    node = "INSERT INTO nodes VALUES ('n', gen_random_uuid(), 1, 'w', '', '', '', 1, 0, '', 0, now(), now())"
    usage = "INSERT INTO node_usage VALUES ('n', '{0}', 1, 2, 3, 4, 5, 6, 7, 8, now())"
    tier_usage = "INSERT INTO node_tier_usage VALUES ('n', '{0}', 'dram', 1, 1)"

    with postgres.fresh_database() as database:

        def run(*statements: str) -> None:
            in_transaction(database.owner, lambda connection: [connection.execute(text(sql)) for sql in statements])

        def one(sql: str) -> Any:
            return in_transaction(database.owner, lambda connection: tuple(connection.execute(text(sql)).one()))

        migrations.upgrade(database.owner, "0001")
        run(tenant.format("a"), node, usage.format("a"), tier_usage.format("a"))
        migrations.upgrade(database.owner, "0002")
        run(tenant.format("b"), usage.format("b"), tier_usage.format("b"))
        for name in "ab":
            columns = "evictions, evictions_by_cause, refused_by_reason, taken_bytes, ssd"
            found = one(f"SELECT {columns} FROM node_usage WHERE tenant_id = '{name}'")
            assert found == (7, {}, {}, 0, None)
            assert one(f"SELECT lent_bytes FROM node_tier_usage WHERE tenant_id = '{name}'") == (0,)

        run("INSERT INTO rate_limits VALUES ('a', 0, 5, 0, now(), 1)")
        for refused in (
            "INSERT INTO rate_limits VALUES ('b', -1, 0, 0, now(), 1)",
            f"INSERT INTO rate_limits VALUES ('b', 0, {2**40 + 1}, 0, now(), 1)",
            "UPDATE node_usage SET evictions_by_cause = '[1]'",
            "UPDATE node_usage SET ssd = '3'",
            "UPDATE node_tier_usage SET borrowed_bytes = -1",
        ):
            with pytest.raises(Exception, match="violates check constraint"):
                run(refused)
        with pytest.raises(FailedPreconditionError) as caught:
            migrations.downgrade(database.owner, "0001")
        assert caught.value.reason == "SCHEMA_IN_USE"
        run("UPDATE rate_limits SET bytes_per_s = 0")
        migrations.downgrade(database.owner, "0001")
        assert one("SELECT count(*) FROM node_usage") == (2,)
        migrations.upgrade(database.owner)
        assert one("SELECT count(*) FROM rate_limits") == (0,)


def test_control_planes_that_start_together_take_turns(postgres: Any) -> None:
    failures: list[BaseException] = []

    def start(url: URL) -> None:
        try:
            migrations.upgrade(url)
        except BaseException as failure:
            failures.append(failure)

    with postgres.fresh_database() as database:
        threads = [threading.Thread(target=start, args=(database.owner,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert failures == []
        assert migrations.current_revision(database.owner) == migrations.head_revision()


def test_a_failed_upgrade_leaves_the_schema_as_it_was(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        in_transaction(database.owner, lambda connection: connection.execute(text("CREATE TABLE tenants (id int)")))

        with pytest.raises(Exception, match="already exists"):
            migrations.upgrade(database.owner)

        def tables(connection: Connection) -> list[str]:
            return list(connection.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")))

        assert in_transaction(database.owner, tables) == ["tenants"]


def test_i11_audit_events_are_append_only_for_the_owner_too(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        migrations.upgrade(database.owner)
        in_transaction(database.owner, insert_event)

        for statement in ("UPDATE audit_events SET actor = ''", "DELETE FROM audit_events", "TRUNCATE audit_events"):
            with pytest.raises(Exception, match="append-only"):
                in_transaction(database.owner, lambda connection, sql=statement: connection.execute(text(sql)))


def insert_event(connection: Connection) -> None:
    connection.execute(
        text(
            "INSERT INTO audit_events VALUES ('platform', 1, now(), '', '', '', 'success', '', '', NULL, NULL,"
            " sha256('a'), sha256('b'))"
        )
    )


def test_the_application_role_has_exactly_the_rights_that_it_needs(postgres: Any) -> None:
    def rights(connection: Connection) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        statement = "SELECT table_name, privilege_type FROM information_schema.table_privileges WHERE grantee = :role"
        for table, right in connection.execute(text(statement), {"role": APPLICATION_ROLE}):
            found.setdefault(table, set()).add(right)
        return found

    with postgres.fresh_database() as database:
        migrations.upgrade(database.owner)
        granted = in_transaction(database.owner, rights)

    assert granted["audit_events"] == {"SELECT", "INSERT"}
    assert granted["alembic_version"] == {"SELECT"}
    assert set(Base.metadata.tables) <= set(granted)
    for table, held in granted.items():
        assert held <= {"SELECT", "INSERT", "UPDATE", "DELETE"}, table


def test_a_server_that_is_not_there_gets_help() -> None:
    with pytest.raises(UnavailableError) as caught:
        migrations.upgrade("postgresql://nobody:hunter2@127.0.0.1:1/none")

    assert caught.value.reason == "DATABASE_UNAVAILABLE"
    assert "hunter2" not in str(caught.value)
    assert isinstance(caught.value.__cause__, Exception)
    assert psycopg.OperationalError.__name__ in type(caught.value.__cause__).__name__
