"""Who may call what: every method with every kind of caller, against what exists and what does not (I1, I2)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete

from controlplane.db import models
from saltern.admin.v1 import (
    audit_pb2,
    credentials_pb2,
    key_encryption_keys_pb2,
    namespaces_pb2,
    nodes_pb2,
    quotas_pb2,
    salt_policies_pb2,
    sharing_groups_pb2,
    tenants_pb2,
    tokens_pb2,
    usage_pb2,
)
from saltern.errors import NotFoundError, PermissionDeniedError, UnauthenticatedError
from tenants.roles import PERMISSIONS, PLATFORM_ROLES, Permission, Role
from tests.support.admin import PLATFORM, Admin, calling, namespace_request, quota_request, refused


def _group(tenant: str) -> str:
    return f"tenants/{tenant}/sharingGroups/research"


#: Every method of something that belongs to a tenant: (service, method, what it needs, its request for a tenant).
TENANT_METHODS: list[tuple[str, str, Permission, Callable[[str], Any]]] = [
    ("tenants", "GetTenant", Permission.TENANTS_READ, lambda t: tenants_pb2.GetTenantRequest(name=f"tenants/{t}")),
    (
        "tenants",
        "UpdateTenant",
        Permission.TENANTS_MANAGE,
        lambda t: tenants_pb2.UpdateTenantRequest(tenant=tenants_pb2.Tenant(name=f"tenants/{t}")),
    ),
    (
        "tenants",
        "SuspendTenant",
        Permission.TENANTS_MANAGE,
        lambda t: tenants_pb2.SuspendTenantRequest(name=f"tenants/{t}"),
    ),
    (
        "tenants",
        "ResumeTenant",
        Permission.TENANTS_MANAGE,
        lambda t: tenants_pb2.ResumeTenantRequest(name=f"tenants/{t}"),
    ),
    (
        "tenants",
        "DeleteTenant",
        Permission.TENANTS_MANAGE,
        lambda t: tenants_pb2.DeleteTenantRequest(name=f"tenants/{t}"),
    ),
    ("namespaces", "CreateNamespace", Permission.NAMESPACES_MANAGE, lambda t: namespace_request(t, "new")),
    (
        "namespaces",
        "GetNamespace",
        Permission.NAMESPACES_READ,
        lambda t: namespaces_pb2.GetNamespaceRequest(name=f"tenants/{t}/namespaces/chat"),
    ),
    (
        "namespaces",
        "ListNamespaces",
        Permission.NAMESPACES_READ,
        lambda t: namespaces_pb2.ListNamespacesRequest(parent=f"tenants/{t}"),
    ),
    (
        "namespaces",
        "UpdateNamespace",
        Permission.NAMESPACES_MANAGE,
        lambda t: namespaces_pb2.UpdateNamespaceRequest(
            namespace=namespaces_pb2.Namespace(name=f"tenants/{t}/namespaces/chat")
        ),
    ),
    (
        "namespaces",
        "DeleteNamespace",
        Permission.NAMESPACES_MANAGE,
        lambda t: namespaces_pb2.DeleteNamespaceRequest(name=f"tenants/{t}/namespaces/chat"),
    ),
    ("quotas", "GetQuota", Permission.QUOTAS_READ, lambda t: quotas_pb2.GetQuotaRequest(name=f"tenants/{t}/quota")),
    ("quotas", "UpdateQuota", Permission.QUOTAS_MANAGE, lambda t: quota_request(t, 0, 1)),
    (
        "salt_policies",
        "GetSaltPolicy",
        Permission.SALTS_READ,
        lambda t: salt_policies_pb2.GetSaltPolicyRequest(name=f"tenants/{t}/saltPolicy"),
    ),
    (
        "salt_policies",
        "UpdateSaltPolicy",
        Permission.SALTS_MANAGE,
        lambda t: salt_policies_pb2.UpdateSaltPolicyRequest(
            salt_policy=salt_policies_pb2.SaltPolicy(
                name=f"tenants/{t}/saltPolicy", scope=salt_policies_pb2.SaltPolicy.SCOPE_USER
            )
        ),
    ),
    (
        "salt_policies",
        "RotateSalt",
        Permission.SALTS_MANAGE,
        lambda t: salt_policies_pb2.RotateSaltRequest(name=f"tenants/{t}/saltPolicy"),
    ),
    (
        "sharing_groups",
        "CreateSharingGroup",
        Permission.SHARING_MANAGE,
        lambda t: sharing_groups_pb2.CreateSharingGroupRequest(
            parent=f"tenants/{t}", sharing_group_id="new", namespace=f"tenants/{t}/namespaces/chat"
        ),
    ),
    (
        "sharing_groups",
        "GetSharingGroup",
        Permission.SHARING_READ,
        lambda t: sharing_groups_pb2.GetSharingGroupRequest(name=_group(t), member=f"tenants/{t}"),
    ),
    (
        "sharing_groups",
        "ListSharingGroups",
        Permission.SHARING_READ,
        lambda t: sharing_groups_pb2.ListSharingGroupsRequest(parent=f"tenants/{t}"),
    ),
    (
        "sharing_groups",
        "InviteMember",
        Permission.SHARING_MANAGE,
        lambda t: sharing_groups_pb2.InviteMemberRequest(name=_group(t), namespace="tenants/third/namespaces/chat"),
    ),
    (
        "sharing_groups",
        "AcceptInvitation",
        Permission.SHARING_MANAGE,
        lambda t: sharing_groups_pb2.AcceptInvitationRequest(
            name=_group("owner"), namespace=f"tenants/{t}/namespaces/chat"
        ),
    ),
    (
        "sharing_groups",
        "DeclineInvitation",
        Permission.SHARING_MANAGE,
        lambda t: sharing_groups_pb2.DeclineInvitationRequest(
            name=_group("owner"), namespace=f"tenants/{t}/namespaces/chat"
        ),
    ),
    (
        "sharing_groups",
        "LeaveSharingGroup",
        Permission.SHARING_MANAGE,
        lambda t: sharing_groups_pb2.LeaveSharingGroupRequest(
            name=_group(t), namespace=f"tenants/{t}/namespaces/shared"
        ),
    ),
    (
        "sharing_groups",
        "RemoveMember",
        Permission.SHARING_MANAGE,
        lambda t: sharing_groups_pb2.RemoveMemberRequest(name=_group(t), namespace=f"tenants/{t}/namespaces/shared"),
    ),
    (
        "sharing_groups",
        "DeleteSharingGroup",
        Permission.SHARING_MANAGE,
        lambda t: sharing_groups_pb2.DeleteSharingGroupRequest(name=_group(t)),
    ),
    (
        "credentials",
        "CreateApiKey",
        Permission.CREDENTIALS_MANAGE,
        lambda t: credentials_pb2.CreateApiKeyRequest(
            parent=f"tenants/{t}",
            api_key_id="new",
            api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_READER),
        ),
    ),
    (
        "credentials",
        "GetApiKey",
        Permission.CREDENTIALS_READ,
        lambda t: credentials_pb2.GetApiKeyRequest(name=f"tenants/{t}/apiKeys/ci"),
    ),
    (
        "credentials",
        "ListApiKeys",
        Permission.CREDENTIALS_READ,
        lambda t: credentials_pb2.ListApiKeysRequest(parent=f"tenants/{t}"),
    ),
    (
        "credentials",
        "RotateApiKey",
        Permission.CREDENTIALS_MANAGE,
        lambda t: credentials_pb2.RotateApiKeyRequest(name=f"tenants/{t}/apiKeys/ci"),
    ),
    (
        "credentials",
        "DeleteApiKey",
        Permission.CREDENTIALS_MANAGE,
        lambda t: credentials_pb2.DeleteApiKeyRequest(name=f"tenants/{t}/apiKeys/ci"),
    ),
    (
        "tokens",
        "RevokeToken",
        Permission.CREDENTIALS_MANAGE,
        lambda t: tokens_pb2.RevokeTokenRequest(parent=f"tenants/{t}", token_id="0" * 32),
    ),
    (
        "tokens",
        "RevokeApiKeyTokens",
        Permission.CREDENTIALS_MANAGE,
        lambda t: tokens_pb2.RevokeApiKeyTokensRequest(name=f"tenants/{t}/apiKeys/ci"),
    ),
    (
        "tokens",
        "RevokeTenantTokens",
        Permission.CREDENTIALS_MANAGE,
        lambda t: tokens_pb2.RevokeTenantTokensRequest(name=f"tenants/{t}"),
    ),
    (
        "tokens",
        "ListTokenRevocations",
        Permission.CREDENTIALS_READ,
        lambda t: tokens_pb2.ListTokenRevocationsRequest(parent=f"tenants/{t}"),
    ),
    (
        "audit",
        "ListAuditEvents",
        Permission.AUDIT_READ,
        lambda t: audit_pb2.ListAuditEventsRequest(parent=f"tenants/{t}"),
    ),
    ("usage", "GetUsage", Permission.USAGE_READ, lambda t: usage_pb2.GetUsageRequest(tenant=f"tenants/{t}")),
]
#: Every method of something that belongs to the platform.
PLATFORM_METHODS: list[tuple[str, str, Permission, Any]] = [
    ("tenants", "CreateTenant", Permission.TENANTS_MANAGE, tenants_pb2.CreateTenantRequest(tenant_id="new")),
    ("tenants", "ListTenants", Permission.TENANTS_READ, tenants_pb2.ListTenantsRequest()),
    (
        "credentials",
        "CreateApiKey",
        Permission.CREDENTIALS_MANAGE,
        credentials_pb2.CreateApiKeyRequest(
            api_key_id="new", api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_NODE)
        ),
    ),
    ("credentials", "GetApiKey", Permission.CREDENTIALS_READ, credentials_pb2.GetApiKeyRequest(name="apiKeys/node")),
    ("credentials", "ListApiKeys", Permission.CREDENTIALS_READ, credentials_pb2.ListApiKeysRequest()),
    (
        "credentials",
        "RotateApiKey",
        Permission.CREDENTIALS_MANAGE,
        credentials_pb2.RotateApiKeyRequest(name="apiKeys/node"),
    ),
    (
        "credentials",
        "DeleteApiKey",
        Permission.CREDENTIALS_MANAGE,
        credentials_pb2.DeleteApiKeyRequest(name="apiKeys/node"),
    ),
    ("audit", "RotateCheckpointKey", Permission.SIGNING_KEYS_MANAGE, audit_pb2.RotateCheckpointKeyRequest()),
    (
        "key_encryption_keys",
        "ListKeyEncryptionKeys",
        Permission.ENCRYPTION_KEYS_READ,
        key_encryption_keys_pb2.ListKeyEncryptionKeysRequest(),
    ),
    (
        "key_encryption_keys",
        "RotateKeyEncryptionKey",
        Permission.ENCRYPTION_KEYS_MANAGE,
        key_encryption_keys_pb2.RotateKeyEncryptionKeyRequest(),
    ),
    (
        "key_encryption_keys",
        "RemoveKeyEncryptionKey",
        Permission.ENCRYPTION_KEYS_MANAGE,
        key_encryption_keys_pb2.RemoveKeyEncryptionKeyRequest(id="0" * 16),
    ),
    ("tokens", "ListSigningKeys", Permission.SIGNING_KEYS_READ, tokens_pb2.ListSigningKeysRequest()),
    ("tokens", "RotateSigningKey", Permission.SIGNING_KEYS_MANAGE, tokens_pb2.RotateSigningKeyRequest()),
    (
        "tokens",
        "RevokeToken",
        Permission.CREDENTIALS_MANAGE,
        tokens_pb2.RevokeTokenRequest(token_id="0" * 32),
    ),
    (
        "tokens",
        "RevokeApiKeyTokens",
        Permission.CREDENTIALS_MANAGE,
        tokens_pb2.RevokeApiKeyTokensRequest(name="apiKeys/node"),
    ),
    ("tokens", "ListTokenRevocations", Permission.CREDENTIALS_READ, tokens_pb2.ListTokenRevocationsRequest()),
    ("audit", "ListAuditEvents", Permission.AUDIT_READ, audit_pb2.ListAuditEventsRequest()),
    ("usage", "ListNodes", Permission.NODES_READ, usage_pb2.ListNodesRequest()),
    ("nodes", "CordonNode", Permission.NODES_MANAGE, nodes_pb2.CordonNodeRequest(name="nodes/node-1")),
    ("nodes", "DrainNode", Permission.NODES_MANAGE, nodes_pb2.DrainNodeRequest(name="nodes/node-1")),
    ("nodes", "UncordonNode", Permission.NODES_MANAGE, nodes_pb2.UncordonNodeRequest(name="nodes/node-1")),
    ("nodes", "RemoveNode", Permission.NODES_MANAGE, nodes_pb2.RemoveNodeRequest(name="nodes/node-1")),
]
TENANT_ROLES = [role for role in Role if role not in PLATFORM_ROLES]


async def prepare(admin: Admin) -> None:
    for tenant in ("acme", "other"):
        await admin.create_tenant(tenant)
        await admin.create_namespace(tenant, "chat")
        await admin.create_api_key(tenant, "ci")
    await admin.create_api_key("", "node", credentials_pb2.ROLE_NODE)


async def test_i2_a_tenants_caller_cannot_tell_what_is_forbidden_from_what_is_absent(admin: Admin) -> None:
    await prepare(admin)

    for role in TENANT_ROLES:
        metadata = calling(role, "acme")
        for service, method, _, request in TENANT_METHODS:
            call = getattr(getattr(admin, service), method)
            forbidden = await refused(call(request("other"), metadata=metadata))
            absent = await refused(call(request("nobody"), metadata=metadata))
            assert isinstance(forbidden, PermissionDeniedError), method
            assert forbidden.reason == "RESOURCE_NOT_AVAILABLE", method
            assert (str(forbidden), forbidden.metadata) == (str(absent), absent.metadata), method


@pytest.mark.parametrize("role", TENANT_ROLES)
async def test_inside_its_tenant_each_role_may_do_what_the_table_says(admin: Admin, role: Role) -> None:
    for service, method, permission, request in TENANT_METHODS:
        if permission in PERMISSIONS[role]:
            await prepare_again(admin)
            await getattr(getattr(admin, service), method)(request("acme"), metadata=calling(role, "acme"))
    for service, method, permission, request in TENANT_METHODS:
        if permission not in PERMISSIONS[role]:
            call = getattr(getattr(admin, service), method)
            error = await refused(call(request("acme"), metadata=calling(role, "acme")))
            assert isinstance(error, PermissionDeniedError) and error.reason == "ROLE_REQUIRED", method


async def prepare_again(admin: Admin) -> None:
    """What the methods act on, made anew before each, since some delete it."""
    async with admin.database.transaction() as session:
        await session.execute(delete(models.Tenant))
    admin.clock.now += timedelta(minutes=1)  # a name is not made again and again within seconds
    await admin.create_tenant("acme")
    await admin.create_namespace("acme", "chat")
    await admin.create_api_key("acme", "ci")
    await admin.create_tenant("owner")
    for tenant in ("acme", "owner"):
        shared = await admin.create_namespace(tenant, "shared")
        create = sharing_groups_pb2.CreateSharingGroupRequest(
            parent=f"tenants/{tenant}", sharing_group_id="research", namespace=shared.name
        )
        await admin.sharing_groups.CreateSharingGroup(create, metadata=PLATFORM)
    invite = sharing_groups_pb2.InviteMemberRequest(name=_group("owner"), namespace="tenants/acme/namespaces/chat")
    await admin.sharing_groups.InviteMember(invite, metadata=PLATFORM)


async def test_what_belongs_to_the_platform_is_for_its_administrator_alone(admin: Admin) -> None:
    await prepare(admin)

    for role in [*TENANT_ROLES, Role.NODE]:
        metadata = calling(role, "" if role is Role.NODE else "acme")
        for service, method, _, request in PLATFORM_METHODS:
            error = await refused(getattr(getattr(admin, service), method)(request, metadata=metadata))
            assert isinstance(error, PermissionDeniedError), (role, method)
            assert error.hint


async def test_a_node_may_do_nothing_administrative(admin: Admin) -> None:
    await prepare(admin)

    for service, method, _, request in TENANT_METHODS:
        error = await refused(getattr(getattr(admin, service), method)(request("acme"), metadata=calling(Role.NODE)))
        assert isinstance(error, PermissionDeniedError) and error.reason == "ROLE_REQUIRED", method


async def test_the_platforms_administrator_hears_what_is_absent(admin: Admin) -> None:
    for service, method, _, request in TENANT_METHODS:
        error = await refused(getattr(getattr(admin, service), method)(request("nobody"), metadata=PLATFORM))
        assert isinstance(error, NotFoundError), method
        assert "nobody" in error.message


async def test_i1_without_a_verified_caller_nothing_answers(admin: Admin) -> None:
    for service, method, _, request in TENANT_METHODS:
        error = await refused(getattr(getattr(admin, service), method)(request("acme")))
        assert isinstance(error, UnauthenticatedError), method
    for service, method, _, request in PLATFORM_METHODS:
        error = await refused(getattr(getattr(admin, service), method)(request))
        assert isinstance(error, UnauthenticatedError), method
