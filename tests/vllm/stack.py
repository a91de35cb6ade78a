"""The stack that engines under test use: Postgres, control plane and one node, processes of the main environment.

vLLM's environment holds the client alone, as an inference server's does. The node is this module's own child, so that a
test can kill it, pause it and start it again at the same address. What is started here ends with this process, however
that ends, and takes its data along.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from saltern.admin.v1.credentials_pb2 import (
    ROLE_NODE,
    ROLE_WRITER,
    ApiKey,
    CreateApiKeyRequest,
    DeleteApiKeyRequest,
)
from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, DeleteNamespaceRequest, Namespace
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, Quota, TierQuota, UpdateQuotaRequest
from saltern.admin.v1.tenants_pb2 import CreateTenantRequest, Tenant
from saltern.admin_client import AdminClient, read_api_key
from saltern.client import Client
from saltern.names import TenantId, quota_name, tenant_name
from tests.vllm.door import Door

ROOT = Path(__file__).resolve().parents[2]
#: The environment that has the servers; ``make test-vllm`` makes both.
STACK_PYTHON = os.environ.get("SALTERN_STACK_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
MIB = 1024 * 1024
NODE_DRAM_BYTES = 256 * MIB
BLOCK_BYTES = 4 * MIB
START_S = 120.0
_INSIDE = "127.0.0.2"


def wait_until(condition: Callable[[], bool], seconds: float, what: str = "") -> None:
    """Look again and again until ``condition`` holds; fails after ``seconds``."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, f"not within {seconds:g} s: {what or condition}"
        time.sleep(0.01)


