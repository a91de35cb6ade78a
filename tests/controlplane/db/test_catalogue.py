"""The catalogue: every table with rows of tenants is protected, and the service starts as no role that is not bound."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import controlplane
import dataplane
import migrations
from controlplane.db import ServiceTask, connect
from controlplane.db.catalogue import TABLES_OF_NO_TENANT, TENANT_COLUMNS, require_row_security
from saltern.errors import FailedPreconditionError
from tests.support.control import migrate, text_of

_TABLES = """
    SELECT c.relname, c.relrowsecurity AND c.relforcerowsecurity,
        ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped),
        ARRAY(SELECT ARRAY[p.cmd, p.qual, p.with_check] FROM pg_policies p WHERE p.tablename = c.relname)
    FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind NOT IN ('i', 'I', 'S', 't')
"""


def unprotected(connection: psycopg.Connection[Any]) -> dict[str, str]:
    """What is wrong with each table, view or foreign table of the schema: it is on the list, or it is protected."""
    faults = {}
    for table, forced, columns, policies in connection.execute(_TABLES).fetchall():
        if table in TABLES_OF_NO_TENANT:
            if any(column.endswith(TENANT_COLUMNS) for column in columns):
                faults[table] = "is listed as of no tenant, and has a column of one"
            if forced or policies:
                faults[table] = "is listed as of no tenant, and is protected"
        elif not forced:
            faults[table] = "is neither listed as of no tenant nor under forced row-level security"
        elif len(policies) != 1 or policies[0][0] != "ALL":
            faults[table] = "has not exactly one policy for everything: permissive ones add up"
        elif any("current_setting('saltern.tenant'::text, true)" not in rule for rule in policies[0][1:]):
            faults[table] = "has a policy that does not ask for the tenant"
    return faults


def test_i2_every_table_is_protected_or_listed_with_its_reason(postgres: Any) -> None:
    with postgres.fresh_database(migrate) as urls, postgres.server.connect("superuser", urls.name) as connection:
        assert unprotected(connection) == {}
        tables = {row[0] for row in connection.execute(_TABLES).fetchall()}
        assert set(TABLES_OF_NO_TENANT) <= tables  # no line outlives its table
        assert all(TABLES_OF_NO_TENANT.values())
        # Nothing else reads tables with somebody else's rights.
        definers = "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND prosecdef"
        assert connection.execute(definers).fetchall() == []


def test_i2_the_catalogue_test_finds_what_is_planted(postgres: Any) -> None:
    planted = {
        "forgotten": "CREATE TABLE forgotten (tenant_id text)",
        "unlisted": "CREATE TABLE unlisted (id int)",
        "seen": "CREATE VIEW seen AS SELECT * FROM tenants",
        "unforced": "CREATE TABLE unforced (tenant_id text); ALTER TABLE unforced ENABLE ROW LEVEL SECURITY",
        "widened": """
            CREATE TABLE widened (tenant_id text);
            ALTER TABLE widened ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
            CREATE POLICY widened_all ON widened USING (true) WITH CHECK (true)
        """,
        "tenants": "CREATE POLICY also ON tenants FOR SELECT USING (display_name = 'public')",
        "nodes": "ALTER TABLE nodes ADD owner_tenant_id text",
    }
    with postgres.fresh_database(migrate) as urls, postgres.server.connect("superuser", urls.name) as connection:
        for statement in planted.values():
            connection.execute(statement)
        assert set(unprotected(connection)) == set(planted)


@pytest.fixture
def weakened(postgres: Any) -> Iterator[Any]:
    """A database, and the superuser's connection to weaken it with; roles made here start with ``weak``."""
    with postgres.fresh_database(migrate) as urls, postgres.server.connect("superuser", urls.name) as connection:
        yield urls, connection
        for (name,) in connection.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE 'weak%'").fetchall():
            connection.execute(f"DROP OWNED BY {name}")
            connection.execute(f"DROP ROLE {name}")


async def refusal(url: Any) -> FailedPreconditionError | None:
    database = connect(url)
    try:
        await require_row_security(database)
    except FailedPreconditionError as error:
        return error
    finally:
        await database.close()
    return None


