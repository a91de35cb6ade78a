"""A tenant of the demo: made through the admin API, then used through the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from saltern.admin.v1.credentials_pb2 import ROLE_WRITER, ApiKey, CreateApiKeyRequest
from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, Namespace
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, Quota, TierQuota, UpdateQuotaRequest
from saltern.admin.v1.tenants_pb2 import CreateTenantRequest, Tenant
from saltern.admin_client import AdminClient, new_request_id
from saltern.client import Client
from saltern.credentials import Grant
from saltern.exchange import exchange_api_key
from saltern.names import NamespaceId, TenantId, quota_name, tenant_name
from saltern.traces import BLOCK_TOKENS

#: Generous: the demo measures the cache, it does not give it up.
CALL_DEADLINE_MS: Final = 30_000
_EXCHANGE_TIMEOUT_MS: Final = 10_000
_MODEL: Final = "demo-model@1/bf16/layout-1"


@dataclass(frozen=True, slots=True)
class Member:
    """A tenant with a namespace, a writer's API key and an open client.

    Attributes:
        first_grant: the token and salts that it was given when it joined; never renewed.
    """

    tenant: TenantId
    namespace: NamespaceId
    client: Client
    first_grant: Grant
    _control: str
    _secret: str = field(repr=False)

    @classmethod
    @contextmanager
    def join(
        cls,
        admin: AdminClient,
        *,
        tenant: str,
        namespace: str,
        limit_bytes: int,
        reserved_bytes: int,
        block_bytes: int,
        transport: str = "auto",
    ) -> Iterator[Member]:
        """Make the tenant and all that it needs, and yield it until the end of the block.

        Raises:
            SalternError: the control plane refused a step, or a node does not follow.
        """
        tenant_id, namespace_id = TenantId(tenant), NamespaceId(namespace)
        _make_tenant(admin, tenant_id, limit_bytes, reserved_bytes)
        _make_namespace(admin, tenant_id, namespace_id, block_bytes)
        secret = _make_key(admin, tenant_id)
        grant = exchange_api_key(admin.endpoint, secret, namespace_id, timeout_ms=_EXCHANGE_TIMEOUT_MS)
        admin.wait_for_policy()  # a node that has not heard of the namespace yet would refuse it
        with Client(
            control=admin.endpoint,
            api_key=secret,
            namespace=namespace,
            deadline_ms=CALL_DEADLINE_MS,
            transport=transport,
        ) as client:
            yield cls(tenant_id, namespace_id, client, grant, admin.endpoint, secret)

    def exchange(self, namespace: str | None = None) -> Grant:
        """Exchange the API key once more, for its own namespace or another one; raises as the control plane says."""
        wanted = NamespaceId(namespace or self.namespace)
        return exchange_api_key(self._control, self._secret, wanted, timeout_ms=_EXCHANGE_TIMEOUT_MS)


def _make_tenant(admin: AdminClient, tenant_id: TenantId, limit_bytes: int, reserved_bytes: int) -> None:
    tenant = Tenant(display_name=f"Demo tenant {tenant_id}")
    admin.call(
        admin.tenants.CreateTenant,
        CreateTenantRequest(tenant_id=tenant_id, tenant=tenant, request_id=new_request_id()),
    )
    tier = TierQuota(tier=TIER_DRAM, limit_bytes=limit_bytes, reserved_bytes=reserved_bytes)
    quota = Quota(name=quota_name(tenant_id), tiers=[tier])
    admin.call(admin.quotas.UpdateQuota, UpdateQuotaRequest(quota=quota, request_id=new_request_id()))


def _make_namespace(admin: AdminClient, tenant_id: TenantId, namespace_id: NamespaceId, block_bytes: int) -> None:
    namespace = Namespace(model_fingerprint=_MODEL, block_tokens=BLOCK_TOKENS, block_bytes=block_bytes)
    request = CreateNamespaceRequest(
        parent=tenant_name(tenant_id), namespace_id=namespace_id, namespace=namespace, request_id=new_request_id()
    )
    admin.call(admin.namespaces.CreateNamespace, request)


def _make_key(admin: AdminClient, tenant_id: TenantId) -> str:
    """Make a writer's API key and return its secret."""
    request = CreateApiKeyRequest(
        parent=tenant_name(tenant_id),
        api_key_id="replay",
        api_key=ApiKey(role=ROLE_WRITER, display_name="The demo's replay"),
        request_id=new_request_id(),
    )
    return admin.call(admin.credentials.CreateApiKey, request).secret
