"""The whole service from its own commands: Postgres, a control plane that can be killed, a node, tenants."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from dataplane.io.engines import MooncakeSettings
from saltern.admin.v1.credentials_pb2 import ROLE_NODE, ROLE_PLATFORM_ADMIN, ApiKey, CreateApiKeyRequest
from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, Namespace
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TierQuota, UpdateQuotaRequest
from saltern.admin.v1.quotas_pb2 import Quota as QuotaMessage
from saltern.admin.v1.quotas_pb2_grpc import QuotaServiceStub
from saltern.admin.v1.tenants_pb2 import DeleteTenantRequest
from saltern.admin.v1.tenants_pb2_grpc import TenantServiceStub
from saltern.admin_client import AdminClient, open_channel, redeem_bootstrap_token
from saltern.admin_client import ApiKey as Secret
from saltern.client import Client
from saltern.demo.member import Member
from saltern.errors import SalternError
from saltern.keys import BlockKey
from saltern.names import TenantId, quota_name, tenant_name
from saltern.results import Stored
from saltern.rpc_errors import error_from_rpc
from tests.conftest import SessionPostgres
from tests.isolation.adapter import Deployment, Quota, TenantClient
from tests.support.control import migrate, text_of
from tests.support.waiting import wait_until

#: Far more than a start takes; a machine that is busy with other things may make it slow.
START_S = 180.0
BLOCK_BYTES = 65536
_PROBE = BlockKey(b"\xff" * 32)


class Served:
    """One ``saltern serve ...`` process, ready when made."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], folder: Path, name: str) -> None:
        ready_file = folder / f"{name}.ready.json"
        ready_file.unlink(missing_ok=True)
        self._log = (folder / f"{name}.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "saltern", "serve", *arguments, "--ready-file", str(ready_file)],
            env={**{k: v for k, v in os.environ.items() if not k.startswith("SALTERN_")}, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            wait_until(lambda: ready_file.exists() or self._process.poll() is not None, START_S)
            self.ready: dict[str, Any] = json.loads(ready_file.read_text())
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._log.close()


class SalternDeployment(Deployment):
    """A running service with its tenants, each with the namespace ``chat``."""

    def __init__(
        self, start_control: Callable[[str], Served], admin_secret: str, make_client: Callable[[Client], TenantClient]
    ) -> None:
        self._start_control = start_control
        self._make_client = make_client
        self.admin_secret = admin_secret
        self.members: dict[str, Member] = {}
        self.control: Served

    @property
    def endpoint(self) -> str:
        return str(self.control.ready["endpoint"])

    def client(self, tenant: str) -> TenantClient:
        return self._make_client(self.members[tenant].client)

    def restart_management(self, while_down: Callable[[], None]) -> None:
        endpoint = self.endpoint
        self.control.kill()
        while_down()
        self.control.stop()
        self.control = self._start_control(endpoint)
        self._wait_until_it_manages_again()

    def _wait_until_it_manages_again(self) -> None:
        """A namespace made by the new control plane reaches the node."""
        tenant, member = next(iter(self.members.items()))
        with AdminClient(self.endpoint, Secret(self.admin_secret)) as admin:
            fresh = Namespace(model_fingerprint="fresh", block_tokens=16, block_bytes=BLOCK_BYTES)
            request = CreateNamespaceRequest(
                parent=tenant_name(TenantId(tenant)), namespace_id="fresh", namespace=fresh
            )
            admin.call(admin.namespaces.CreateNamespace, request)
        with Client(control=self.endpoint, api_key=member._secret, namespace="fresh", deadline_ms=10_000) as client:
            wait_until(lambda: client.put_many([(_PROBE, b"probe")]) == [Stored()], START_S)

    def administer_without_right(self, by: str, victim: str) -> dict[str, str]:
        tier = TierQuota(tier=TIER_DRAM, limit_bytes=2**33)
        raise_own = UpdateQuotaRequest(quota=QuotaMessage(name=quota_name(TenantId(by)), tiers=[tier]))
        wipe = DeleteTenantRequest(name=tenant_name(TenantId(victim)))
        rise = CreateApiKeyRequest(api_key_id="mine", api_key=ApiKey(role=ROLE_PLATFORM_ADMIN))
        answers: dict[str, str] = {}
        method: Any
        request: Any
        with open_channel(self.endpoint) as channel:
            for what, method, request in (
                ("raise own quota, no credential", QuotaServiceStub(channel).UpdateQuota, raise_own),
                ("wipe the neighbour, no credential", TenantServiceStub(channel).DeleteTenant, wipe),
            ):
                answers[what] = _answer(partial(method, request, timeout=30))
        with AdminClient(self.endpoint, Secret(self.members[by]._secret)) as client:
            for what, method, request in (
                ("raise own quota, a client's key", client.quotas.UpdateQuota, raise_own),
                ("wipe the neighbour, a client's key", client.tenants.DeleteTenant, wipe),
                ("become an administrator, a client's key", client.credentials.CreateApiKey, rise),
            ):
                answers[what] = _answer(partial(client.call, method, request))
        return answers


def _answer(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return error_from_rpc(error).reason
    except SalternError as error:
        return error.reason
    return ""


@contextmanager
def running_deployment(
    tenants: Mapping[str, Quota],
    *,
    capacity_bytes: int,
    make_client: Callable[[Client], TenantClient],
    mooncake: MooncakeSettings | None = None,
) -> Iterator[Deployment]:
    """Start everything, make the tenants, and stop everything at the end of the block.

    ``mooncake`` is a store below the node.
    """
    # Postgres runs as another user when we are root: it must be able to pass through this folder.
    folder = Path(tempfile.mkdtemp(prefix="saltern-isolation-"))
    folder.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        server = stack.enter_context(EmbeddedPostgres(PostgresConfig(folder / "postgres")))
        database = stack.enter_context(SessionPostgres(server).fresh_database(migrate))  # type: ignore[arg-type]  # any object with the two URLs
        urls = {
            "SALTERN_DATABASE_URL": text_of(database.app),
            "SALTERN_MIGRATION_DATABASE_URL": text_of(database.owner),
        }
        state = folder / "control"

        def start_control(listen: str) -> Served:
            return Served(
                ["control", "--listen", listen, "--metrics-listen", "off", "--state-dir", str(state)],
                urls,
                folder,
                "control",
            )

        first = start_control("127.0.0.1:0")
        deployment = SalternDeployment(start_control, "", make_client)
        deployment.control = first
        stack.callback(lambda: deployment.control.stop())
        token = (state / "bootstrap-token").read_text().strip()
        deployment.admin_secret = redeem_bootstrap_token(deployment.endpoint, token).secret
        with AdminClient(deployment.endpoint, Secret(deployment.admin_secret)) as admin:
            request = CreateApiKeyRequest(api_key_id="node-1", api_key=ApiKey(role=ROLE_NODE, node_id="node-1"))
            key_file = folder / "node.key"
            key_file.touch(0o600)
            key_file.write_text(admin.call(admin.credentials.CreateApiKey, request).secret)
            arguments = [
                *("node", "--node-id", "node-1", "--control", deployment.endpoint, "--api-key-file", str(key_file)),
                *(
                    "--listen",
                    "127.0.0.1:0",
                    "--grpc-listen",
                    "127.0.0.1:0",
                    "--metrics-listen",
                    "off",
                    "--dram-bytes",
                    str(capacity_bytes),
                ),
                *("--state-dir", str(folder / "node"), "--shm-path", str(folder / "node.sock"), "--no-prefault"),
            ]
            if mooncake is not None:
                arguments += ["--engine", "mooncake", "--mooncake-master", str(mooncake.master), "--ssd-bytes", "64MiB"]
            stack.callback(Served(arguments, {}, folder, "node").stop)
            for tenant, quota in tenants.items():
                joining = Member.join(
                    admin,
                    tenant=tenant,
                    namespace="chat",
                    limit_bytes=quota.limit_bytes,
                    reserved_bytes=quota.reserved_bytes,
                    block_bytes=BLOCK_BYTES,
                )
                member = deployment.members[tenant] = stack.enter_context(joining)
                with suppress(SalternError):
                    wait_until(lambda c=member.client: c.put_many([(_PROBE, b"p")]) == [Stored()], START_S)  # type: ignore[misc]
                member.client.delete([_PROBE])
        yield deployment
