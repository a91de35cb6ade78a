"""What the service's own database role can reach with each scope, tried with statements that no service would make.

Everything here goes over a plain psycopg connection as that role: nothing but PostgreSQL stands in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
import pytest
from psycopg import errors, sql
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from controlplane.caller import Caller, calling_as
from controlplane.db import Database, PlatformScope, ServiceScope, ServiceTask, TenantScope, connect, models
from saltern.names import TenantId
from tenants.roles import Role
from tests.support.control import migrate
from tests.support.two_tenants import FILLED, LOOKUPS, OTHER, OWN, add_two_tenants, uid_of

Connection: TypeAlias = psycopg.Connection[Any]
#: Tables whose tenant is not in a column ``tenant_id``: SQL that gives it.
OWNERS = {"tenants": "id", "audit_events": "chain", "request_log": "split_part(actor, '/', 2)"}
READ_ONLY = {"audit_events", "usage_records"}  # no UPDATE is granted on them
TABLES = sorted(FILLED)


@pytest.fixture
async def urls(postgres: Any) -> AsyncIterator[Any]:
    with postgres.fresh_database(migrate) as fresh:
        database = connect(fresh.app)
        try:
            await add_two_tenants(database)
        finally:
            await database.close()
        yield fresh


@contextmanager
def scoped(urls: Any, tenant: str | None) -> Iterator[Connection]:
    """A transaction of the service's role with ``tenant`` set, or nothing; rolled back at the end."""
    conninfo = urls.app.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(conninfo) as connection:
        if tenant is not None:
            connection.execute("SELECT set_config('saltern.tenant', %s, true)", [tenant])
        yield connection
        connection.rollback()


def owner_of(table: str) -> str:
    return OWNERS.get(table, "tenant_id")


def owners_in(connection: Connection, table: str) -> set[str]:
    return {row[0] for row in connection.execute(f"SELECT {owner_of(table)} FROM {table}").fetchall()}


def refusal(connection: Connection, statement: str) -> psycopg.Error:
    """The error of a statement; the transaction goes on as if it had not been sent."""
    with pytest.raises(psycopg.Error) as caught, connection.transaction():
        connection.execute(statement)
    return caught.value


def copy_of(connection: Connection, table: str, tenant: str, other: str) -> None:
    """Insert a row of ``other`` that is like the one of ``tenant``, with all that must be unique made anew."""
    columns = [row.name for row in connection.execute(f"SELECT * FROM {table} LIMIT 0").description or ()]
    changed = {
        "uid": "gen_random_uuid()",
        "request_id": "gen_random_uuid()",
        "lookup": "substr(md5(random()::text), 1, 16)",
        "actor": f"'tenants/{other}/apiKeys/ci'",
        owner_of(table): f"'{other}'",
    }
    values = ", ".join(changed.get(column, f'"{column}"') for column in columns)
    names = ", ".join(f'"{column}"' for column in columns)
    connection.execute(
        f"INSERT INTO {table} ({names}) SELECT {values} FROM {table} WHERE {owner_of(table)} = '{tenant}'"
    )


@pytest.mark.parametrize("unset", [None, ""])
def test_i10_without_a_scope_there_is_no_row_and_none_can_be_made(urls: Any, unset: str | None) -> None:
    with scoped(urls, unset) as connection:
        for table in TABLES:
            assert connection.execute(f"SELECT * FROM {table}").fetchall() == [], table
            if table not in READ_ONLY:
                assert connection.execute(f"DELETE FROM {table}").rowcount == 0, table
                owner = "actor" if table == "request_log" else owner_of(table)
                assert connection.execute(f"UPDATE {table} SET {owner} = {owner}").rowcount == 0, table
        insert = "INSERT INTO salt_policies VALUES ('acme', 'tenant', 2, now(), 1) ON CONFLICT DO NOTHING"
        assert isinstance(refusal(connection, insert), errors.InsufficientPrivilege)
        for table in TABLES:
            assert isinstance(refusal(connection, f"TRUNCATE {table}"), errors.InsufficientPrivilege)


async def test_i2_a_tenants_scope_sees_its_own_rows_in_every_table_and_no_others(urls: Any) -> None:
    with scoped(urls, OWN) as connection:
        for table in TABLES:
            assert owners_in(connection, table) == {OWN}, table
        # The platform's own keys and requests are nobody's neighbour either.
        assert connection.execute("SELECT id FROM api_keys WHERE tenant_id IS NULL").fetchall() == []
    with scoped(urls, "*") as connection:
        assert {len(owners_in(connection, table) - {None}) for table in TABLES} == {2}


