"""The administrative services in the test's own process, on a real database and port, behind a door that believes.

The door takes the caller from metadata as it stands, so that these tests are about the services alone; the real door is
tested with the whole control plane.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import grpc
import pytest
from sqlalchemy import select

from controlplane.admin import AdminParts, add_services
from controlplane.audit import DenialLog, to_chained_record
from controlplane.caller import Caller, calling_as
from controlplane.db import Database, connect, models
from controlplane.key_encryption.encryption_keys import EncryptionKeys
from controlplane.node.policy_feed import PolicyFeed
from controlplane.secrets import Keyring, LocalKeyEncryptionKey
from saltern.admin.v1 import (
    audit_pb2_grpc,
    credentials_pb2,
    credentials_pb2_grpc,
    key_encryption_keys_pb2_grpc,
    namespaces_pb2,
    namespaces_pb2_grpc,
    nodes_pb2_grpc,
    quotas_pb2,
    quotas_pb2_grpc,
    salt_policies_pb2_grpc,
    sharing_groups_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
    tokens_pb2_grpc,
    usage_pb2_grpc,
)
from saltern.audit.chain import ChainFault, verify
from saltern.errors import SalternError
from saltern.names import TenantId
from saltern.rpc_errors import error_from_rpc
from tenants.roles import Role
from tests.support.control import DatabaseUrls
from tests.support.scopes import EveryTenant

Metadata = tuple[tuple[str, str], ...]
ResponseT = TypeVar("ResponseT")
GIB = 2**30


def calling(role: Role, tenant: str = "", key: str = "test") -> Metadata:
    """Metadata of a call by a key of ``role``."""
    return (("test-caller", f"{role.value} {tenant or '-'} {key}"),)


PLATFORM = calling(Role.PLATFORM_ADMIN)


def admin_of(tenant: str, key: str = "admin") -> Metadata:
    return calling(Role.TENANT_ADMIN, tenant, key)


class BelievingDoor(grpc.aio.ServerInterceptor):
    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata)
        if "test-caller" not in metadata:
            return handler
        role, tenant, key = metadata["test-caller"].split()
        owner = None if tenant == "-" else TenantId(tenant)
        subject = f"apiKeys/{key}" if owner is None else f"tenants/{tenant}/apiKeys/{key}"
        caller = Caller(subject, owner, Role(role))

        async def unary(request: Any, context: Any) -> Any:
            with calling_as(caller):
                return await handler.unary_unary(request, context)

        async def streaming(request: Any, context: Any) -> Any:
            with calling_as(caller):
                async for response in handler.unary_stream(request, context):
                    yield response

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                streaming,
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            unary,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


@dataclass
class FakeClock:
    """A clock that stands, and moves a little with every look, so that no two events have one time."""

    now: datetime = field(default_factory=lambda: datetime(2026, 1, 1, tzinfo=UTC))

    def __call__(self) -> datetime:
        self.now += timedelta(microseconds=1)
        return self.now


class Admin:
    """Stubs of every service, and short ways to the common calls."""

    def __init__(self, channel: grpc.aio.Channel, database: Database, clock: FakeClock) -> None:
        self.database = database
        self.clock = clock
        self.channel = channel
        self.tenants: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        self.namespaces: Any = namespaces_pb2_grpc.NamespaceServiceStub(channel)
        self.quotas: Any = quotas_pb2_grpc.QuotaServiceStub(channel)
        self.salt_policies: Any = salt_policies_pb2_grpc.SaltPolicyServiceStub(channel)
        self.sharing_groups: Any = sharing_groups_pb2_grpc.SharingGroupServiceStub(channel)
        self.credentials: Any = credentials_pb2_grpc.CredentialServiceStub(channel)
        self.tokens: Any = tokens_pb2_grpc.TokenServiceStub(channel)
        self.audit: Any = audit_pb2_grpc.AuditServiceStub(channel)
        self.key_encryption_keys: Any = key_encryption_keys_pb2_grpc.KeyEncryptionKeyServiceStub(channel)
        self.usage: Any = usage_pb2_grpc.UsageServiceStub(channel)
        self.nodes: Any = nodes_pb2_grpc.NodesServiceStub(channel)

    async def create_tenant(self, tenant: str, *, display_name: str = "", request_id: str = "") -> tenants_pb2.Tenant:
        request = tenants_pb2.CreateTenantRequest(
            tenant_id=tenant, tenant=tenants_pb2.Tenant(display_name=display_name), request_id=request_id
        )
        return await self.tenants.CreateTenant(request, metadata=PLATFORM)

    async def delete_tenant(self, tenant: str) -> None:
        await self.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name=f"tenants/{tenant}"), metadata=PLATFORM)

    async def create_namespace(
        self, tenant: str, namespace: str, metadata: Metadata = PLATFORM
    ) -> namespaces_pb2.Namespace:
        return await self.namespaces.CreateNamespace(namespace_request(tenant, namespace), metadata=metadata)

    async def create_api_key(
        self,
        tenant: str,
        key_id: str,
        role: int = credentials_pb2.ROLE_WRITER,
        metadata: Metadata = PLATFORM,
        request_id: str = "",
    ) -> credentials_pb2.CreateApiKeyResponse:
        request = credentials_pb2.CreateApiKeyRequest(
            parent=f"tenants/{tenant}" if tenant else "",
            api_key_id=key_id,
            api_key=credentials_pb2.ApiKey(role=role),  # type: ignore[arg-type]
            request_id=request_id,
        )
        return await self.credentials.CreateApiKey(request, metadata=metadata)

    async def set_quota(
        self,
        tenant: str,
        *,
        reserved_bytes: int = 0,
        limit_bytes: int = GIB,
        weight: int = 0,
        tier: int = quotas_pb2.TIER_DRAM,
        etag: str = "",
        allow_below_use: bool = False,
    ) -> quotas_pb2.Quota:
        request = quota_request(tenant, reserved_bytes, limit_bytes, weight=weight, tier=tier, etag=etag)
        request.allow_below_use = allow_below_use
        return await self.quotas.UpdateQuota(request, metadata=PLATFORM)

    async def set_rates(
        self,
        tenant: str,
        operations_per_s: int = 0,
        bytes_per_s: int = 0,
        ssd_write_bytes_per_s: int = 0,
        *,
        etag: str = "",
        metadata: Metadata = PLATFORM,
    ) -> quotas_pb2.Quota:
        rates = quotas_pb2.RateLimits(
            operations_per_s=operations_per_s,
            bytes_per_s=bytes_per_s,
            ssd_write_bytes_per_s=ssd_write_bytes_per_s,
        )
        quota = quotas_pb2.Quota(name=f"tenants/{tenant}/quota", rates=rates, etag=etag)
        return await self.quotas.UpdateQuota(quotas_pb2.UpdateQuotaRequest(quota=quota), metadata=metadata)

    async def register_node(
        self, node: str, dram_capacity_bytes: int, last_report_time: datetime | None = None
    ) -> None:
        async with self.database.transaction() as session:
            session.add(
                models.Node(
                    id=node,
                    wire_endpoint="127.0.0.1:7701",
                    shm_path="",
                    grpc_endpoint="127.0.0.1:7702",
                    host_id="host",
                    dram_capacity_bytes=dram_capacity_bytes,
                    software_version="0",
                    register_time=self.clock(),
                    last_report_time=last_report_time or self.clock(),
                )
            )

    async def events(self, chain: str) -> list[models.AuditEvent]:
        """A whole chain, oldest first."""
        async with self.database.transaction() as session:
            statement = select(models.AuditEvent).where(models.AuditEvent.chain == chain)
            return list(await session.scalars(statement.order_by(models.AuditEvent.sequence)))

    async def chain_faults(self, chain: str) -> list[ChainFault]:
        return verify(chain, map(to_chained_record, await self.events(chain)))

    async def policy_version(self) -> int:
        async with self.database.transaction() as session:
            return (await session.execute(select(models.PolicyState.version))).scalar_one()


def namespace_request(tenant: str, namespace: str, **changes: Any) -> namespaces_pb2.CreateNamespaceRequest:
    fields = {"model_fingerprint": "model bf16", "block_tokens": 16, "block_bytes": 65536} | changes
    return namespaces_pb2.CreateNamespaceRequest(
        parent=f"tenants/{tenant}", namespace_id=namespace, namespace=namespaces_pb2.Namespace(**fields)
    )


def quota_request(
    tenant: str,
    reserved_bytes: int,
    limit_bytes: int,
    *,
    weight: int = 0,
    tier: int = quotas_pb2.TIER_DRAM,
    etag: str = "",
) -> quotas_pb2.UpdateQuotaRequest:
    entry = quotas_pb2.TierQuota(
        tier=tier,  # type: ignore[arg-type]
        reserved_bytes=reserved_bytes,
        limit_bytes=limit_bytes,
        weight=weight,
    )
    return quotas_pb2.UpdateQuotaRequest(
        quota=quotas_pb2.Quota(name=f"tenants/{tenant}/quota", tiers=[entry], etag=etag)
    )


@asynccontextmanager
async def admin_services(urls: DatabaseUrls) -> AsyncIterator[Admin]:
    """Serve for the time of the block."""
    database, clock = connect(urls.app, pool_connections=8), FakeClock()
    server = grpc.aio.server(interceptors=[BelievingDoor()])
    key = LocalKeyEncryptionKey(bytes(32))
    keys = EncryptionKeys(lambda: [key], None, Keyring([key], key.key_id))
    feed = PolicyFeed(urls.app)
    parts = AdminParts(
        database,
        keys.ring,
        DenialLog(database, clock),
        feed,
        clock,
        encryption_keys=keys,
        allow_unbound_node_keys=True,
    )
    add_services(server, parts)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Admin(channel, EveryTenant(database), clock)
    finally:
        await server.stop(None)
        await database.close()


async def refused(call: Awaitable[Any]) -> SalternError:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return error_from_rpc(caught.value)
