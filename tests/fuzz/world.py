"""A control plane in a process of its own over a real PostgreSQL, two tenants in it, and a key of every role of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from saltern.admin.v1 import (
    credentials_pb2,
    credentials_pb2_grpc,
    namespaces_pb2,
    namespaces_pb2_grpc,
    quotas_pb2,
    quotas_pb2_grpc,
    sharing_groups_pb2,
    sharing_groups_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
)
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.node.v1 import node_pb2, node_pb2_grpc
from tests.support.control import DatabaseUrls, bearer, text_of
from tests.support.waiting import wait_until

OWN, OTHER, SAND = "alpha", "bravo", "sand"
#: Nodes: whose key the fuzz has, and one that it can only name.
GHOST, KEEPER = "ghost-1", "keeper"
KEEPER_ROLE = "keeper"
#: Nobody but bravo and the platform may ever see these; no request of the fuzz holds one.
SECRETS = ("canary-display-name", "canary model fp16", "canary-key-label", "canary-project", "canaryendpoint")
#: Names of bravo's resources: an answer to another tenant may repeat those that it was asked for, and no other.
NAMES = ("canary-ns", "canary-key", "canary-group")
ROLES = {
    "tenant-admin": credentials_pb2.ROLE_TENANT_ADMIN,
    "tenant-auditor": credentials_pb2.ROLE_TENANT_AUDITOR,
    "writer": credentials_pb2.ROLE_WRITER,
    "reader": credentials_pb2.ROLE_READER,
}
GIB = 2**30


class ControlProcess:
    """``saltern serve control``, watched from outside."""

    def __init__(self, urls: DatabaseUrls, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "log"
        ready = folder / "ready.json"
        command = [
            sys.executable, "-m", "saltern", "serve", "control", "--metrics-listen", "off",
            "--state-dir", str(folder), "--database-url", text_of(urls.app),
            "--migration-database-url", text_of(urls.owner), "--listen", "127.0.0.1:0", "--ready-file", str(ready),
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_until(lambda: ready.exists() or not self.is_alive, limit_s=60)
            assert self.is_alive, self._log.read_text()[-4000:]
        except BaseException:
            self.stop()
            raise
        self.endpoint: str = json.loads(ready.read_text())["endpoint"]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()

    def unexpected(self) -> list[str]:
        """Lines of its log about what nobody expected; that a caller sends nonsense is expected."""
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if "Traceback" in line or '"exception"' in line or "unexpected error" in line]


@dataclass
class World:
    """Attributes:
    keys: API keys by role; those of a tenant are alpha's.
    other_secrets: what bravo has and nobody may see, as texts.
    """

    control: ControlProcess
    channel: grpc.aio.Channel
    keys: dict[str, str] = field(default_factory=dict)
    other_secrets: list[str] = field(default_factory=list)
    _tokens: dict[str, str] = field(default_factory=dict)

    async def token(self, role: str) -> str:
        """A token of the control plane for ``role``."""
        if role not in self._tokens:
            auth: Any = auth_pb2_grpc.AuthServiceStub(self.channel)
            ask = auth_pb2.ExchangeApiKeyRequest(api_key=self.keys[role], audience=auth_pb2.AUDIENCE_CONTROL)
            self._tokens[role] = (await auth.ExchangeApiKey(ask)).access_token
        return self._tokens[role]

    def forget_token(self, role: str, token: str) -> None:
        """It is good for nothing any more: the fuzz may revoke it."""
        if self._tokens.get(role) == token:
            del self._tokens[role]

    def forget_tokens(self) -> None:
        """Whoever asks next gets a fresh one."""
        self._tokens.clear()

    async def _fill(self) -> None:
        auth: Any = auth_pb2_grpc.AuthServiceStub(self.channel)
        bootstrap = (self.control.folder / "bootstrap-token").read_text().strip()
        redeemed = await auth.RedeemBootstrapToken(auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=bootstrap))
        self.keys["platform-admin"] = redeemed.secret
        admin = bearer(await self.token("platform-admin"))
        tenants: Any = tenants_pb2_grpc.TenantServiceStub(self.channel)
        namespaces: Any = namespaces_pb2_grpc.NamespaceServiceStub(self.channel)
        quotas: Any = quotas_pb2_grpc.QuotaServiceStub(self.channel)
        groups: Any = sharing_groups_pb2_grpc.SharingGroupServiceStub(self.channel)
        for tenant, label, names in ((OWN, "", ("chat",)), (OTHER, SECRETS[0], (NAMES[0],)), (SAND, "", ("chat",))):
            request = tenants_pb2.CreateTenantRequest(tenant_id=tenant, tenant=tenants_pb2.Tenant(display_name=label))
            await tenants.CreateTenant(request, metadata=admin)
            model = SECRETS[1] if tenant == OTHER else "model bf16"
            for name in names:
                body = namespaces_pb2.Namespace(model_fingerprint=model, block_tokens=16, block_bytes=65536)
                await namespaces.CreateNamespace(
                    namespaces_pb2.CreateNamespaceRequest(
                        parent=f"tenants/{tenant}", namespace_id=name, namespace=body
                    ),
                    metadata=admin,
                )
            tier = quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=GIB, weight=100)
            quota = quotas_pb2.Quota(name=f"tenants/{tenant}/quota", tiers=[tier])
            await quotas.UpdateQuota(quotas_pb2.UpdateQuotaRequest(quota=quota), metadata=admin)
        for role, number in ROLES.items():
            self.keys[role] = await self._add_key(OWN, f"fuzz-{role}", role=number)
        for role, node in (("node", GHOST), (KEEPER_ROLE, KEEPER)):
            self.keys[role] = await self._add_key("", role, role=credentials_pb2.ROLE_NODE, node_id=node)
        self.other_secrets = [
            await self._add_key(
                OTHER, NAMES[1], role=credentials_pb2.ROLE_WRITER, display_name=SECRETS[2], project_id=SECRETS[3]
            )
        ]
        group = sharing_groups_pb2.CreateSharingGroupRequest(
            parent=f"tenants/{OTHER}", sharing_group_id=NAMES[2], namespace=f"tenants/{OTHER}/namespaces/{NAMES[0]}"
        )
        other_admin = await self._add_key(OTHER, "admin", role=credentials_pb2.ROLE_TENANT_ADMIN)
        token = await auth.ExchangeApiKey(
            auth_pb2.ExchangeApiKeyRequest(api_key=other_admin, audience=auth_pb2.AUDIENCE_CONTROL)
        )
        made = await groups.CreateSharingGroup(group, metadata=bearer(token.access_token))
        self.other_secrets += [other_admin, made.uid]
        await self._register_nodes()

    async def _register_nodes(self) -> None:
        nodes: Any = node_pb2_grpc.NodeServiceStub(self.channel)
        for role, node in ((KEEPER_ROLE, KEEPER), ("node", GHOST)):
            request = node_pb2.RegisterNodeRequest(
                node_id=node,
                endpoint=auth_pb2.NodeEndpoint(wire_endpoint=f"{SECRETS[4]}:7701"),
                capacities=[node_pb2.TierCapacity(tier=quotas_pb2.TIER_DRAM, capacity_bytes=64 * GIB)],
            )
            await nodes.RegisterNode(request, metadata=bearer(await self.token(role)))

    async def _add_key(self, tenant: str, key_id: str, **fields: Any) -> str:
        credentials: Any = credentials_pb2_grpc.CredentialServiceStub(self.channel)
        request = credentials_pb2.CreateApiKeyRequest(
            parent=f"tenants/{tenant}" if tenant else "", api_key_id=key_id, api_key=credentials_pb2.ApiKey(**fields)
        )
        made = await credentials.CreateApiKey(request, metadata=bearer(await self.token("platform-admin")))
        secret: str = made.secret
        return secret


@asynccontextmanager
async def world_on(control: ControlProcess) -> AsyncIterator[World]:
    """Fill a fresh deployment; calls go over one channel."""
    async with grpc.aio.insecure_channel(control.endpoint) as channel:
        world = World(control, channel)
        await world._fill()
        yield world


@contextmanager
def control_process(urls: DatabaseUrls, folder: Path) -> Iterator[ControlProcess]:
    process = ControlProcess(urls, folder)
    try:
        yield process
    finally:
        process.stop()