def test_i2_no_statement_reads_a_neighbours_row(urls: Any) -> None:
    secret = f"secret of {OTHER}"
    queries = [
        "SELECT * FROM tenants WHERE id = 'other'",
        "SELECT * FROM tenants WHERE id <> 'acme' OR true",
        "SELECT * FROM tenants WHERE id = 'other' FOR UPDATE",
        "SELECT n.*, t.display_name FROM namespaces n RIGHT JOIN tenants t ON true WHERE t.id > 'acme'",
        "SELECT * FROM tenants t WHERE EXISTS (SELECT FROM namespaces n WHERE n.tenant_id <> t.id)",
        "SELECT (SELECT display_name FROM tenants WHERE id = 'other') WHERE false OR NOT EXISTS (SELECT FROM tenants)",
        "WITH x AS MATERIALIZED (SELECT * FROM tenants) SELECT * FROM x WHERE id = 'other'",
        "SELECT * FROM tenants UNION ALL SELECT * FROM tenants ORDER BY id DESC",
        "TABLE tenants",
        "SELECT max(display_name) FROM tenants",
        "SELECT string_agg(t::text, '|') FROM tenants t",
        "UPDATE tenants SET display_name = 'x' WHERE id = 'other' RETURNING *",
        "UPDATE namespaces n SET block_tokens = 17 FROM tenants t WHERE t.id = 'other' RETURNING t.*",
        "DELETE FROM tenants WHERE id = 'other' RETURNING *",
        "DELETE FROM namespaces USING tenants WHERE tenants.id = 'other' RETURNING tenants.*",
        "MERGE INTO tenants USING (SELECT 'other' AS o) x ON id = x.o WHEN MATCHED THEN DELETE",
        "SELECT most_common_vals::text FROM pg_stats WHERE tablename = 'tenants'",
        "SELECT * FROM request_log WHERE actor LIKE 'tenants/other/%'",
        "SELECT * FROM audit_events WHERE chain IN ('other', 'platform')",
    ]
    with scoped(urls, OWN) as connection:
        for query in queries:
            cursor = connection.execute(query)
            rows = cursor.fetchall() if cursor.description else []
            assert OTHER not in repr(rows) and secret not in repr(rows), query
            assert cursor.description or cursor.rowcount == 0, query
        with connection.cursor() as cursor, cursor.copy("COPY tenants TO STDOUT") as copied:
            assert secret.encode() not in b"".join(bytes(part) for part in copied)
        with connection.cursor() as cursor, cursor.copy("COPY (TABLE namespaces) TO STDOUT") as copied:
            assert OTHER.encode() not in b"".join(bytes(part) for part in copied)


def test_i2_a_condition_that_fails_on_a_neighbours_row_does_not_tell_of_it(urls: Any) -> None:
    probe = "SELECT * FROM {0} WHERE 1 / (CASE WHEN {1} = 'other' THEN 0 ELSE 1 END) = 1"
    with scoped(urls, "*") as connection:
        error = refusal(connection, probe.format("tenants", "id"))
        assert isinstance(error, errors.DivisionByZero)  # the probe works where the row is visible
    with scoped(urls, OWN) as connection:
        for table in TABLES:
            assert len(connection.execute(probe.format(table, owner_of(table))).fetchall()) == 1, table


