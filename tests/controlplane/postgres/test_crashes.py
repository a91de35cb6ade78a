"""Killed launchers, orphaned servers, interrupted initdb, two stacks."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from controlplane.postgres.account import ServerAccount, choose_account
from controlplane.postgres.binaries import ServerBinaries, find_binaries
from controlplane.postgres.process import ProcessHandle
from saltern.errors import FailedPreconditionError, UnavailableError


@pytest.fixture
def binaries(reachable_tmp_path: Path) -> ServerBinaries:
    return find_binaries(None, choose_account(reachable_tmp_path / "absent"), reachable_tmp_path)


def fake_bin_dir(folder: Path, binaries: ServerBinaries, initdb: str) -> Path:
    """The real server beside an initdb that does as told: the real one cannot be made to fail half-way on demand."""
    folder.mkdir()
    (folder / "postgres").symlink_to(binaries.postgres)
    (folder / "initdb").write_text(f"#!/bin/sh\n{initdb}\n")
    (folder / "initdb").chmod(0o755)
    return folder


def as_account(account: ServerAccount) -> dict[str, Any]:
    """Arguments of ``subprocess`` that run a program as the server's account."""
    return {} if account.is_self else {"user": account.uid, "group": account.gid, "extra_groups": []}


def test_kill_9_of_the_launcher_ends_the_server(used_data_dir: Path, launch, watch) -> None:
    launcher = launch(used_data_dir)
    launcher.wait_ready()
    gone = watch(used_data_dir)
    launcher.kill()
    assert gone()
    with EmbeddedPostgres(PostgresConfig(used_data_dir)) as server:
        with server.connect("app") as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_start_after_kill_9_of_everything_replays_the_log(used_data_dir: Path, launch, watch) -> None:
    launcher = launch(used_data_dir)
    launcher.wait_ready()
    gone = watch(used_data_dir)
    pid = int((used_data_dir / "cluster" / "postmaster.pid").read_text().splitlines()[0])
    with ProcessHandle(pid) as postmaster:
        postmaster.send(signal.SIGKILL)
    launcher.kill()
    assert gone()
    # As after a container's restart: the pid in the stale file now is another process's, of the same user.
    stale = used_data_dir / "cluster" / "postmaster.pid"
    account = choose_account(used_data_dir / "cluster")
    with ExitStack() as stack:
        stranger = stack.enter_context(subprocess.Popen(["sleep", "600"], **as_account(account)))
        stack.callback(stranger.kill)
        stale.write_text(stale.read_text().replace(str(pid), str(stranger.pid), 1))
        with EmbeddedPostgres(PostgresConfig(used_data_dir)) as server, server.connect("app") as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert stranger.poll() is None
    assert "was not properly shut down" in (used_data_dir / "server.log").read_text()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_orphaned_server_is_ended_before_start(
    used_data_dir: Path, reachable_tmp_path: Path, binaries, watch, stopped: bool
) -> None:
    """An orphan that the parent-death signal did not end: started by hand, or frozen and deaf to signals."""
    config = PostgresConfig(used_data_dir, stop_timeout_s=1 if stopped else 30)
    account = choose_account(used_data_dir / "cluster")
    socket_dir = reachable_tmp_path / "orphan"
    socket_dir.mkdir()
    os.chown(socket_dir, account.uid, account.gid)
    options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={socket_dir}"]
    orphan = subprocess.Popen(
        [binaries.postgres, "-D", used_data_dir / "cluster", *options],
        stderr=subprocess.PIPE,
        cwd="/",
        text=True,
        **as_account(account),
    )
    with orphan:
        assert orphan.stderr is not None
        while "ready to accept connections" not in orphan.stderr.readline():
            assert orphan.poll() is None
        gone = watch(used_data_dir)
        if stopped:
            orphan.send_signal(signal.SIGSTOP)
        server = EmbeddedPostgres(config)
        with server, server.connect("app") as connection:
            assert gone()
            assert connection.execute("SELECT 1").fetchone() == (1,)
        orphan.stderr.read()
    assert orphan.returncode == (-signal.SIGKILL if stopped else 0)


