"""The processes of a chaos run: Postgres, a control plane, one node that is killed again and again, and clients."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.duration_pb2 import Duration

from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from saltern.admin.v1.credentials_pb2 import ROLE_NODE, ROLE_WRITER, ApiKey, CreateApiKeyRequest
from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, DeleteNamespaceRequest, Namespace
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TIER_SSD, Quota, TierQuota, UpdateQuotaRequest
from saltern.admin.v1.salt_policies_pb2 import GetSaltPolicyRequest, RotateSaltRequest
from saltern.admin.v1.tenants_pb2 import CreateTenantRequest, DeleteTenantRequest, Tenant
from saltern.admin_client import AdminClient, redeem_bootstrap_token
from saltern.admin_client import ApiKey as Secret
from saltern.client import Client
from saltern.credentials import EXCHANGE_TIMEOUT_MS, StaticCredentials
from saltern.errors import DeadlineExceededError, SalternError
from saltern.exchange import exchange_api_key
from saltern.grant import Grant, NodeEndpoint, SaltScopeChoice
from saltern.names import NamespaceId, TenantId, quota_name, tenant_name
from tests.chaos.aim import Aim
from tests.chaos.content import BLOCK_BYTES
from tests.chaos.worker import Orders, Report
from tests.conftest import SessionPostgres
from tests.isolation.saltern_deployment import Served
from tests.support.control import migrate, text_of
from tests.support.served_node import connect
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
DRAM_BYTES = 16 * MIB
SSD_BYTES = 80 * MIB
START_S = 180.0
#: How long the harness waits for a node to go by a change; one that is dead never does.
SETTLE_S = 3.0
#: The harness waits as long as it takes; only its clients have deadlines to meet.
PATIENCE_MS = 120_000
#: A paused client has ended its call: its deadline, and what a busy machine takes; or its start has failed.
PAUSE_S = 70.0


@dataclass(frozen=True, slots=True)
class Share:
    """What a tenant is given on the node, in bytes."""

    dram_reserved: int
    dram_limit: int
    ssd_limit: int


#: Together they want more than DRAM holds; the third one's limits are changed while it works.
SHARES = {
    "steady": Share(3 * MIB, 6 * MIB, 24 * MIB),
    "busy": Share(2 * MIB, 8 * MIB, 16 * MIB),
    "changing": Share(0, 8 * MIB, 12 * MIB),
}
CHANGING = "changing"
#: Nobody works as this one but the harness, which deletes it, or its namespace, and makes it anew.
GUEST, GUEST_SHARE = "guest", Share(0, MIB, 8 * MIB)
#: Its salt is rotated while it works.
TURNING = "busy"
#: These two form a sharing group and leave it again, by the hand of the harness too.
LEFT, RIGHT, PAIR_SHARE = "left", "right", Share(0, MIB, 4 * MIB)


class NodeDiedError(Exception):
    """The node was asked and is dead."""


class NodeProcess:
    """One life of the node."""

    def __init__(self, folder: Path, arguments: list[str], aim: Aim | None, *, at_once: bool) -> None:
        self.ready_file = folder / "node.ready.json"
        self._books_file = folder / "books.json"
        self.ready_file.unlink(missing_ok=True)
        mode = "at-once" if at_once else "at-signal"
        command = [sys.executable, "-m", "tests.chaos.node_main", str(self._books_file), str(aim or "-"), mode]
        with (folder / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments, "--ready-file", str(self.ready_file)],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if not k.startswith("SALTERN_")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> bool:
        """False if it died first."""
        wait_until(lambda: self.ready_file.exists() or not self.is_alive, START_S)
        return self.is_alive

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def was_killed(self) -> bool:
        return self.process.poll() == -signal.SIGKILL

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        """Stop as an operator does; returns the exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def turn_trigger(self) -> None:
        """Arm its aim; or disarm it, if it was armed from the start."""
        self.process.send_signal(signal.SIGUSR2)

    def books(self) -> dict[str, Any]:
        """What the node says that it holds; raises NodeDiedError."""
        self._books_file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: self._books_file.exists() or not self.is_alive, 30)
        if not self._books_file.exists():
            raise NodeDiedError
        books: dict[str, Any] = json.loads(self._books_file.read_text())
        return books

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Worker:
    """One client process."""

    def __init__(self, orders: Orders, folder: Path) -> None:
        self.orders = orders
        with (folder / "workers.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.worker", msgspec.json.encode(orders).decode()],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def go(self) -> None:
        self._say("go")

    def ask_to_pause(self) -> None:
        self._say("pause")

    def paused(self) -> Report | None:
        """What it saw so far; None if it does not answer in time: it hangs."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PAUSE_S)
        line = self.process.stdout.readline() if readable else ""
        return msgspec.json.decode(line, type=Report) if line else None

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died by itself: it will not answer, which is noticed
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()


class Deployment:
    """Everything that runs; the node and its clients come and go."""

    def __init__(self, folder: Path, database: dict[str, str], resources: ExitStack) -> None:
        self.folder = folder
        self.ssd_dir = folder / "ssd"
        self.state_dir = folder / "node"
        self._resources = resources
        self._database = database
        self._port = _free_port()
        self._arena_dir = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="saltern-", dir="/dev/shm")))
        self._control_endpoint = "127.0.0.1:0"
        self.control = self._start_control()
        self._control_endpoint = self.endpoint
        resources.callback(lambda: self.control.stop())
        token = (folder / "control" / "bootstrap-token").read_text().strip()
        secret = redeem_bootstrap_token(self.endpoint, token).secret
        self.admin = resources.enter_context(AdminClient(self.endpoint, Secret(secret), deadline_ms=PATIENCE_MS))
        self._node_key = self._write_secret(
            "node", CreateApiKeyRequest(api_key_id="node-1", api_key=ApiKey(role=ROLE_NODE, node_id="node-1"))
        )
        shares = {**SHARES, GUEST: GUEST_SHARE, LEFT: PAIR_SHARE, RIGHT: PAIR_SHARE}
        self.keys = {tenant: self._add_tenant(tenant, share) for tenant, share in shares.items()}

    @property
    def endpoint(self) -> str:
        return str(self.control.ready["endpoint"])

    # ---- the control plane

    def _start_control(self) -> Served:
        arguments = ["control", "--listen", self._control_endpoint, "--metrics-listen", "off"]
        arguments += ["--state-dir", str(self.folder / "control")]
        return Served(arguments, self._database, self.folder, "control")

    def kill_control(self) -> None:
        self.control.kill()
        self.control.stop()

    def restart_control(self) -> None:
        self.control = self._start_control()

    def set_quota(self, tenant: str, share: Share) -> None:
        tiers = [
            TierQuota(tier=TIER_DRAM, limit_bytes=share.dram_limit, reserved_bytes=share.dram_reserved),
            TierQuota(tier=TIER_SSD, limit_bytes=share.ssd_limit),
        ]
        request = UpdateQuotaRequest(quota=Quota(name=quota_name(TenantId(tenant)), tiers=tiers), allow_below_use=True)
        self.admin.call(self.admin.quotas.UpdateQuota, request)

    def _add_tenant(self, tenant: str, share: Share) -> Path:
        """Make a tenant; returns the file of a writer's key."""
        admin = self.admin
        admin.call(admin.tenants.CreateTenant, CreateTenantRequest(tenant_id=tenant, tenant=Tenant()))
        self.set_quota(tenant, share)
        self._add_namespace(tenant)
        key = CreateApiKeyRequest(
            parent=tenant_name(TenantId(tenant)), api_key_id="chaos", api_key=ApiKey(role=ROLE_WRITER)
        )
        return self._write_secret(tenant, key)

    def _add_namespace(self, tenant: str) -> None:
        space = Namespace(model_fingerprint="chaos", block_tokens=16, block_bytes=BLOCK_BYTES)
        request = CreateNamespaceRequest(parent=tenant_name(TenantId(tenant)), namespace_id="chat", namespace=space)
        self.admin.call(self.admin.namespaces.CreateNamespace, request)

    def renew_tenant(self) -> None:
        """Delete the guest and make a tenant of the same name."""
        self.admin.call(self.admin.tenants.DeleteTenant, DeleteTenantRequest(name=tenant_name(TenantId(GUEST))))
        self.keys[GUEST] = self._add_tenant(GUEST, GUEST_SHARE)

    def renew_namespace(self) -> None:
        """Delete the guest's namespace and make one of the same name."""
        request = DeleteNamespaceRequest(name=namespace_name(GUEST))
        self.admin.call(self.admin.namespaces.DeleteNamespace, request)
        self._add_namespace(GUEST)

    def rotate_salt(self, tenant: str, grace_s: int) -> None:
        """Begin a new epoch of the tenant's salt; earlier ones end after ``grace_s``, 0: at once."""
        request = RotateSaltRequest(name=_salt_policy_name(tenant), grace_period=Duration(seconds=grace_s))
        self.admin.call(self.admin.salt_policies.RotateSalt, request)

    def salt_epochs(self, tenant: str) -> dict[int, float | None]:
        """Epochs that may be read, each with the Unix time at which it ends; None for the current one."""
        request = GetSaltPolicyRequest(name=_salt_policy_name(tenant))
        policy = self.admin.call(self.admin.salt_policies.GetSaltPolicy, request)
        return {
            one.epoch: one.read_until_time.seconds if one.HasField("read_until_time") else None for one in policy.epochs
        }

    def settle(self) -> bool:
        """Whether the node has acknowledged the last change, after a short wait: from then on it must go by it."""
        try:
            self.admin.wait_for_policy(timeout_s=SETTLE_S)
        except DeadlineExceededError:
            return False
        return True

    def _write_secret(self, name: str, request: CreateApiKeyRequest) -> Path:
        path = self.folder / f"{name}.key"
        path.touch(0o600)
        path.write_text(self.admin.call(self.admin.credentials.CreateApiKey, request).secret)
        return path

    # ---- node and clients

    def start_node(self, *, with_ssd: bool, aim: Aim | None = None, at_once: bool = False) -> NodeProcess:
        """Start a node, always at the same address, as an operator's unit file does."""
        arguments = [
            *("--node-id", "node-1", "--control", self.endpoint, "--api-key-file", str(self._node_key)),
            *("--listen", f"127.0.0.1:{self._port}", "--grpc-listen", "127.0.0.1:0"),
            *("--metrics-listen", "off"),
            *("--dram-bytes", str(DRAM_BYTES), "--state-dir", str(self.state_dir)),
            *("--shm-path", str(self.folder / "node.sock"), "--no-prefault", "--arena-dir", str(self._arena_dir)),
        ]
        if with_ssd:
            arguments += ["--ssd-dir", str(self.ssd_dir), "--ssd-bytes", str(SSD_BYTES)]
        return NodeProcess(self.folder, arguments, aim, at_once=at_once)

    def start_worker(self, tenant: str, transport: str, seed: int, keys: int) -> Worker:
        orders = Orders(self.endpoint, str(self.keys[tenant]), tenant, transport, seed, keys)
        return Worker(orders, self.folder)

    def reader(self, tenant: str) -> Client:
        """The harness's own client: it waits as long as it takes."""
        secret = self.keys[tenant].read_text()
        return Client(control=self.endpoint, api_key=secret, namespace="chat", deadline_ms=PATIENCE_MS, transport="tcp")

    def grant(self, tenant: str, sharing_group: str = "") -> Grant:
        """Exchange the tenant's key, for its own salt or a group's."""
        scope = SaltScopeChoice(sharing_group=sharing_group)
        secret = self.keys[tenant].read_text()
        return exchange_api_key(self.endpoint, secret, NamespaceId("chat"), timeout_ms=EXCHANGE_TIMEOUT_MS, scope=scope)

    def pinned_reader(self, grant: Grant, epoch: int) -> Client:
        """A client of one epoch, which never asks for another token: it sees what that epoch holds and no more."""
        credentials = StaticCredentials(
            grant.access_token,
            namespace=grant.namespace,
            nodes=(NodeEndpoint("node-1", f"127.0.0.1:{self._port}"),),  # known, whether it lives at the moment or not
            tenant=grant.tenant,
            epoch=epoch,
            expires_at_s=grant.expires_at_s,
            block_bytes=grant.block_bytes,
            sharing_group_uid=grant.sharing_group_uid,
        )
        return Client.from_credentials(credentials, deadline_ms=PATIENCE_MS, transport="tcp")

    def opens_session(self, grant: Grant, epoch: int) -> bool:
        """Whether the node opens a session for ``grant`` under ``epoch``, by its own answer; raises NodeDiedError."""
        try:
            with connect(f"127.0.0.1:{self._port}") as client:
                client.hello(grant.access_token, grant.namespace, epoch, grant.sharing_group_uid)
        except SalternError:
            return False
        except (OSError, EOFError):
            raise NodeDiedError from None
        return True


def namespace_name(tenant: str) -> str:
    """The name of the tenant's only namespace."""
    return f"{tenant_name(TenantId(tenant))}/namespaces/chat"


def _salt_policy_name(tenant: str) -> str:
    return f"{tenant_name(TenantId(tenant))}/saltPolicy"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running_deployment() -> Iterator[Deployment]:
    """Postgres, control plane and tenants for the time of the block; nothing is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="saltern-chaos-"))
    folder.chmod(0o755)  # Postgres runs as another user when we are root
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        server = stack.enter_context(EmbeddedPostgres(PostgresConfig(folder / "postgres")))
        database = stack.enter_context(SessionPostgres(server).fresh_database(migrate))  # type: ignore[arg-type]  # any object with the two URLs
        urls = {
            "SALTERN_DATABASE_URL": text_of(database.app),
            "SALTERN_MIGRATION_DATABASE_URL": text_of(database.owner),
        }
        yield Deployment(folder, urls, stack)