def test_i2_no_statement_writes_a_neighbours_row(urls: Any) -> None:
    with scoped(urls, OWN) as connection:
        for table in TABLES:
            with pytest.raises(errors.InsufficientPrivilege, match="row-level security"), connection.transaction():
                copy_of(connection, table, OWN, OTHER)
            if table in READ_ONLY:
                continue
            assert connection.execute(f"DELETE FROM {table} WHERE {owner_of(table)} = 'other'").rowcount == 0
            column, moved = ("actor", "tenants/other/apiKeys/x") if table == "request_log" else (owner_of(table), OTHER)
            if table == "tenants":
                connection.execute("DELETE FROM namespaces")  # what hangs off it would refuse first
            error = refusal(connection, f"UPDATE {table} SET {column} = '{moved}'")
            assert isinstance(error, errors.InsufficientPrivilege), table
        for statement in (
            "INSERT INTO salt_policies VALUES ('other', 'tenant', 9, now(), 1) ON CONFLICT DO NOTHING",
            "INSERT INTO salt_policies VALUES ('other', 'tenant', 9, now(), 1)"
            " ON CONFLICT (tenant_id) DO UPDATE SET epoch = 9 RETURNING epoch",
            "INSERT INTO salt_policies SELECT 'other', scope, epoch, update_time, revision FROM salt_policies",
            "MERGE INTO salt_policies USING (SELECT 'other' AS o) x ON tenant_id = x.o"
            " WHEN NOT MATCHED THEN INSERT VALUES (x.o, 'tenant', 9, now(), 1)",
        ):
            assert isinstance(refusal(connection, statement), errors.InsufficientPrivilege), statement
        with pytest.raises(errors.FeatureNotSupported), connection.transaction(), connection.cursor() as cursor:
            with cursor.copy("COPY salt_policies FROM STDIN") as copied:
                copied.write(b"other\ttenant\t9\t2026-01-01\t1\n")
        # A whole tenant, with all that cascades from it, is its own alone.
        assert connection.execute("DELETE FROM tenants").rowcount == 1
        connection.commit()
    with scoped(urls, OTHER) as connection:
        assert all(owners_in(connection, table) == {OTHER} for table in TABLES)
        assert connection.execute("SELECT epoch FROM salt_policies").fetchall() == [(1,)]


def test_i2_the_same_is_heard_of_a_neighbour_that_exists_and_of_nobody(urls: Any) -> None:
    probes = [
        "INSERT INTO tenants SELECT '{0}', gen_random_uuid(), '', state, now(), '', 1, now(), now(), 1 FROM tenants",
        "INSERT INTO salt_policies VALUES ('{0}', 'tenant', 1, now(), 1)",
        "INSERT INTO node_tier_usage VALUES ('node-1', '{0}', 'dram', 1, 1)",
        "UPDATE salt_policies SET tenant_id = '{0}'",
        "UPDATE audit_events SET chain = '{0}'",
    ]
    with scoped(urls, OWN) as connection:
        for probe in probes:
            heard = {repr(refusal(connection, probe.format(name)).diag.message_primary) for name in (OTHER, "nobody")}
            assert len(heard) == 1, probe


_UNIQUE_WITHOUT_TENANT = """
    SELECT c.relname, array_agg(a.attname::text ORDER BY a.attname)
    FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey)
    WHERE i.indisunique AND c.relrowsecurity AND c.relnamespace = 'public'::regnamespace
    GROUP BY c.relname, i.indexrelid
    HAVING NOT array_agg(a.attname::text) && ARRAY['tenant_id', 'chain', 'actor']
"""
#: What a unique violation can tell of another tenant is whether somebody has drawn the same random number; except for
#: the id of a tenant itself, which its policy refuses before the index is asked.
_RANDOM_COLUMNS = {"uid", "lookup", "previous_lookup", "cookie_sha256"}


def test_i2_what_must_be_unique_across_tenants_is_random(urls: Any, postgres: Any) -> None:
    with postgres.server.connect("superuser", urls.name) as connection:
        indexes = connection.execute(_UNIQUE_WITHOUT_TENANT).fetchall()

    assert {(table, *columns) for table, columns in indexes if not set(columns) <= _RANDOM_COLUMNS} <= {
        ("tenants", "id"),
        ("policy_changes", "version"),  # one for all tenants, and known to all
    }
    # It stays a way to ask for a number that one knows already: 64 random bits of a lookup, 122 of a uid.
    with scoped(urls, OWN) as connection:
        taken = f"UPDATE api_keys SET lookup = '{LOOKUPS[OTHER]}'"
        assert isinstance(refusal(connection, taken), errors.UniqueViolation)
        taken = f"UPDATE namespaces SET uid = '{uid_of(OTHER, 'namespace')}'"
        assert isinstance(refusal(connection, taken), errors.UniqueViolation)


def test_i10_a_scope_ends_with_its_transaction(urls: Any) -> None:
    with scoped(urls, "*") as connection:
        assert len(owners_in(connection, "tenants")) == 2
        for end in (connection.commit, connection.rollback):
            end()
            assert owners_in(connection, "tenants") == set()
            connection.execute("SELECT set_config('saltern.tenant', '*', true)")


def test_i2_a_name_that_looks_like_a_pattern_or_like_sql_is_only_a_name(urls: Any) -> None:
    for name in ("%", "_" * 4, "acme' OR 'a' = 'a", "ACME", "acme ", "acme\n", "{acme,other}", "platform/../other"):
        with scoped(urls, name) as connection:
            for table in TABLES:
                assert owners_in(connection, table) == set(), (name, table)