def test_second_launcher_is_refused_and_told_the_pid(used_data_dir: Path, launch) -> None:
    launcher = launch(used_data_dir)
    launcher.wait_ready()
    with pytest.raises(FailedPreconditionError, match=f"process {launcher.process.pid}") as caught:
        EmbeddedPostgres(PostgresConfig(used_data_dir)).start()
    assert caught.value.reason == "POSTGRES_DATA_DIR_LOCKED"
    # The refused one has not disturbed the other: it ends in order, and its folder is free again.
    _, _ = launcher.process.communicate("")
    assert launcher.process.returncode == 0
    with EmbeddedPostgres(PostgresConfig(used_data_dir)):
        pass


def test_two_stacks_side_by_side(reachable_tmp_path: Path) -> None:
    first = EmbeddedPostgres(PostgresConfig(reachable_tmp_path / "first"))
    second = EmbeddedPostgres(PostgresConfig(reachable_tmp_path / "second"))
    with first, second:
        assert first.url("app").password != second.url("app").password
        with first.connect("owner") as connection:
            connection.execute("CREATE TABLE only_in_first (number int)")
        second.stop()
        with first.connect("owner") as connection:
            assert connection.execute("SELECT count(*) FROM only_in_first").fetchone() == (0,)


def test_failed_initdb_leaves_no_half_cluster(reachable_tmp_path: Path, binaries) -> None:
    data_dir = reachable_tmp_path / "postgres"
    half = 'for word in "$@"; do case "$word" in --pgdata=*) mkdir "${word#--pgdata=}";; esac; done'
    bin_dir = fake_bin_dir(reachable_tmp_path / "bin", binaries, f"{half}\necho 'No space left on device'\nexit 1")
    with pytest.raises(UnavailableError, match="initdb could not make the database") as caught:
        EmbeddedPostgres(PostgresConfig(data_dir, bin_dir=bin_dir)).start()
    assert "the disk is full" in caught.value.hint
    assert not (data_dir / "cluster").exists()
    assert not list(data_dir.glob("initdb-*"))
    with EmbeddedPostgres(PostgresConfig(data_dir)):
        pass


def test_kill_9_during_initdb_leaves_no_half_cluster(reachable_tmp_path: Path, binaries, launch) -> None:
    data_dir = reachable_tmp_path / "postgres"
    fifo = reachable_tmp_path / "fifo"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    # Holds the fifo open until it is killed: its reader sees the end of file when initdb is gone.
    bin_dir = fake_bin_dir(reachable_tmp_path / "bin", binaries, f"exec >{fifo}\necho begun\nexec sleep 600")
    launcher = launch(data_dir, str(bin_dir))
    with fifo.open() as begun:
        assert begun.readline() == "begun\n"
        launcher.kill()
        assert begun.read() == ""  # the parent-death signal ended initdb too
    assert list(data_dir.glob("initdb-*")) and not (data_dir / "cluster").exists()
    with EmbeddedPostgres(PostgresConfig(data_dir)):
        assert not list(data_dir.glob("initdb-*"))


def test_kill_9_ends_the_server_of_a_launcher_that_was_started_in_the_background(
    reachable_tmp_path: Path, binaries, launch
) -> None:
    """A shell ignores SIGINT for what it runs in the background; the server must die of it all the same."""
    fifo = reachable_tmp_path / "fifo"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    bin_dir = fake_bin_dir(reachable_tmp_path / "bin", binaries, f"exec >{fifo}\necho begun\nexec sleep 600")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launcher = launch(reachable_tmp_path / "postgres", str(bin_dir))
    finally:
        signal.signal(signal.SIGINT, before)
    with fifo.open() as begun:
        assert begun.readline() == "begun\n"
        launcher.kill()
        assert begun.read() == ""
