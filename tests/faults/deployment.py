"""Three nodes, two control planes and a Postgres, each a process on a host of its own, to be killed, paused and cut."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from controlplane.postgres.account import choose_account
from controlplane.postgres.binaries import find_binaries
from controlplane.postgres.process import shim_command
from controlplane.postgres.roles import DATABASE_NAME, ROLE_NAMES, Role, read_passwords
from saltern.admin.v1.credentials_pb2 import ROLE_NODE, ROLE_WRITER, ApiKey, CreateApiKeyRequest
from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, Namespace
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, Quota, TierQuota, UpdateQuotaRequest
from saltern.admin.v1.tenants_pb2 import CreateTenantRequest, Tenant
from saltern.admin_client import AdminClient, redeem_bootstrap_token
from saltern.admin_client import ApiKey as Secret
from saltern.names import TenantId, quota_name, tenant_name
from tests.chaos.content import BLOCK_BYTES
from tests.support.network import Host, NamespaceHost, network
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
NODES = ("node-1", "node-2", "node-3")
CONTROLS = ("control-a", "control-b")
POSTGRES = "postgres"
#: Both control planes have it, as behind one DNS name; where hosts have no names, one of the two is called.
CONTROL_NAME = "control"
#: The first tenant has a namespace for each node, the other one's clients go wherever the SDK sends them.
PINNED, ROAMING, ACTS = "acme", "busy", "acts"
TENANTS = {PINNED: NODES, ROAMING: ("chat", "code"), ACTS: ()}
LIMIT_BYTES = 96 * MIB
LEASE_S = 30
START_S = 180.0
_PORTS = {POSTGRES: 5432, **dict.fromkeys(CONTROLS, 7700), **dict.fromkeys(NODES, 7701)}
_POSTGRES_SETTINGS = {"unix_socket_permissions": "0700", "fsync": "on", "jit": "off", "max_connections": "60"}


@dataclass
class Service:
    """One process that comes and goes."""

    name: str
    host: Host
    port: int
    start_process: Callable[[], subprocess.Popen[bytes]]
    is_ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host.address}:{self.port}"

    def start(self) -> None:
        self.process = self.start_process()

    def wait_ready(self) -> None:
        def is_ready_or_dead() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} ended by itself with status {self.process.poll()}"
            return self.is_ready()

        wait_until(is_ready_or_dead, START_S)

    def kill(self) -> None:
        """All of it at once, as when the power fails."""
        self._signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(30)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Stop as an operator does; returns the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.resume()
            # SIGINT is Postgres's fast shutdown, and a clean stop of everything else.
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def _signal(self, number: signal.Signals) -> None:
        """To the process and its children: Postgres has one for each connection."""
        assert self.process is not None
        pids = [self.process.pid]
        with suppress(FileNotFoundError):
            tasks = Path(f"/proc/{self.process.pid}/task")
            pids += [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Deployment:
    """Everything that runs, with its tenants; made by :func:`running_deployment`.

    Attributes:
        code: the folder whose code each service of ours runs the next time that it starts; the one of these tests
            where nothing else was said.
    """

    def __init__(self, folder: Path, hosts: dict[str, Host], resources: ExitStack, code: Path = ROOT) -> None:
        self.folder = folder
        self.code = dict.fromkeys((*CONTROLS, *NODES), code)
        self._hosts = hosts
        self._log = resources.enter_context((folder / "all.log").open("ab"))
        self._passwords: dict[Role, str] = {}
        self.services = {POSTGRES: self._postgres()}
        key = secrets.token_hex(32)
        self.services |= {name: self._control(name, key) for name in CONTROLS}
        resources.callback(self.stop)
        for name in (POSTGRES, *CONTROLS):
            self.services[name].start()
            self.services[name].wait_ready()
        tokens = [folder / name / "bootstrap-token" for name in CONTROLS]
        (token,) = [file.read_text().strip() for file in tokens if file.exists()]
        self.admin_secret = Secret(redeem_bootstrap_token(self.control(0), token).secret)
        self.admin = resources.enter_context(AdminClient(self.control(0), self.admin_secret))
        for number, name in enumerate(NODES):
            request = CreateApiKeyRequest(api_key_id=name, api_key=ApiKey(role=ROLE_NODE, node_id=name))
            node_key = self._write_key(name, request)
            self.services[name] = self._node(name, self.control(number), node_key)
            self.services[name].start()
        for name in NODES:
            self.services[name].wait_ready()
        self.keys = {tenant: self._add_tenant(tenant, namespaces) for tenant, namespaces in TENANTS.items()}

    def control(self, number: int) -> str:
        """Where to call the control plane; callers are numbered, to spread them where there is no name."""
        if self.can_cut:
            return f"{CONTROL_NAME}:{_PORTS[CONTROLS[0]]}"
        return self.services[CONTROLS[number % len(CONTROLS)]].endpoint

    @property
    def can_cut(self) -> bool:
        return all(isinstance(host, NamespaceHost) for host in self._hosts.values())

    def host(self, name: str) -> Host:
        return self._hosts[name]

    def stop(self) -> None:
        for name in (*NODES, *CONTROLS, POSTGRES):
            if name in self.services:
                self.services[name].stop()

    @contextmanager
    def database(self) -> Iterator[psycopg.Connection[Any]]:
        """The database as its superuser, by its unix socket: no cut is in the way."""
        parameters = {"host": str(self.folder), "port": self.services[POSTGRES].port, "dbname": DATABASE_NAME}
        with psycopg.connect(
            **parameters,
            user=ROLE_NAMES["superuser"],
            password=self._passwords["superuser"],
            connect_timeout=5,
            autocommit=True,
        ) as connection:
            yield connection

    # ---- services

    def _postgres(self) -> Service:
        data_dir = self.folder / "postgres"
        with EmbeddedPostgres(PostgresConfig(data_dir)):
            pass  # its cluster, roles and database are made
        self._passwords = read_passwords(data_dir / "passwords.json")
        cluster, host = data_dir / "cluster", self._hosts[POSTGRES]
        account = choose_account(cluster)
        binaries = find_binaries(None, account, data_dir)
        with (cluster / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.99.0.0/24 scram-sha-256\n")
        port = self._port(POSTGRES)
        os.chown(self.folder, account.uid, account.gid)
        settings = _POSTGRES_SETTINGS | {
            "listen_addresses": host.address,
            "port": str(port),
            "unix_socket_directories": str(self.folder),
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]

        def start() -> subprocess.Popen[bytes]:
            # Its processes are killed together, and the socket of the dead one stays: nobody else is on it.
            (cluster / "postmaster.pid").unlink(missing_ok=True)
            for left in self.folder.glob(".s.PGSQL.*"):
                left.unlink()
            return self._run(host, shim_command(account, [binaries.postgres, "-D", cluster, *options]), {})

        def is_ready() -> bool:
            try:
                with self.database():
                    return True
            except psycopg.OperationalError:
                return False

        return Service(POSTGRES, host, port, start, is_ready)

    def _control(self, name: str, key_encryption_key: str) -> Service:
        postgres = self.services[POSTGRES]
        urls = {
            role: f"postgresql://{ROLE_NAMES[role]}:{self._passwords[role]}@{postgres.endpoint}/{DATABASE_NAME}"
            for role in ("owner", "app")
        }
        environment = {
            "SALTERN_DATABASE_URL": urls["app"],
            "SALTERN_MIGRATION_DATABASE_URL": urls["owner"],
            "SALTERN_KEY_ENCRYPTION_KEY": key_encryption_key,
            "SALTERN_LEASE_DURATION_S": str(LEASE_S),
        }
        host, port = self._hosts[name], self._port(name)
        arguments = ["control", "--listen", f"{host.address}:{port}", "--metrics-listen", "off"]
        return self._serve(name, host, port, arguments, environment)

    def _node(self, name: str, control: str, key_file: Path) -> Service:
        host, port = self._hosts[name], self._port(name)
        arguments = ["node", "--node-id", name, "--control", control, "--api-key-file", str(key_file)]
        arguments += ["--listen", f"{host.address}:{port}", "--grpc-listen", f"{host.address}:0"]
        arguments += ["--metrics-listen", "off", "--dram-bytes", str(64 * MIB), "--no-prefault", "--no-copy-tuning"]
        return self._serve(name, host, port, arguments, {})

    def _serve(
        self, name: str, host: Host, port: int, arguments: Sequence[str], environment: dict[str, str]
    ) -> Service:
        state_dir, ready_file = self.folder / name, self.folder / f"{name}.ready"
        state_dir.mkdir(mode=0o700)
        # setpriv: a run that is killed leaves no process behind.
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "saltern", "serve", *arguments]
        command += ["--allow-plaintext"]
        command += ["--state-dir", str(state_dir), "--ready-file", str(ready_file)]

        def start() -> subprocess.Popen[bytes]:
            ready_file.unlink(missing_ok=True)
            code = self.code[name]
            paths = {"PYTHONPATH": f"{code}:{code / 'clients'}"}  # before what is installed
            return self._run(host, command, environment | paths, code)

        return Service(name, host, port, start, ready_file.exists)

    def owner_url(self) -> str:
        """The database as the role that owns its schema."""
        endpoint, password = self.services[POSTGRES].endpoint, self._passwords["owner"]
        return f"postgresql://{ROLE_NAMES['owner']}:{password}@{endpoint}/{DATABASE_NAME}"

    def _run(
        self, host: Host, command: Sequence[str], environment: dict[str, str], code: Path = ROOT
    ) -> subprocess.Popen[bytes]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
        return subprocess.Popen(
            host.command(list(map(str, command))),
            cwd=code,
            env=clean | environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=host.descriptors,
        )

    def _port(self, name: str) -> int:
        if self.can_cut:
            return _PORTS[name]
        with socket.socket() as probe:
            probe.bind((self._hosts[name].address, 0))
            return int(probe.getsockname()[1])

    # ---- tenants

    def _add_tenant(self, tenant: str, namespaces: Sequence[str]) -> str:
        admin, parent = self.admin, tenant_name(TenantId(tenant))
        admin.call(admin.tenants.CreateTenant, CreateTenantRequest(tenant_id=tenant, tenant=Tenant()))
        tiers = [TierQuota(tier=TIER_DRAM, limit_bytes=LIMIT_BYTES)]
        request = UpdateQuotaRequest(quota=Quota(name=quota_name(TenantId(tenant)), tiers=tiers))
        admin.call(admin.quotas.UpdateQuota, request)
        for namespace in namespaces:
            body = Namespace(model_fingerprint="faults", block_tokens=16, block_bytes=BLOCK_BYTES)
            request_of_it = CreateNamespaceRequest(parent=parent, namespace_id=namespace, namespace=body)
            admin.call(admin.namespaces.CreateNamespace, request_of_it)
        key = CreateApiKeyRequest(parent=parent, api_key_id="faults", api_key=ApiKey(role=ROLE_WRITER))
        return str(admin.call(admin.credentials.CreateApiKey, key).secret)

    def _write_key(self, name: str, request: CreateApiKeyRequest) -> Path:
        path = self.folder / f"{name}.key"
        path.touch(0o600)
        path.write_text(self.admin.call(self.admin.credentials.CreateApiKey, request).secret)
        return path


@contextmanager
def running_deployment(log: Path | None = None, code: Path = ROOT) -> Iterator[Deployment]:
    """All of it for the time of the block; the end of what the processes said is told if that ends badly.

    Args:
        log: where all of it goes; None for nowhere.
        code: the folder of the release that everything starts with.
    """
    folder = Path(tempfile.mkdtemp(prefix="saltern-faults-"))
    folder.chmod(0o755)  # Postgres runs as another user when we are root
    hosts = (POSTGRES, *CONTROLS, *NODES)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        made = stack.enter_context(network({CONTROL_NAME: CONTROLS}, hosts=hosts))
        try:
            yield stack.enter_context(_deployed(folder, made, code))
        except BaseException as error:
            said = (folder / "all.log").read_text(errors="replace")
            error.add_note("the processes said last:\n" + said[-8192:])
            raise
        finally:
            if log is not None:
                shutil.copyfile(folder / "all.log", log)


@contextmanager
def _deployed(folder: Path, hosts: dict[str, Host], code: Path) -> Iterator[Deployment]:
    with ExitStack() as stack:
        yield Deployment(folder, hosts, stack, code)
