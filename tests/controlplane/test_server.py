"""The control plane as a process: start, refusals to start, health, reflection, restart, drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from sqlalchemy import text
from structlog.testing import capture_logs

from controlplane.db import connect
from controlplane.secrets import load_key_encryption_key
from controlplane.server import SERVICE_NAMES, running
from saltern import errors
from saltern.admin.v1 import audit_pb2, credentials_pb2, quotas_pb2, tenants_pb2
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from tests.support.control import Control, control_plane, migrate, refused, settings_for, text_of
from tests.support.waiting import wait_until

#: Far more than a start takes, or an end; a machine that is busy with other things may make it slow.
START_S = 100.0


class Served:
    """``saltern serve control`` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], ready_file: Path) -> None:
        self.process = process
        self.ready_file = ready_file

    def wait_ready(self) -> str:
        """The endpoint, once the process serves."""
        wait_until(lambda: self.ready_file.exists() or self.process.poll() is not None, START_S)
        if self.process.poll() is not None:
            raise AssertionError(self.process.communicate()[1])
        ready = json.loads(self.ready_file.read_text())
        assert ready["pid"] == self.process.pid
        return str(ready["endpoint"])

    def end(self) -> tuple[int, str]:
        """Exit status and what was printed to stderr."""
        _, printed = self.process.communicate(timeout=START_S)
        return self.process.returncode, printed


