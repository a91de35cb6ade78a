"""``saltern up`` as people run it: a process of its own, real children, real signals."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from saltern.admin.v1 import audit_pb2, quotas_pb2, tenants_pb2, usage_pb2
from saltern.admin_client import AdminClient, read_api_key

TIMEOUT_S = 60


class Up:
    """A running ``saltern up``."""

    def __init__(self, data_dir: Path, process: subprocess.Popen[str]) -> None:
        self.data_dir = data_dir
        self.process = process

    def wait_ready(self) -> dict[str, Any]:
        """What run.json says, once it is of this run."""
        run_file = self.data_dir / "run.json"
        with _pidfd(self.process.pid) as ended:
            while True:
                if run_file.exists():
                    run: dict[str, Any] = json.loads(run_file.read_text())
                    if run["pid"] == self.process.pid:
                        return run
                assert not ended(timeout_s=0.02), self.process.communicate()

    def admin(self) -> AdminClient:
        run = self.wait_ready()
        return AdminClient(run["control_endpoint"], read_api_key(Path(run["admin_api_key_file"])))

    def end(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        """Send a signal and wait; exit status and what was printed."""
        if number is not None:
            self.process.send_signal(number)
        printed, complained = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, printed, complained


@contextmanager
def _pidfd(pid: int) -> Iterator[Any]:
    descriptor = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    try:
        yield lambda timeout_s: bool(poller.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


@contextmanager
def up(data_dir: Path, *arguments: str, umask: int = -1) -> Iterator[Up]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    command = [sys.executable, "-m", "saltern", "up", "--data-dir", str(data_dir), "--ports", "auto", *arguments]
    with subprocess.Popen(
        command,
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        umask=umask,
    ) as process:
        try:
            yield Up(data_dir, process)
        finally:
            process.kill()


def processes_of(data_dir: Path) -> dict[int, str]:
    """Every process that names the data directory on its command line or works inside it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                where = str((entry / "cwd").readlink())
            except OSError:
                continue
            if f"{data_dir}/" in command or where.startswith(f"{data_dir}/"):
                found[int(entry.name)] = command
    return found


def assert_nothing_is_left(data_dir: Path) -> None:
    assert processes_of(data_dir) == {}
    assert not (data_dir / "run.json").exists()
    assert not [path for path in data_dir.rglob("*") if path.is_socket()]
    assert not (data_dir / "run").exists()


def test_a_stack_from_first_start_to_last(reachable_tmp_path: Path) -> None:
    """One life: start, refuse a second start, Ctrl-C, start again, kill -9, start again, lose a child."""
    data_dir = reachable_tmp_path / "one"
    with up(data_dir, "--dram", "16MiB") as first, up(reachable_tmp_path / "two", "--nodes", "0") as other:
        run, other_run = first.wait_ready(), other.wait_ready()
        assert run["control_endpoint"] != other_run["control_endpoint"]
        assert other_run["nodes"] == []
        with urlopen(f"{run['console_url']}login", timeout=30) as login:
            assert b"Log in" in login.read()
        (node,) = run["nodes"]
        assert {"node_id", "wire_endpoint", "grpc_endpoint", "shm_path", "metrics_endpoint", "pid"} <= node.keys()
        for name in ("admin.key", "node-1.key"):
            assert stat.S_IMODE((data_dir / "credentials" / name).stat().st_mode) == 0o600

        with up(data_dir) as second:
            status, _, complained = second.end()
        assert status == 5
        assert f"process {first.process.pid}" in complained and "--data-dir" in complained

        with first.admin() as admin:
            admin.call(
                admin.tenants.CreateTenant,
                tenants_pb2.CreateTenantRequest(tenant_id="acme", tenant=tenants_pb2.Tenant()),
            )
            tier = quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=12345)
            quota = quotas_pb2.Quota(name="tenants/acme/quota", tiers=[tier])
            admin.call(admin.quotas.UpdateQuota, quotas_pb2.UpdateQuotaRequest(quota=quota))
            (live,) = admin.call(admin.usage.ListNodes, usage_pb2.ListNodesRequest()).nodes
            assert live.dram_capacity_bytes == 16 * 1024**2
            events = _events(admin)
        with other.admin() as admin:
            assert not admin.call(admin.tenants.ListTenants, tenants_pb2.ListTenantsRequest()).tenants

        status, printed, complained = first.end(signal.SIGINT)
        assert (status, complained) == (0, "")
        assert run["control_endpoint"] in printed and f"saltern --data-dir {data_dir} tenant create" in printed
        assert_nothing_is_left(data_dir)
        other_children = processes_of(other.data_dir)
        assert len(other_children) > 2
        other.process.kill()
        _wait_gone(other.data_dir)

    with up(data_dir, "--dram", "16MiB") as again:
        with again.admin() as admin:
            assert _state(admin) == ("tenants/acme", 12345)
            assert _events(admin)[-len(events) :] == events
        again.process.kill()
        again.end()
        _wait_gone(data_dir)

    with up(data_dir, "--dram", "16MiB") as third:
        with third.admin() as admin:
            assert _state(admin) == ("tenants/acme", 12345)
        os.kill(third.wait_ready()["nodes"][0]["pid"], signal.SIGKILL)
        status, _, complained = third.end()
        assert status == 1
        assert "error: node-1 ended by itself (killed by SIGKILL)" in complained
        assert "node-1: {" in complained  # its last log lines
        assert_nothing_is_left(data_dir)


