"""What is measured: a private Postgres, the control plane over it, an echo server; each a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from saltern.admin.v1 import credentials_pb2, credentials_pb2_grpc, namespaces_pb2, namespaces_pb2_grpc, tenants_pb2
from saltern.admin.v1.tenants_pb2_grpc import TenantServiceStub
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.errors import UnavailableError

NAMESPACE: Final = "chat"
_START_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class BenchStack:
    """Where everything is. ``database_url``: of the application role."""

    control: str
    control_pid: int
    echo: str
    echo_pid: int
    database_url: str = field(repr=False)
    state_dir: Path


@contextmanager
def bench_stack() -> Iterator[BenchStack]:
    """Run everything until the end of the block, in a folder that goes with it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="saltern-bench-control-")))
        folder.chmod(0o755)  # Postgres runs as another user where this one is root
        postgres = stack.enter_context(EmbeddedPostgres(PostgresConfig(folder / "postgres")))
        urls = {role: postgres.url(role).render_as_string(hide_password=False) for role in ("app", "owner")}
        ready_file = folder / "ready.json"
        command = [sys.executable, "-m", "saltern", "serve", "control", "--listen", "127.0.0.1:0"]
        command += ["--metrics-listen", "off", "--state-dir", str(folder / "state"), "--ready-file", str(ready_file)]
        environment = {"SALTERN_DATABASE_URL": urls["app"], "SALTERN_MIGRATION_DATABASE_URL": urls["owner"]}
        log = stack.enter_context((folder / "control.log").open("wb"))
        control = stack.enter_context(child(command, environment, stderr=log))
        echo = stack.enter_context(child([sys.executable, "-m", "controlplane.bench_control.echo"], {}))
        assert echo.stdout is not None
        ready = wait_ready(control, ready_file, folder / "control.log")
        yield BenchStack(
            control=ready["endpoint"],
            control_pid=control.pid,
            echo=echo.stdout.readline().strip(),
            echo_pid=echo.pid,
            database_url=postgres.url("app").set(drivername="postgresql").render_as_string(hide_password=False),
            state_dir=folder / "state",
        )


@asynccontextmanager
async def prepared_keys(stack: BenchStack, channel: grpc.aio.Channel, tenants: int) -> AsyncIterator[list[str]]:
    """The secrets of a writer's API key of each of so many tenants, which have one namespace each."""
    auth: Any = auth_pb2_grpc.AuthServiceStub(channel)
    token = (stack.state_dir / "bootstrap-token").read_text().strip()
    redeemed = await auth.RedeemBootstrapToken(auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=token))
    (stack.state_dir / "bench-admin-key").write_text(redeemed.secret)
    exchange = auth_pb2.ExchangeApiKeyRequest(api_key=redeemed.secret, audience=auth_pb2.AUDIENCE_CONTROL)
    metadata = (("authorization", f"Bearer {(await auth.ExchangeApiKey(exchange)).access_token}"),)
    stubs: tuple[Any, Any, Any] = (
        TenantServiceStub(channel),
        namespaces_pb2_grpc.NamespaceServiceStub(channel),
        credentials_pb2_grpc.CredentialServiceStub(channel),
    )
    secrets = []
    for number in range(tenants):
        tenant = f"tenant-{number}"
        await stubs[0].CreateTenant(tenants_pb2.CreateTenantRequest(tenant_id=tenant), metadata=metadata)
        namespace = namespaces_pb2.Namespace(model_fingerprint="bench", block_tokens=16, block_bytes=65536)
        await stubs[1].CreateNamespace(
            namespaces_pb2.CreateNamespaceRequest(
                parent=f"tenants/{tenant}", namespace_id=NAMESPACE, namespace=namespace
            ),
            metadata=metadata,
        )
        request = credentials_pb2.CreateApiKeyRequest(
            parent=f"tenants/{tenant}",
            api_key_id="bench",
            api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_WRITER),
        )
        secrets.append((await stubs[2].CreateApiKey(request, metadata=metadata)).secret)
    yield secrets


@contextmanager
def child(command: list[str], environment: dict[str, str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run ``command`` for the time of the block, without any setting of whoever measures."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    with subprocess.Popen(  # noqa: S603 (this interpreter and our own modules)
        command, env=clean | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_ready(process: subprocess.Popen[str], ready_file: Path, log: Path) -> dict[str, Any]:
    """What a process says when it serves; raises UnavailableError (BENCH_NOT_STARTED)."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not ready_file.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise UnavailableError(
                f"the control plane did not start: {log.read_text()[-2000:]}",
                reason="BENCH_NOT_STARTED",
                hint="see what its log says",
            )
        time.sleep(0.05)
    ready: dict[str, Any] = json.loads(ready_file.read_text())
    return ready