class CacheNode:
    """A node that comes and goes, always at the same address.

    Args:
        has_door: whether a :class:`Door` stands before it, which costs speed.
    """

    def __init__(self, folder: Path, control: str, key_file: Path, name: str, *, has_door: bool) -> None:
        self.name = name
        self.shm_path = folder / f"{name}.sock"
        self._folder = folder
        self._ready_file = folder / f"{name}.ready"
        self._port = free_port()
        self._address = _INSIDE if has_door else "127.0.0.1"
        self._door = Door((_INSIDE, self._port), ("127.0.0.1", self._port)) if has_door else None
        self._arguments = ["--node-id", name, "--control", control, "--api-key-file", str(key_file)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def door(self) -> Door:
        """The network between this node and its clients, unless they use shared memory."""
        assert self._door is not None
        return self._door

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, dram_bytes: int = NODE_DRAM_BYTES) -> None:
        """Start and serve; what it held in an earlier life is gone."""
        self._ready_file.unlink(missing_ok=True)
        arguments = [
            *("serve", "node", *self._arguments, "--grpc-listen", "127.0.0.1:0"),
            *("--listen", f"{self._address}:{self._port}", "--advertise-host", "127.0.0.1"),
            *("--metrics-listen", "off", "--dram-bytes", str(dram_bytes), "--no-prefault", "--no-copy-tuning"),
            *("--shm-path", str(self.shm_path), "--state-dir", str(self._folder / self.name)),
            *("--ready-file", str(self._ready_file)),
        ]
        state_dir = self._folder / self.name
        state_dir.mkdir(mode=0o700, exist_ok=True)
        self._process = _start(arguments, state_dir, self._folder / f"{self.name}.log")
        self._wait_ready()

    def _wait_ready(self) -> None:
        process, log = self._process, self._folder / f"{self.name}.log"
        assert process is not None

        def is_ready() -> bool:
            assert process.poll() is None, f"the node ended by itself:\n{_tail(log)}"
            return self._ready_file.exists()

        wait_until(is_ready, START_S, "the node serves")

    def kill(self) -> None:
        """As when the power fails."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def pause(self) -> None:
        """Every thread of it stands still; connections stay open and nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart_if_dead(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            _end(self._process)

    def close(self) -> None:
        self.stop()
        if self._door is not None:
            self._door.close()


class Stack:
    """What runs, with its administrator; made by :func:`running_stack`."""

    def __init__(
        self, folder: Path, resources: ExitStack, *, has_door: bool, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        data_dir = folder / "data"
        arguments = ["up", "--data-dir", str(data_dir), "--nodes", "0", "--ports", "auto"]
        up = _start(arguments, folder, folder / "up.log", environment)
        resources.callback(_end, up)
        self._up = up
        run_file = data_dir / "run.json"

        def is_ready() -> bool:
            assert up.poll() is None, f"the stack ended by itself:\n{_tail(folder / 'up.log')}"
            return run_file.exists()

        wait_until(is_ready, START_S, "the control plane serves")
        run: dict[str, Any] = json.loads(run_file.read_text())
        self.control = str(run["control_endpoint"])
        self.admin_key_file = Path(run["admin_api_key_file"])
        self.admin = resources.enter_context(AdminClient(self.control, read_api_key(self.admin_key_file)))
        request = CreateApiKeyRequest(api_key_id="node-1", api_key=ApiKey(role=ROLE_NODE, node_id="node-1"))
        self.node = CacheNode(folder, self.control, self._write_key("node-1", request), "node-1", has_door=has_door)
        resources.callback(self.node.close)
        self.node.start()

    @property
    def pids(self) -> list[int]:
        """The processes that were started here."""
        return [self._up.pid, self.node.pid]

    def add_tenant(
        self,
        tenant: str,
        *,
        namespace: str = "chat",
        limit_bytes: int = NODE_DRAM_BYTES // 2,
        block_tokens: int = 32,
        block_bytes: int = BLOCK_BYTES,
    ) -> Path:
        """Make a tenant with a namespace; returns the file of a writer's key, which never shows its secret."""
        admin, parent = self.admin, tenant_name(TenantId(tenant))
        admin.call(admin.tenants.CreateTenant, CreateTenantRequest(tenant_id=tenant, tenant=Tenant()))
        self.set_limit(tenant, limit_bytes)
        self.add_namespace(tenant, namespace, block_tokens=block_tokens, block_bytes=block_bytes)
        request = CreateApiKeyRequest(parent=parent, api_key_id="engine", api_key=ApiKey(role=ROLE_WRITER))
        key_file = self._write_key(f"{tenant}-engine", request)
        self.admin.wait_for_policy()
        return key_file

    def add_namespace(
        self, tenant: str, namespace: str, *, block_tokens: int = 32, block_bytes: int = BLOCK_BYTES
    ) -> None:
        body = Namespace(model_fingerprint="tiny", block_tokens=block_tokens, block_bytes=block_bytes)
        request = CreateNamespaceRequest(parent=tenant_name(TenantId(tenant)), namespace_id=namespace, namespace=body)
        self.admin.call(self.admin.namespaces.CreateNamespace, request)

    def delete_namespace(self, tenant: str, namespace: str = "chat") -> None:
        """The namespace and every entry of it, at once."""
        name = f"{tenant_name(TenantId(tenant))}/namespaces/{namespace}"
        self.admin.call(self.admin.namespaces.DeleteNamespace, DeleteNamespaceRequest(name=name))

    def set_limit(self, tenant: str, limit_bytes: int) -> None:
        tiers = [TierQuota(tier=TIER_DRAM, limit_bytes=limit_bytes)]
        quota = Quota(name=quota_name(TenantId(tenant)), tiers=tiers)
        self.admin.call(self.admin.quotas.UpdateQuota, UpdateQuotaRequest(quota=quota, allow_below_use=True))

    def revoke_key(self, tenant: str) -> None:
        """Delete the engine's API key, and with it the tokens that it was exchanged for."""
        name = f"{tenant_name(TenantId(tenant))}/apiKeys/engine"
        self.admin.call(self.admin.credentials.DeleteApiKey, DeleteApiKeyRequest(name=name))
        self.admin.wait_for_policy()

    def client(self, key_file: Path, *, namespace: str = "chat", transport: str = "tcp") -> Client:
        """Another client of the tenant: what an engine stored is looked at, and spoiled, through it."""
        secret = read_api_key(key_file).reveal()
        return Client(
            control=self.control, api_key=secret, namespace=namespace, transport=transport, deadline_ms=10_000
        )

    def _write_key(self, name: str, request: CreateApiKeyRequest) -> Path:
        path = self.folder / f"{name}.key"
        path.touch(0o600)
        path.write_text(self.admin.call(self.admin.credentials.CreateApiKey, request).secret)
        return path


@contextmanager
def running_stack(*, has_door: bool = True, environment: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """The stack for the time of the block; the end of what its processes said is told if that ends badly.

    Args:
        has_door: see :class:`CacheNode`.
        environment: more of it, for the control plane.
    """
    folder = Path(tempfile.mkdtemp(prefix="saltern-vllm-"))
    folder.chmod(0o755)  # Postgres runs as another user when we are root
    with ExitStack() as outer:
        outer.callback(shutil.rmtree, folder)
        with ExitStack() as resources:
            try:
                stack = Stack(folder, resources, has_door=has_door, environment=environment)
            except BaseException as error:
                for log in sorted(folder.glob("*.log")):
                    error.add_note(f"{log.name} ends with:\n{_tail(log)}")
                raise
            yield stack


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, less what would point a child at another stack."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")} | dict(more or {})


def _start(
    arguments: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run ``saltern ARGUMENTS`` for as long as this process lives; if that is killed, ``folder`` goes too."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [STACK_PYTHON, "-P", "-m", "saltern.demo.bound_child", str(os.getpid()), str(folder), *arguments],
            cwd=ROOT,
            env=clean_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4096:]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind((_INSIDE, 0))
        return int(probe.getsockname()[1])
