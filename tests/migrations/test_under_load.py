"""Migrations on a database in use: they give up cleanly, can be repeated, and lose no row, forward or backward."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import psycopg.sql
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import URL

import migrations
from controlplane.db.row_security import EVERY_TENANT, TENANT_SETTING
from migrations import SchemaFit
from migrations import run as migration_run
from saltern.admin.v1 import credentials_pb2
from saltern.errors import FailedPreconditionError, UnavailableError
from tests.support.backups import libpq_url
from tests.support.control import control_plane, migrate, text_of
from tests.support.scopes import connect_to_all
from tests.support.two_tenants import add_two_tenants

SCRIPTS = list(ScriptDirectory(str(Path(migrations.__file__).parent)).walk_revisions())
#: Oldest first.
REVISIONS = [script.revision for script in reversed(SCRIPTS)]
NEWER = "9999"


@contextmanager
def session(url: URL) -> Iterator[psycopg.Connection[Any]]:
    """A connection of its own that means every tenant's rows."""
    with psycopg.connect(libpq_url(url), options=f"-c {TENANT_SETTING}={EVERY_TENANT}") as connection:
        yield connection


def rows(url: URL) -> dict[str, int]:
    """How many rows each table has."""
    with session(url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        return {
            table: connection.execute(
                psycopg.sql.SQL("SELECT count(*) FROM {}").format(psycopg.sql.Identifier(table))
            ).fetchone()[0]  # type: ignore[index]  # a count is one row
            for (table,) in tables
        }


def schema(url: URL) -> list[tuple[Any, ...]]:
    """Columns, constraints, indexes and policies, to be compared."""
    with session(url) as connection:
        return connection.execute(
            "SELECT 'column', table_name || '.' || column_name,"
            " data_type || coalesce(column_default, '') || is_nullable"
            " FROM information_schema.columns WHERE table_schema = 'public'"
            " UNION ALL SELECT 'constraint', conrelid::regclass::text || conname, pg_get_constraintdef(oid)"
            " FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype <> 'n'"
            " UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
            " UNION ALL SELECT 'policy', tablename || policyname, coalesce(qual, '') FROM pg_policies"
            " UNION ALL SELECT 'comment', 'alembic_version', obj_description('alembic_version'::regclass) ORDER BY 1, 2"
        ).fetchall()


#: A row in every table of the first revision, which later ones must carry along; that revision never changes.
_WRAPPED = f"decode('01{'ab' * 8}{'cd' * 60}', 'hex')"
FIRST_ROWS = (
    f"INSERT INTO tenants VALUES ('acme', gen_random_uuid(), '', 'active', now(), {_WRAPPED}, 1, now(), now(), 1)",
    "INSERT INTO namespaces VALUES ('acme', 'chat', gen_random_uuid(), 'model', 16, 4096, now())",
    "INSERT INTO tier_quotas VALUES ('acme', 'dram', 1, 2, 100, now(), 1)",
    "INSERT INTO salt_policies VALUES ('acme', 'tenant', 1, now(), 1)",
    "INSERT INTO api_keys VALUES (gen_random_uuid(), 'acme', 'ci', 'aaaaaaaaaaaaaaaa', sha256('a'), 'writer', '', '',"
    " now(), NULL, NULL)",
    "INSERT INTO nodes VALUES ('n', gen_random_uuid(), 1, 'w', '', '', '', 1, 0, '', 0, now(), now())",
    "INSERT INTO node_usage VALUES ('n', 'acme', 1, 2, 3, 4, 5, 6, 7, 8, now())",
    "INSERT INTO node_tier_usage VALUES ('n', 'acme', 'dram', 1, 1)",
    "INSERT INTO request_log VALUES ('a', 'm', gen_random_uuid(), sha256('a'), NULL, now())",
    f"INSERT INTO signing_keys VALUES ('kid', {_WRAPPED}, 'x', now(), NULL)",
    "INSERT INTO bootstrap VALUES (1, sha256('a'), now(), NULL)",
    "INSERT INTO audit_events VALUES ('acme', 1, now(), '', '', '', 'success', '', '', NULL, NULL, sha256('a'),"
    " sha256('b'))",
)


@pytest.mark.parametrize(("below", "revision"), list(pairwise(REVISIONS)), ids=str)
def test_each_revision_goes_back_and_comes_again_with_rows_in_every_table(
    postgres: Any, below: str, revision: str
) -> None:
    with postgres.fresh_database() as database:
        migrations.upgrade(database.owner, "0001")
        with session(database.owner) as connection:
            for statement in FIRST_ROWS:
                connection.execute(statement)
        held = rows(database.owner)
        assert all(count >= 1 for count in held.values()), held
        migrations.upgrade(database.owner, revision)
        there = schema(database.owner)
        migrations.downgrade(database.owner, below)
        before = schema(database.owner)
        migrations.upgrade(database.owner, revision)
        assert schema(database.owner) == there
        assert rows(database.owner).items() >= held.items()
        migrations.downgrade(database.owner, below)
        assert schema(database.owner) == before
        assert rows(database.owner).items() >= held.items()


async def test_with_rows_in_every_table_a_way_back_keeps_them_or_is_refused(postgres: Any) -> None:
    """From the newest revision down as far as it goes, and up again after every step: no row goes without a word."""
    with postgres.fresh_database(migrate) as database:
        app = connect_to_all(text_of(database.app))
        try:
            await add_two_tenants(app)
        finally:
            await app.close()
        full, at = rows(database.owner), len(REVISIONS) - 1
        refused = ""
        while at > 0 and not refused:
            try:
                migrations.downgrade(database.owner, REVISIONS[at - 1])
            except FailedPreconditionError as error:
                refused = error.reason
                assert migrations.current_revision(database.owner) == REVISIONS[at]
            else:
                at -= 1
            migrations.upgrade(database.owner)
            kept = rows(database.owner)
            # What a step drops and makes anew may be empty where nodes report it again, as the revision says.
            assert {table: kept[table] for table in KEPT} == {table: full[table] for table in KEPT}
            if not refused:
                migrations.downgrade(database.owner, REVISIONS[at])
        assert refused == "SCHEMA_IN_USE"


#: What nobody reports again.
KEPT = ("tenants", "namespaces", "tier_quotas", "salt_policies", "api_keys", "token_revocations", "audit_events")


def test_a_migration_behind_a_long_transaction_gives_up_and_can_be_repeated(
    postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_run, "_LOCK_TIMEOUT_MS", 200)
    with postgres.fresh_database() as database:
        migrations.upgrade(database.owner, "0005")
        before = schema(database.owner)
        with session(database.owner) as connection:
            connection.execute("SELECT count(*) FROM nodes")  # an open transaction that has read a table
            with pytest.raises(UnavailableError) as caught:
                migrations.upgrade(database.owner)
            assert caught.value.reason == "MIGRATION_LOCKED"
            assert "pg_stat_activity" in caught.value.hint
            # Who comes after it does not wait: what the migration wanted it wants no more.
            connection.execute("SELECT count(*) FROM tenants")
        assert schema(database.owner) == before
        migrations.upgrade(database.owner)
        assert migrations.current_revision(database.owner) == migrations.head_revision()


def test_a_migration_that_takes_too_long_gives_up_and_can_be_repeated(
    postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "CREATE FUNCTION slow() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(30); END'"
    with postgres.fresh_database() as database:
        migrations.upgrade(database.owner, "0005")
        before = schema(database.owner)
        with postgres.server.connect("superuser", database.name) as superuser:
            superuser.execute(slow)
            superuser.execute("CREATE EVENT TRIGGER slow ON ddl_command_start EXECUTE FUNCTION slow()")
        with monkeypatch.context() as patch:
            patch.setattr(migration_run, "_STATEMENT_TIMEOUT_MS", 200)
            with pytest.raises(UnavailableError) as caught:
                migrations.upgrade(database.owner)
        assert caught.value.reason == "MIGRATION_TOO_SLOW"
        with postgres.server.connect("superuser", database.name) as superuser:
            superuser.execute("DROP EVENT TRIGGER slow")
            superuser.execute("DROP FUNCTION slow")
        assert schema(database.owner) == before
        migrations.upgrade(database.owner)


async def test_additive_migrations_back_and_forth_while_writers_and_exchanges_go_on(
    postgres: Any, tmp_path: Path
) -> None:
    """The newest revision, if additive, is taken away and put back under a control plane that is at work.

    Calls may be refused while it is away: what counts is that none is half done, and that all is well afterwards.
    """
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path) as control:
            await control.redeem()
            await control.add_tenant("acme", "chat", limit_bytes=2**20)
            writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
            acknowledged: list[int] = []
            stop = asyncio.Event()

            async def write() -> None:
                limit_bytes = 2**20
                while not stop.is_set():
                    limit_bytes += 1
                    try:
                        await control.set_quota("acme", limit_bytes=limit_bytes)
                        acknowledged.append(limit_bytes)
                    except Exception as error:  # a call that meets the migration; the next one is another
                        assert "code" in dir(error), error

            async def exchange() -> None:
                while not stop.is_set():
                    try:
                        await control.exchange(writer, "chat")
                    except Exception as error:
                        assert "code" in dir(error), error

            work = [asyncio.create_task(write()), asyncio.create_task(exchange())]
            done = 0
            while done < 3:
                try:
                    await asyncio.to_thread(migrations.downgrade, database.owner, REVISIONS[-2])
                    await asyncio.to_thread(migrations.upgrade, database.owner)
                    done += 1
                except UnavailableError as error:
                    assert error.reason == "MIGRATION_LOCKED"
                except FailedPreconditionError as error:
                    assert error.reason == "SCHEMA_IN_USE"  # this one has no way back any more
                    done += 1
            before = len(acknowledged)
            async with asyncio.timeout(30):
                while len(acknowledged) < before + 3:
                    await asyncio.sleep(0.01)
            stop.set()
            await asyncio.gather(*work)
            with session(database.owner) as connection:
                audited = {
                    int(number)
                    for (after,) in connection.execute("SELECT after::text FROM audit_events WHERE chain = 'acme'")
                    for number in re.findall(r"\d{7,}", after or "")
                }
                (limit_bytes,) = connection.execute(
                    "SELECT limit_bytes FROM tier_quotas WHERE tenant_id = 'acme' AND tier = 'dram'"
                ).fetchone()  # type: ignore[misc]  # the tenant has a quota
            assert set(acknowledged) <= audited
            assert limit_bytes >= acknowledged[-1]


def test_every_revision_says_whether_releases_of_before_go_on_beside_it() -> None:
    additive = {script.revision: migration_run.is_additive(script.doc, script.longdoc) for script in SCRIPTS}
    assert not additive["0001"] and not additive["0005"] and not additive["0009"]
    assert additive["0006"] and additive["0008"]
    for script in SCRIPTS[:-1]:
        text = f"{script.doc} {script.longdoc}"
        assert additive[script.revision] or re.search(r"Not beside|cannot go on|must be stopped", text), script.revision


def test_a_release_goes_on_beside_a_newer_schema_that_says_so_and_is_refused_beside_another(postgres: Any) -> None:
    with postgres.fresh_database(migrate) as database:
        with session(database.owner) as connection:
            connection.execute("UPDATE alembic_version SET version_num = %s", [NEWER])
            connection.execute("ALTER TABLE tenants ADD COLUMN of_a_later_release text")
            (comment,) = connection.execute("SELECT obj_description('alembic_version'::regclass)").fetchone()  # type: ignore[misc]
        assert migrations.schema_fit(NEWER, comment) is SchemaFit.NEWER
        for url in (database.owner, database.app):
            migrations.upgrade(url)  # nothing to do, and nothing done
        assert migrations.current_revision(database.owner) == NEWER

        with session(database.owner) as connection:
            connection.execute(f"COMMENT ON TABLE alembic_version IS '{migration_run._OLDEST_BESIDE}{NEWER}'")
        for act in (migrations.upgrade, migrations.downgrade):
            with pytest.raises(FailedPreconditionError) as caught:
                act(database.owner)
            assert caught.value.reason == "SCHEMA_TOO_NEW"
        assert migrations.current_revision(database.owner) == NEWER


async def test_a_control_plane_starts_and_serves_beside_a_newer_additive_schema(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as database:
        with session(database.owner) as connection:
            connection.execute("UPDATE alembic_version SET version_num = %s", [NEWER])
            connection.execute("ALTER TABLE tenants ADD COLUMN of_a_later_release text NOT NULL DEFAULT 'x'")
            connection.execute("CREATE TABLE of_a_later_release (id int)")
        async with control_plane(database, tmp_path) as control:
            await control.redeem()
            await control.add_tenant("acme", "chat", limit_bytes=2**20)
            writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
            assert (await control.exchange(writer, "chat")).salt_keys


def test_the_url_of_a_database_is_not_in_an_error(postgres: Any) -> None:
    with postgres.fresh_database() as database:
        wrong = database.owner.set(password="hunter2")
        with pytest.raises(UnavailableError) as caught:
            migrations.upgrade(wrong)
        assert "hunter2" not in f"{caught.value} {caught.value.hint}"