async def test_the_embedded_servers_own_two_roles_are_right(weakened: Any) -> None:
    urls, _ = weakened

    assert await refusal(urls.app) is None
    owner = await refusal(urls.owner)
    assert owner is not None and owner.reason == "DATABASE_ROLE_TOO_STRONG"
    assert "owns the table" in owner.message and "operating.md" in owner.hint
    assert text_of(urls.owner).split(":")[2].split("@")[0] not in str(owner)


@pytest.mark.parametrize(
    ("role", "why"),
    [
        ("CREATE ROLE weak_a LOGIN SUPERUSER PASSWORD 'x'", "superuser"),
        ("CREATE ROLE weak_a LOGIN BYPASSRLS PASSWORD 'x'", "BYPASSRLS"),
        ("CREATE ROLE weak_b BYPASSRLS; CREATE ROLE weak_a LOGIN NOINHERIT PASSWORD 'x' IN ROLE weak_b", "weak_b"),
        ("CREATE ROLE weak_a LOGIN PASSWORD 'x' IN ROLE saltern_owner", "owns the table"),
    ],
)
async def test_i2_a_role_that_row_security_does_not_bind_is_refused(weakened: Any, role: str, why: str) -> None:
    urls, superuser = weakened
    superuser.execute(role)
    superuser.execute(f"GRANT CONNECT ON DATABASE {urls.name} TO weak_a")

    error = await refusal(urls.app.set(username="weak_a", password="x"))

    assert error is not None and error.reason == "DATABASE_ROLE_TOO_STRONG"
    assert why in error.message and "weak_a" in error.message and error.hint


async def test_i2_a_table_without_its_policies_is_refused(weakened: Any) -> None:
    urls, superuser = weakened

    superuser.execute("ALTER TABLE namespaces NO FORCE ROW LEVEL SECURITY")
    error = await refusal(urls.app)
    assert error is not None and (error.reason, error.metadata) == ("ROW_SECURITY_MISSING", {"table": "namespaces"})
    superuser.execute("ALTER TABLE namespaces FORCE ROW LEVEL SECURITY")
    superuser.execute("ALTER TABLE tenants DISABLE ROW LEVEL SECURITY")
    error = await refusal(urls.app)
    assert error is not None and error.metadata == {"table": "tenants"}


async def test_i10_sessions_that_start_with_a_tenant_are_refused(weakened: Any) -> None:
    urls, superuser = weakened

    superuser.execute(f"ALTER ROLE saltern_app IN DATABASE {urls.name} SET saltern.tenant = '*'")
    error = await refusal(urls.app)

    assert error is not None and error.reason == "DATABASE_ROLE_PRESET" and "RESET" in error.hint


def test_migrations_as_the_services_own_role_change_nothing_and_say_what_to_do(postgres: Any) -> None:
    with postgres.fresh_database() as urls:
        for found in ("none", "0001"):
            with pytest.raises(FailedPreconditionError) as caught:
                migrations.upgrade(urls.app)
            assert caught.value.reason == "MIGRATION_ROLE_REQUIRED"
            assert f"revision {found}" in caught.value.message
            migrations.upgrade(urls.owner, "0001")
        migrations.upgrade(urls.owner)
        migrations.upgrade(urls.app)  # nothing to do


def test_i10_scopes_over_every_tenant_are_opened_for_listed_tasks_each_in_one_module() -> None:
    modules: dict[ServiceTask, set[str]] = {}
    root = Path(controlplane.__file__ or "").parent.parent
    for package in (controlplane, dataplane):
        for path in Path(package.__file__ or "").parent.rglob("*.py"):
            name = path.relative_to(root).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                    continue
                # Only a caller's own platform role makes a PlatformScope.
                assert node.func.id != "PlatformScope" or name == "controlplane/db/row_security.py", name
                if node.func.id == "ServiceScope":
                    (task,) = node.args
                    assert isinstance(task, ast.Attribute), f"{name} hides which task it is"
                    modules.setdefault(ServiceTask[task.attr], set()).add(name)

    assert set(modules) == set(ServiceTask)
    assert all(len(names) == 1 for names in modules.values()), modules
