"""A private server: what it makes, what it keeps, whom it refuses."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from pathlib import Path

import psycopg
import pytest
import sqlalchemy

from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from controlplane.postgres.roles import ROLE_NAMES, read_passwords
from saltern.errors import FailedPreconditionError, UnavailableError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes to another user")


def test_restart_keeps_data_and_passwords(reachable_tmp_path: Path) -> None:
    server = EmbeddedPostgres(PostgresConfig(reachable_tmp_path / "postgres"))
    with server:
        first_url = server.url("owner")
        with server.connect("owner") as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS number")
    with server:
        assert server.url("owner") == first_url
        with server.connect("owner") as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (42,)
    assert not (reachable_tmp_path / "postgres" / "run").exists()
    assert not (reachable_tmp_path / "postgres" / "cluster" / "postmaster.pid").exists()


def test_url_works_with_sqlalchemy_and_masks_the_password(postgres) -> None:
    url = postgres.server.url("app")
    password = url.password
    assert password not in str(url) and password not in repr(url)
    engine = sqlalchemy.create_engine(url.render_as_string(hide_password=False))
    with engine.connect() as connection:
        assert connection.scalar(sqlalchemy.text("SELECT current_user || '@' || current_database()")) == (
            "saltern_app@saltern"
        )
    engine.dispose()


def test_server_outlives_the_thread_that_started_it(used_data_dir: Path) -> None:
    """The kernel sends the parent-death signal when the forking thread ends; the caller's may be a short one."""
    server = EmbeddedPostgres(PostgresConfig(used_data_dir))
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    while Path(f"/proc/self/task/{starter.native_id}").exists():  # join() returns a moment before the kernel's exit
        os.sched_yield()
    try:
        with server.connect("app") as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        server.stop()
    assert "fast shutdown" in (used_data_dir / "server.log").read_text()


def test_stop_is_repeatable_and_start_is_not(used_data_dir: Path) -> None:
    server = EmbeddedPostgres(PostgresConfig(used_data_dir))
    server.stop()
    with server:
        with pytest.raises(FailedPreconditionError, match="running already"):
            server.start()
    server.stop()
    with pytest.raises(FailedPreconditionError, match="not running"):
        server.url("app")
    with pytest.raises(FailedPreconditionError, match="not running"):
        with server.connect("app"):
            pass


def test_there_is_no_tcp_listener(postgres) -> None:
    with postgres.server.connect("superuser", "postgres") as connection:
        (pid_file,) = connection.execute("SELECT pg_read_file('postmaster.pid')").fetchone()
    pid = pid_file.splitlines()[0]
    sockets = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    assert any(name.startswith("socket:") for name in sockets)  # its unix socket: the check can see sockets
    assert not sockets & {f"socket:[{row[9]}]" for row in rows}


@pytest.mark.parametrize("password", ["wrong", None])
@pytest.mark.parametrize("user", list(ROLE_NAMES.values()))
def test_wrong_or_no_password_is_refused(postgres, user: str, password: str | None) -> None:
    host = postgres.server.url("app").query["host"]
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(host=host, dbname="saltern", user=user, password=password, passfile=os.devnull)


def test_i2_app_role_cannot_step_around_row_level_security(postgres) -> None:
    with postgres.server.connect("superuser", "postgres") as connection:
        flags = "rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolreplication, rolcanlogin"
        for name in ("saltern_app", "saltern_owner"):
            row = connection.execute(f"SELECT {flags} FROM pg_roles WHERE rolname = '{name}'").fetchone()
            assert row == (False, False, False, False, False, True)
        assert connection.execute(
            "SELECT count(*) FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.member WHERE rolname = 'saltern_app'"
        ).fetchone() == (0,)
    with postgres.server.connect("app") as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("CREATE TABLE mine (number int)")


def test_secrets_are_private_and_not_in_the_log(reachable_tmp_path: Path) -> None:
    data_dir = reachable_tmp_path / "postgres"
    with EmbeddedPostgres(PostgresConfig(data_dir)):
        run = (data_dir / "run").stat()
        assert stat.S_IMODE(run.st_mode) == 0o700
    assert stat.S_IMODE((data_dir / "passwords.json").stat().st_mode) == 0o600
    assert (data_dir / "passwords.json").stat().st_uid == os.geteuid()
    assert stat.S_IMODE((data_dir / "cluster").stat().st_mode) == 0o700
    passwords = read_passwords(data_dir / "passwords.json")
    assert len(set(passwords.values())) == len(ROLE_NAMES)
    log = (data_dir / "server.log").read_text()
    assert log and not any(password in log for password in passwords.values())


