"""A control plane in the test's own process, on a real database and a real port, and short ways to talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from sqlalchemy import URL

import migrations
from controlplane.auth.signing_keys import KeyRing, load_key_ring
from controlplane.clock import Clock, utc_now
from controlplane.db import Database
from controlplane.key_encryption.encryption_keys import load_encryption_keys
from controlplane.key_encryption.kms import KmsClient
from controlplane.secrets import KeyEncryptionKey
from controlplane.server import ControlPlane, running
from controlplane.settings import ControlSettings
from saltern.admin.v1 import (
    audit_pb2,
    audit_pb2_grpc,
    credentials_pb2,
    credentials_pb2_grpc,
    key_encryption_keys_pb2_grpc,
    namespaces_pb2,
    namespaces_pb2_grpc,
    nodes_pb2_grpc,
    policy_pb2_grpc,
    quotas_pb2,
    quotas_pb2_grpc,
    salt_policies_pb2,
    salt_policies_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
    tokens_pb2_grpc,
    usage_pb2_grpc,
)
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.endpoints import Endpoint
from saltern.errors import SalternError
from saltern.node.v1 import node_pb2_grpc
from saltern.rpc_errors import error_from_rpc
from tests.support.scopes import connect_to_all

ANY_PORT = Endpoint("127.0.0.1", 0)


class DatabaseUrls(Protocol):
    """What ``postgres.fresh_database`` gives."""

    owner: URL
    app: URL


def text_of(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def migrate(database: DatabaseUrls) -> None:
    """Prepares a template database, see ``TestPostgres.fresh_database``."""
    migrations.upgrade(text_of(database.owner))


def settings_for(database: DatabaseUrls, state_dir: Path, listen: Endpoint = ANY_PORT) -> ControlSettings:
    return ControlSettings(
        listen=listen,
        metrics_listen=Endpoint("127.0.0.1", 0),
        database_url=text_of(database.app),
        migration_database_url=text_of(database.owner),
        state_dir=state_dir,
        allow_unbound_node_keys=True,  # most tests have one key for all of their nodes
    )


@dataclass
class Control:
    """A running control plane.

    ``database``, ``key_encryption_key``, ``key_ring``: its own, to prepare rows and to sign what it would have signed.
    """

    plane: ControlPlane
    state_dir: Path
    channel: grpc.aio.Channel
    database: Database
    key_encryption_key: KeyEncryptionKey
    key_ring: KeyRing
    owner_url: URL

    admin_key: str = ""

    def __post_init__(self) -> None:
        self.auth: Any = auth_pb2_grpc.AuthServiceStub(self.channel)
        self.node: Any = node_pb2_grpc.NodeServiceStub(self.channel)
        self.tenants: Any = tenants_pb2_grpc.TenantServiceStub(self.channel)
        self.namespaces: Any = namespaces_pb2_grpc.NamespaceServiceStub(self.channel)
        self.quotas: Any = quotas_pb2_grpc.QuotaServiceStub(self.channel)
        self.salt_policies: Any = salt_policies_pb2_grpc.SaltPolicyServiceStub(self.channel)
        self.credentials: Any = credentials_pb2_grpc.CredentialServiceStub(self.channel)
        self.tokens: Any = tokens_pb2_grpc.TokenServiceStub(self.channel)
        self.audit: Any = audit_pb2_grpc.AuditServiceStub(self.channel)
        self.key_encryption_keys: Any = key_encryption_keys_pb2_grpc.KeyEncryptionKeyServiceStub(self.channel)
        self.usage: Any = usage_pb2_grpc.UsageServiceStub(self.channel)
        self.nodes: Any = nodes_pb2_grpc.NodesServiceStub(self.channel)
        self.policy: Any = policy_pb2_grpc.PolicyServiceStub(self.channel)

    async def redeem(self) -> str:
        """Redeem the bootstrap token; keeps and returns the first platform-admin API key."""
        request = auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=self.bootstrap_token())
        self.admin_key = (await self.auth.RedeemBootstrapToken(request)).secret
        return self.admin_key

    def bootstrap_token(self) -> str:
        return (self.state_dir / "bootstrap-token").read_text().strip()

    async def exchange(self, api_key: str, namespace_id: str = "", **narrowing: str) -> auth_pb2.ExchangeApiKeyResponse:
        """Exchange for a token of the control plane, or with a namespace for one of the nodes.

        ``narrowing``: ``project_id``, ``user_id``, ``session_id``.
        """
        audience = auth_pb2.AUDIENCE_NODE if namespace_id else auth_pb2.AUDIENCE_CONTROL
        request = auth_pb2.ExchangeApiKeyRequest(
            api_key=api_key, audience=audience, namespace_id=namespace_id, **narrowing
        )
        return await self.auth.ExchangeApiKey(request)

    async def bearer(self, api_key: str) -> tuple[tuple[str, str], ...]:
        """Metadata that authenticates as ``api_key``."""
        return bearer((await self.exchange(api_key)).access_token)

    async def add_tenant(self, tenant: str, *namespaces: str, limit_bytes: int = 0) -> None:
        """Make a tenant through the administrative services, with a DRAM quota if one is given."""
        metadata = await self.bearer(self.admin_key)
        request = tenants_pb2.CreateTenantRequest(tenant_id=tenant, tenant=tenants_pb2.Tenant())
        await self.tenants.CreateTenant(request, metadata=metadata)
        for namespace in namespaces:
            body = namespaces_pb2.Namespace(
                model_fingerprint=f"model of {namespace}", block_tokens=16, block_bytes=65536
            )
            await self.namespaces.CreateNamespace(
                namespaces_pb2.CreateNamespaceRequest(
                    parent=f"tenants/{tenant}", namespace_id=namespace, namespace=body
                ),
                metadata=metadata,
            )
        if limit_bytes:
            await self.set_quota(tenant, limit_bytes=limit_bytes)

    async def set_quota(self, tenant: str, *, limit_bytes: int, reserved_bytes: int = 0) -> None:
        tier = quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=limit_bytes, reserved_bytes=reserved_bytes)
        request = quotas_pb2.UpdateQuotaRequest(quota=quotas_pb2.Quota(name=f"tenants/{tenant}/quota", tiers=[tier]))
        await self.quotas.UpdateQuota(request, metadata=await self.bearer(self.admin_key))

    async def rotate_salt(self, tenant: str, *, grace_s: int | None = None) -> salt_policies_pb2.SaltPolicy:
        request = salt_policies_pb2.RotateSaltRequest(name=f"tenants/{tenant}/saltPolicy")
        if grace_s is not None:
            request.grace_period.FromSeconds(grace_s)
        return await self.salt_policies.RotateSalt(request, metadata=await self.bearer(self.admin_key))

    async def set_salt(self, tenant: str, **fields: Any) -> salt_policies_pb2.SaltPolicy:
        """Change the salt policy; ``fields`` are those of ``SaltPolicy``."""
        policy = salt_policies_pb2.SaltPolicy(name=f"tenants/{tenant}/saltPolicy", **fields)
        request = salt_policies_pb2.UpdateSaltPolicyRequest(salt_policy=policy)
        return await self.salt_policies.UpdateSaltPolicy(request, metadata=await self.bearer(self.admin_key))

    async def add_api_key(
        self,
        role: credentials_pb2.Role.ValueType,
        tenant: str = "",
        key_id: str = "key",
        expire_time: datetime | None = None,
        **binding: str,
    ) -> str:
        """Make an API key through the administrative services; returns its secret. ``binding``: ``project_id`` ..."""
        api_key = credentials_pb2.ApiKey(role=role, **binding)
        if expire_time is not None:
            api_key.expire_time.FromDatetime(expire_time)
        request = credentials_pb2.CreateApiKeyRequest(
            parent=f"tenants/{tenant}" if tenant else "", api_key_id=key_id, api_key=api_key
        )
        return (await self.credentials.CreateApiKey(request, metadata=await self.bearer(self.admin_key))).secret

    async def delete_api_key(self, name: str) -> None:
        request = credentials_pb2.DeleteApiKeyRequest(name=name)
        await self.credentials.DeleteApiKey(request, metadata=await self.bearer(self.admin_key))

    async def events(self, parent: str = "", *, exchanges: bool = False) -> list[audit_pb2.AuditEvent]:
        """The newest events of a chain, newest first; by default without the tokens that every call here needs."""
        request = audit_pb2.ListAuditEventsRequest(parent=parent, page_size=1000)
        response = await self.audit.ListAuditEvents(request, metadata=await self.bearer(self.admin_key))
        return [event for event in response.audit_events if exchanges or not _is_exchange(event)]


def _is_exchange(event: audit_pb2.AuditEvent) -> bool:
    granted = event.outcome == audit_pb2.AuditEvent.OUTCOME_SUCCESS
    return granted and event.method.endswith("/ExchangeApiKey")


@asynccontextmanager
async def control_plane(
    database: DatabaseUrls,
    state_dir: Path,
    *,
    listen: Endpoint = ANY_PORT,
    clock: Clock = utc_now,
    kms_endpoint: str | None = None,
    **changes: object,
) -> AsyncIterator[Control]:
    """Run a control plane for the time of the block; ``changes``: other settings than the defaults."""
    settings = settings_for(database, state_dir, listen).model_copy(update={"kms_endpoint": kms_endpoint, **changes})
    async with running(settings, clock) as plane:
        own = connect_to_all(text_of(database.app), pool_connections=4)
        kms = None if kms_endpoint is None else KmsClient(kms_endpoint)
        try:
            async with grpc.aio.insecure_channel(str(plane.endpoint)) as channel:
                ring = (await load_encryption_keys(own, state_dir, kms)).ring
                key_ring = await load_key_ring(own, ring)
                yield Control(plane, state_dir, channel, own, ring, key_ring, database.owner)
        finally:
            await own.close()
            if kms is not None:
                await kms.close()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def refused(call: Awaitable[Any]) -> SalternError:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return error_from_rpc(caught.value)