@contextmanager
def serving(state_dir: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    ready_file = state_dir / "ready.json"
    command = [sys.executable, "-m", "saltern", "serve", "control", "--state-dir", str(state_dir)]
    command += ["--metrics-listen", "127.0.0.1:0"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    with subprocess.Popen(
        [*command, "--ready-file", str(ready_file), *arguments],
        env=clean | environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Served(process, ready_file)
        finally:
            process.kill()


def urls(database: Any) -> dict[str, str]:
    return {
        "SALTERN_DATABASE_URL": text_of(database.app),
        "SALTERN_MIGRATION_DATABASE_URL": text_of(database.owner),
        "SALTERN_CONTROL_LISTEN": "127.0.0.1:0",
    }


async def test_restart_loses_no_tenant_quota_key_or_audit_row(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path) as before:
            admin_key = await before.redeem()
            await before.add_tenant("acme", "chat", limit_bytes=12345)
            writer = await before.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
            old = await before.exchange(writer, "chat")
            admin = await before.bearer(admin_key)
            events = await before.events()
            tenant_events = await before.events("tenants/acme")
            key_set = await before.auth.GetKeySet(auth_pb2.GetKeySetRequest())
        async with control_plane(database, tmp_path) as after:
            after.admin_key = admin_key
            assert not (tmp_path / "bootstrap-token").exists()
            # Tokens of before verify too: the signing key and the issuer are the same.
            tenants = await after.tenants.ListTenants(tenants_pb2.ListTenantsRequest(), metadata=admin)
            assert [tenant.name for tenant in tenants.tenants] == ["tenants/acme"]
            request = quotas_pb2.GetQuotaRequest(name="tenants/acme/quota")
            quota = await after.quotas.GetQuota(request, metadata=admin)
            assert 12345 in [tier.limit_bytes for tier in quota.tiers]
            new = await after.exchange(writer, "chat")
            assert new.salt_keys == old.salt_keys
            assert await after.events() == events
            assert await after.events("tenants/acme") == tenant_events
            assert await after.auth.GetKeySet(auth_pb2.GetKeySetRequest()) == key_set


async def test_a_process_serves_says_so_and_drains_on_sigterm(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database() as database, serving(tmp_path, **urls(database)) as served:
        endpoint = await asyncio.to_thread(served.wait_ready)
        assert stat.S_IMODE((tmp_path / "key-encryption-key").stat().st_mode) == 0o600
        token = (tmp_path / "bootstrap-token").read_text().strip()
        async with grpc.aio.insecure_channel(endpoint) as channel:
            auth = auth_pb2_grpc.AuthServiceStub(channel)
            redeemed = await auth.RedeemBootstrapToken(auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=token))
            request = auth_pb2.ExchangeApiKeyRequest(api_key=redeemed.secret, audience=auth_pb2.AUDIENCE_CONTROL)
            access_token = (await auth.ExchangeApiKey(request)).access_token
        served.process.send_signal(signal.SIGTERM)
        status, printed = await asyncio.to_thread(served.end)
    assert status == 0
    assert not served.ready_file.exists()
    for secret in (token, redeemed.secret, access_token, database.app.password, database.owner.password):
        assert secret not in printed
    assert {json.loads(line)["event"] for line in printed.splitlines()} >= {"serving", "draining"}


async def test_two_control_planes_on_one_fresh_database_agree(postgres: Any, tmp_path: Path) -> None:
    environment = {"SALTERN_KEY_ENCRYPTION_KEY": "ab" * 32}
    with postgres.fresh_database() as database:
        environment |= urls(database)
        with serving(tmp_path / "a", **environment) as a, serving(tmp_path / "b", **environment) as b:
            endpoints = await asyncio.gather(asyncio.to_thread(a.wait_ready), asyncio.to_thread(b.wait_ready))
            assert (tmp_path / "a" / "bootstrap-token").exists() != (tmp_path / "b" / "bootstrap-token").exists()
            key_sets = []
            for endpoint in endpoints:
                async with grpc.aio.insecure_channel(endpoint) as channel:
                    stub = auth_pb2_grpc.AuthServiceStub(channel)
                    key_sets.append(await stub.GetKeySet(auth_pb2.GetKeySetRequest()))
            assert key_sets[0] == key_sets[1]


async def test_wrong_starts_get_one_line_that_helps(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as database, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        good = urls(database)
        nowhere = {"SALTERN_DATABASE_URL": "postgresql://someone:hunter2@127.0.0.1:1/saltern"}
        wrong_password = {"SALTERN_DATABASE_URL": text_of(database.app.set(password="hunter2"))}
        cases: list[tuple[dict[str, str], tuple[str, ...], int, tuple[str, ...]]] = [
            ({}, (), 2, ("database_url", "saltern up")),
            (nowhere, (), 7, ("database", "SALTERN_")),
            (good | wrong_password, (), 7, ("database", "SALTERN_")),
            (good, ("--listen", f"127.0.0.1:{port}"), 5, (f"127.0.0.1:{port}", "in use", "another port")),
            (good, ("--state-dir", "/dev/null/x"), 5, ("/dev/null/x", "--state-dir")),
        ]
        with ExitStack() as stack:
            started = [stack.enter_context(serving(tmp_path, *case[1], **case[0])) for case in cases]
            ended = await asyncio.gather(*(asyncio.to_thread(served.end) for served in started))
        for (_, _, status, expected), (ended_with, printed) in zip(cases, ended, strict=True):
            said = [line for line in printed.splitlines() if line.startswith(("error:", "hint:"))]
            assert ended_with == status, printed
            assert len(said) == 2 and all(word in "\n".join(said) for word in expected), printed
            assert "hunter2" not in printed and "Traceback" not in printed


async def test_a_lost_or_wrong_key_encryption_key_is_no_reason_to_make_a_new_one(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as database:
        async with running(settings_for(database, tmp_path / "a")):
            pass
        with pytest.raises(errors.FailedPreconditionError) as caught:
            async with running(settings_for(database, tmp_path / "b")):
                pass
        assert caught.value.reason == "KEY_ENCRYPTION_KEY_MISSING"
        load_key_encryption_key(tmp_path / "b")
        with pytest.raises(errors.FailedPreconditionError) as caught:
            async with running(settings_for(database, tmp_path / "b")):
                pass
        assert caught.value.reason == "WRONG_KEY_ENCRYPTION_KEY"


async def test_health_is_told_for_every_service_and_turns_while_draining(control: Control) -> None:
    stub: Any = health_pb2_grpc.HealthStub(control.channel)
    for service in ("", *SERVICE_NAMES):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAMES[0]))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    draining = asyncio.create_task(control.plane.drain(timeout_s=1))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()
    await draining


async def test_reflection_lists_the_services(control: Control) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(control.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert listed >= {*SERVICE_NAMES, "grpc.health.v1.Health"}
    call.cancel()


async def test_draining_lets_a_call_in_progress_finish(control: Control) -> None:
    admin = await control.bearer(control.admin_key)
    async with control.database.transaction() as session:
        # Hold what the call needs, so that it is in progress when the drain begins.
        await session.execute(text("SELECT * FROM policy_state FOR UPDATE"))
        call = control.tenants.CreateTenant(
            tenants_pb2.CreateTenantRequest(tenant_id="acme", tenant=tenants_pb2.Tenant()), metadata=admin
        )
        waiting = text(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        while (await session.execute(waiting)).scalar_one() == 0:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(control.plane.drain())
        await asyncio.sleep(0)
    assert (await call).name == "tenants/acme"
    await draining


async def test_i10_a_lost_database_is_unavailable_and_comes_back(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path) as control:
            admin = await control.bearer(await control.redeem())
            request = tenants_pb2.ListTenantsRequest()
            await control.database.close()
            limit = "ALTER DATABASE {} CONNECTION LIMIT {}"
            with postgres.server.connect("superuser", "postgres") as superuser:
                superuser.execute(limit.format(database.name, 0))
                superuser.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database.name]
                )
                error = await refused(control.tenants.ListTenants(request, metadata=admin))
                assert (type(error), error.reason) == (errors.UnavailableError, "DATABASE_UNAVAILABLE")
                assert error.retry_after_ms and "PostgreSQL" in error.hint
                superuser.execute(limit.format(database.name, -1))
            await control.tenants.ListTenants(request, metadata=admin)


async def test_an_unexpected_error_is_told_by_id_alone(control: Control) -> None:
    """A fault of ours (here: a table that somebody has renamed) reaches the log, never the caller."""
    admin = await control.bearer(control.admin_key)
    owner = connect(control.owner_url)
    try:
        async with owner.transaction() as session:
            await session.execute(text("ALTER TABLE audit_events RENAME TO secret_table_name"))
    finally:
        await owner.close()
    with capture_logs() as logs:
        error = await refused(control.audit.ListAuditEvents(audit_pb2.ListAuditEventsRequest(), metadata=admin))
    assert (type(error), error.reason) == (errors.InternalError, "UNEXPECTED")
    assert "audit_events" not in repr(vars(error))
    assert error.metadata["correlation_id"] in error.hint
    (logged,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert logged["correlation_id"] == error.metadata["correlation_id"]
    assert "audit_events" in str(logged["exc_info"])