def test_fresh_databases_are_copies_of_the_prepared_one(postgres) -> None:
    prepared: list[str] = []

    def prepare(database) -> None:
        prepared.append(database.name)
        with postgres.server.connect("owner", database.name) as connection:
            connection.execute("CREATE TABLE made_by_migration (number int)")

    with postgres.fresh_database(prepare) as first, postgres.fresh_database(prepare) as second:
        assert first.name != second.name and len(prepared) == 1
        with postgres.server.connect("owner", first.name) as connection:
            connection.execute("INSERT INTO made_by_migration VALUES (1)")
        with postgres.server.connect("owner", second.name) as connection:
            assert connection.execute("SELECT count(*) FROM made_by_migration").fetchone() == (0,)


def test_long_data_dir_gets_a_short_socket_folder(reachable_tmp_path: Path) -> None:
    data_dir = reachable_tmp_path / ("d" * 80) / "with, comma"
    server = EmbeddedPostgres(PostgresConfig(data_dir))
    with server:
        socket_dir = Path(server.url("app").query["host"])
        assert socket_dir.parent == Path(tempfile.gettempdir())
        assert (data_dir / "run").readlink() == socket_dir
    assert not socket_dir.exists()
    assert not (data_dir / "run").is_symlink()


@needs_root
def test_unreachable_data_dir_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for folder in (tmp_path, *tmp_path.parents):  # so that `closed` is the first barrier, wherever pytest works
        if folder.owner() == "root" and folder.stat().st_mode & 0o777 == 0o700:
            barrier = folder
    with pytest.raises(FailedPreconditionError) as caught:
        EmbeddedPostgres(PostgresConfig(closed / "postgres")).start()
    assert caught.value.reason == "POSTGRES_DATA_DIR_UNREACHABLE"
    assert f"{barrier} (mode 0700, owner root)" in caught.value.message
    assert "--data-dir" in caught.value.hint


def test_other_versions_cluster_is_refused(used_data_dir: Path) -> None:
    server = EmbeddedPostgres(PostgresConfig(used_data_dir))
    (used_data_dir / "cluster" / "PG_VERSION").write_text("9\n")
    with pytest.raises(FailedPreconditionError, match="made by PostgreSQL 9") as caught:
        server.start()
    assert caught.value.reason == "POSTGRES_VERSION_MISMATCH"


def test_early_exit_quotes_the_log(used_data_dir: Path) -> None:
    server = EmbeddedPostgres(PostgresConfig(used_data_dir))
    with (used_data_dir / "cluster" / "postgresql.conf").open("a") as file:
        file.write("no_such_setting = 1\n")
    with pytest.raises(UnavailableError, match="no_such_setting") as caught:
        server.start()
    assert caught.value.reason == "POSTGRES_START_FAILED"
    assert "server.log" in caught.value.hint
    assert "ready to accept connections" not in caught.value.message  # that was the start before


@pytest.mark.parametrize("content", [None, "", "{}", "[]", "null"])
def test_missing_or_damaged_passwords_are_named(reachable_tmp_path: Path, content: str | None) -> None:
    data_dir = reachable_tmp_path / "postgres"
    (data_dir / "cluster").mkdir(parents=True)
    if content is not None:
        (data_dir / "passwords.json").write_text(content)
    with pytest.raises(FailedPreconditionError, match=r"passwords\.json") as caught:
        read_passwords(data_dir / "passwords.json")
    assert caught.value.reason == "POSTGRES_PASSWORDS_MISSING"


def test_passwords_of_another_database_are_refused(used_data_dir: Path) -> None:
    server = EmbeddedPostgres(PostgresConfig(used_data_dir))
    passwords = used_data_dir / "passwords.json"
    secret = read_passwords(passwords)["superuser"]
    passwords.write_text(passwords.read_text().replace(secret, "x" * len(secret)))
    with pytest.raises(FailedPreconditionError, match="does not accept the password"):
        server.start()


def test_data_dir_that_is_a_file_is_named(reachable_tmp_path: Path) -> None:
    (reachable_tmp_path / "file").write_text("")
    with pytest.raises(FailedPreconditionError, match="cannot use the data directory"):
        EmbeddedPostgres(PostgresConfig(reachable_tmp_path / "file")).start()