def test_a_child_that_cannot_start_is_named_with_its_last_words(reachable_tmp_path: Path) -> None:
    data_dir = reachable_tmp_path / "stack"
    with up(data_dir, "--nodes", "0") as started:
        started.wait_ready()
        postmaster = int((data_dir / "postgres" / "cluster" / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)
        status, _, complained = started.end()
        assert status == 1
        assert "error: postgres ended by itself" in complained and "server.log" in complained
        assert_nothing_is_left(data_dir)
    (data_dir / "control" / "key-encryption-key").chmod(0o644)
    with up(data_dir, "--nodes", "0") as refused:
        status, printed, complained = refused.end()
    assert status == 1
    assert "control: error: the key-encryption key" in complained and "control: hint: chmod 600" in complained
    assert "ready" not in printed
    assert_nothing_is_left(data_dir)
    (data_dir / "control" / "key-encryption-key").chmod(0o600)
    (data_dir / "credentials" / "admin.key").unlink()
    with up(data_dir, "--nodes", "0") as refused:
        status, _, complained = refused.end()
    assert status == 5
    assert "admin.key" in complained and "backup" in complained
    assert_nothing_is_left(data_dir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_starting_stops_what_was_started(reachable_tmp_path: Path, number: signal.Signals) -> None:
    data_dir = reachable_tmp_path / "stack"
    with up(data_dir, "--nodes", "0") as starting:
        assert starting.process.stdout is not None
        assert "postgres" in starting.process.stdout.readline()
        status, printed, _ = starting.end(number)
    assert status == 0
    assert "ready" not in printed
    assert_nothing_is_left(data_dir)


def test_an_unusable_data_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with up(tmp_path / "file" / "stack") as refused:
        status, _, complained = refused.end()
    assert status == 5
    assert str(tmp_path / "file") in complained and "--data-dir" in complained


def _events(admin: AdminClient) -> list[audit_pb2.AuditEvent]:
    """The platform's audit events, newest first."""
    request = audit_pb2.ListAuditEventsRequest()
    return list(admin.iterate(admin.audit.ListAuditEvents, request, "audit_events"))


def _state(admin: AdminClient) -> tuple[str, int]:
    (tenant,) = admin.call(admin.tenants.ListTenants, tenants_pb2.ListTenantsRequest()).tenants
    quota = admin.call(admin.quotas.GetQuota, quotas_pb2.GetQuotaRequest(name=f"{tenant.name}/quota"))
    return tenant.name, max(tier.limit_bytes for tier in quota.tiers)


def _wait_gone(data_dir: Path) -> None:
    """Children of a killed stack end by themselves."""
    for pid in processes_of(data_dir):
        try:
            with _pidfd(pid) as ended:
                assert ended(timeout_s=TIMEOUT_S), processes_of(data_dir)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_i1_no_umask_opens_or_shuts_the_stack(reachable_tmp_path: Path, umask: int) -> None:
    """Under umask 0 nobody else can write anything of the stack or read its secrets; under 077 it still starts."""
    data_dir = reachable_tmp_path / "made" / "too" / "data"
    with up(data_dir, "--dram", "16MiB", umask=umask) as running:
        (node,) = running.wait_ready()["nodes"]
        for path in (reachable_tmp_path / "made", reachable_tmp_path / "made" / "too", data_dir, *data_dir.rglob("*")):
            mode = path.lstat().st_mode
            assert stat.S_ISLNK(mode) or not mode & (stat.S_IWGRP | stat.S_IWOTH), (path, oct(mode))
        assert stat.S_IMODE(Path(node["shm_path"]).stat().st_mode) == 0o600
        private = ("run.json", "up.lock", "control", "credentials", "log", "run", "node-1", "postgres/cluster")
        for name in (*private, "postgres/passwords.json", "postgres/server.log", "control/key-encryption-key"):
            assert not stat.S_IMODE((data_dir / name).stat().st_mode) & 0o077, name
        assert running.end(signal.SIGTERM)[0] in (0, 130)


def test_i1_a_data_directory_that_others_can_write_to_is_refused(reachable_tmp_path: Path) -> None:
    open_to_all = reachable_tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    below = open_to_all / "data"
    below.mkdir(mode=0o700)
    for data_dir in (open_to_all, below):
        with up(data_dir, "--nodes", "0") as refused:
            status, _, complained = refused.end()
        assert status == 5
        assert str(open_to_all) in complained and "chmod" in complained