def test_i12_the_service_cannot_take_the_wall_down(urls: Any) -> None:
    with scoped(urls, OWN) as connection:
        for statement in (
            "ALTER TABLE tenants DISABLE ROW LEVEL SECURITY",
            "ALTER TABLE tenants NO FORCE ROW LEVEL SECURITY",
            "DROP POLICY tenants_of_tenant ON tenants",
            "CREATE POLICY more ON tenants USING (true)",
            "CREATE TABLE taken AS TABLE tenants",
            "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "CREATE TEMPORARY TABLE t (id int)",
            "SET ROLE saltern_owner",
            "SET SESSION AUTHORIZATION postgres",
            "ALTER ROLE saltern_app BYPASSRLS",
        ):
            assert isinstance(refusal(connection, statement), errors.InsufficientPrivilege), statement
        # It may ask not to be filtered; then it is refused instead.
        with connection.transaction(force_rollback=True):
            connection.execute("SET LOCAL row_security = off")
            assert isinstance(refusal(connection, "TABLE tenants"), errors.InsufficientPrivilege)


@pytest.fixture
async def database(urls: Any) -> AsyncIterator[Database]:
    opened = connect(urls.app, pool_connections=2)
    yield opened
    await opened.close()


async def tenants_seen(database: Database, *scope: Any) -> set[str]:
    async with database.transaction(*scope) as session:
        return set(await session.scalars(select(models.Tenant.id)))


async def test_i2_a_transaction_has_the_scope_of_its_caller_and_of_nobody_without_one(database: Database) -> None:
    callers = {
        Caller("tenants/acme/apiKeys/ci", TenantId(OWN), Role.TENANT_ADMIN): {OWN},
        Caller("tenants/other/apiKeys/ci", TenantId(OTHER), Role.READER): {OTHER},
        Caller("tenants/new/apiKeys/ci", TenantId("new"), Role.TENANT_ADMIN): set(),
        Caller("apiKeys/admin", None, Role.PLATFORM_ADMIN): {OWN, OTHER},
    }

    async def seen_by(caller: Caller) -> set[str]:
        with calling_as(caller):
            return await tenants_seen(database)

    assert await tenants_seen(database) == set()
    # Over and over on two connections, so that whatever a transaction left behind would show in the next.
    for _ in range(3):
        found = await asyncio.gather(*map(seen_by, callers), tenants_seen(database))
        assert found == [*callers.values(), set()]


async def test_a_scope_that_is_said_counts_in_savepoints_too(database: Database) -> None:
    assert await tenants_seen(database, TenantScope(TenantId(OTHER))) == {OTHER}
    assert await tenants_seen(database, PlatformScope()) == {OWN, OTHER}
    assert await tenants_seen(database, ServiceScope(ServiceTask.CREDENTIAL_LOOKUP)) == {OWN, OTHER}
    async with database.transaction(TenantScope(TenantId(OWN))) as session:
        assert list(await session.scalars(select(models.Tenant.id))) == [OWN]
        async with session.begin_nested():
            assert list(await session.scalars(select(models.Tenant.id))) == [OWN]
        with pytest.raises(DBAPIError, match="row-level security"):
            async with session.begin_nested():
                await session.execute(text("INSERT INTO salt_policies VALUES ('other', 'tenant', 1, now(), 1)"))


def test_i2_the_policies_cost_no_index(urls: Any) -> None:
    """The setting is read once a statement, and what a query asks for by key is still found by its index."""
    with scoped(urls, OWN) as connection:
        connection.execute("SET LOCAL enable_seqscan = off")
        for query in (
            "SELECT * FROM namespaces WHERE tenant_id = 'acme' AND id = 'chat'",
            "SELECT * FROM api_keys WHERE lookup = 'aaaaaaaaaaaaaaaa'",
            "SELECT * FROM tenants WHERE id > '' ORDER BY id LIMIT 100",
            "SELECT * FROM audit_events WHERE chain = 'acme' AND sequence < 9 ORDER BY sequence DESC LIMIT 1",
            "SELECT * FROM request_log WHERE actor = 'a' AND method = 'm' AND request_id = gen_random_uuid()",
        ):
            statement = sql.SQL("EXPLAIN " + query)  # type: ignore[arg-type]  # the queries above
            plan = "\n".join(row[0] for row in connection.execute(statement).fetchall())
            assert ("InitPlan" in plan and "Index Cond" in plan) or "Index Scan" in plan, plan
            assert "Seq Scan" not in plan, plan
