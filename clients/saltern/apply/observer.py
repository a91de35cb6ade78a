"""What the control plane says is there, as resources. It reads what a declaration mentions and nothing else, so that a
caller needs no more rights than the file has lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from saltern.admin.v1.credentials_pb2 import ApiKey, ListApiKeysRequest, Role
from saltern.admin.v1.namespaces_pb2 import ListNamespacesRequest, Namespace
from saltern.admin.v1.quotas_pb2 import GetQuotaRequest, Quota, Tier
from saltern.admin.v1.salt_policies_pb2 import GetSaltPolicyRequest, SaltPolicy
from saltern.admin.v1.sharing_groups_pb2 import ListSharingGroupsRequest, SharingGroup, SharingGroupMember
from saltern.admin.v1.tenants_pb2 import GetTenantRequest, ListTenantsRequest, Tenant
from saltern.admin_client import AdminClient
from saltern.apply.resources import (
    ACTIVE,
    SUSPENDED,
    Declaration,
    Kind,
    Resource,
    Value,
    World,
    group_resource,
    invitation_resource,
    key_resource,
    membership_resource,
    namespace_resource,
    rates_resource,
    salt_resource,
    state_resource,
    tenant_resource,
    tier_resource,
)
from saltern.errors import NotFoundError
from saltern.names import (
    TenantId,
    parse_api_key_name,
    parse_namespace_name,
    parse_sharing_group_name,
    parse_tenant_name,
    quota_name,
    salt_policy_name,
    tenant_name,
)

#: Every kind that hangs off a tenant, for an export.
EVERYTHING: Final = frozenset(Kind)
_SHARING: Final = frozenset({Kind.GROUP, Kind.INVITATION, Kind.MEMBERSHIP})


def observe(
    admin: AdminClient,
    declared: Declaration,
    *,
    all_tenants: bool = False,
    on_tenant: Callable[[TenantId], None] = lambda _: None,
) -> World:
    """What is there of what ``declared`` mentions.

    Args:
        all_tenants: also which other tenants there are, for pruning them; platform administrators alone.
        on_tenant: called after each tenant, for a progress bar.

    Raises:
        SalternError: what the control plane refuses. A tenant that is not there is no error.
    """
    resources: list[Resource] = []
    kinds = declared.kinds()
    for tenant in declared.tenants:
        resources += observe_tenant(admin, tenant, kinds[tenant])
        on_tenant(tenant)
    if all_tenants:
        others = (item for item in list_tenants(admin) if parse_tenant_name(item.name) not in declared.tenants)
        resources += (_tenant(item) for item in others)
    return World.of(resources)


def list_tenants(admin: AdminClient) -> Iterable[Tenant]:
    """Every tenant (platform administrators)."""
    return admin.iterate(admin.tenants.ListTenants, ListTenantsRequest(), "tenants")


def observe_tenant(admin: AdminClient, tenant: TenantId, kinds: frozenset[Kind]) -> Iterator[Resource]:
    """One tenant and what of ``kinds`` hangs off it; nothing where it is not there."""
    parent = tenant_name(tenant)
    try:
        item = admin.call(admin.tenants.GetTenant, GetTenantRequest(name=parent))
    except NotFoundError:
        return
    yield _tenant(item)
    yield state_resource(tenant, SUSPENDED if item.state == Tenant.STATE_SUSPENDED else ACTIVE, etag=item.etag)
    if kinds & {Kind.QUOTA, Kind.RATES}:
        yield from _quota(tenant, admin.call(admin.quotas.GetQuota, GetQuotaRequest(name=quota_name(tenant))))
    if Kind.SALT in kinds:
        request = GetSaltPolicyRequest(name=salt_policy_name(tenant))
        yield _salt(tenant, admin.call(admin.salt_policies.GetSaltPolicy, request))
    if Kind.NAMESPACE in kinds:
        namespaces = admin.iterate(admin.namespaces.ListNamespaces, ListNamespacesRequest(parent=parent), "namespaces")
        yield from map(_namespace, namespaces)
    if Kind.KEY in kinds:
        for key in admin.iterate(admin.credentials.ListApiKeys, ListApiKeysRequest(parent=parent), "api_keys"):
            yield _key(tenant, key)
    if kinds & _SHARING:
        listed = ListSharingGroupsRequest(parent=parent)
        for group in admin.iterate(admin.sharing_groups.ListSharingGroups, listed, "sharing_groups"):
            yield from _group(tenant, group)


def _tenant(item: Tenant) -> Resource:
    return tenant_resource(parse_tenant_name(item.name), {"display_name": item.display_name}, etag=item.etag)


def _quota(tenant: TenantId, item: Quota) -> Iterator[Resource]:
    for tier in item.tiers:
        fields: dict[str, Value] = {
            "reserved_bytes": tier.reserved_bytes,
            "limit_bytes": tier.limit_bytes,
            "weight": tier.weight,
        }
        yield tier_resource(tenant, _word(Tier.Name(tier.tier), "TIER_"), fields, etag=item.etag)
    rates: dict[str, Value] = {
        "operations_per_s": item.rates.operations_per_s,
        "bytes_per_s": item.rates.bytes_per_s,
        "ssd_write_bytes_per_s": item.rates.ssd_write_bytes_per_s,
    }
    yield rates_resource(tenant, rates, etag=item.etag)


def _salt(tenant: TenantId, item: SaltPolicy) -> Resource:
    fields: dict[str, Value] = {
        "scope": _word(SaltPolicy.Scope.Name(item.scope), "SCOPE_"),
        "rotation_period_s": item.rotation_period.seconds,
        "grace_period_s": item.grace_period.seconds,
    }
    return salt_resource(tenant, fields, etag=item.etag)


def _namespace(item: Namespace) -> Resource:
    tenant, namespace = parse_namespace_name(item.name)
    limits = {_word(Tier.Name(limit.tier), "TIER_"): limit.limit_bytes for limit in item.tier_limits}
    fields: dict[str, Value] = {
        "model_fingerprint": item.model_fingerprint,
        "block_tokens": item.block_tokens,
        "block_bytes": item.block_bytes,
        "dram_limit_bytes": limits.get("dram"),
        "ssd_limit_bytes": limits.get("ssd"),
    }
    return namespace_resource(tenant, namespace, fields, etag=item.etag)


def _key(tenant: TenantId, item: ApiKey) -> Resource:
    fields: dict[str, Value] = {
        "role": _word(Role.Name(item.role), "ROLE_"),
        "display_name": item.display_name,
        "expire_time_s": item.expire_time.seconds if item.HasField("expire_time") else None,
        "project": item.project_id,
        "user": item.user_id,
    }
    _, key = parse_api_key_name(item.name)
    return key_resource(tenant, key, fields, etag=item.etag, lookup=item.lookup)


def _group(viewer: TenantId, item: SharingGroup) -> Iterator[Resource]:
    """A group as ``viewer`` sees it: its own it sees whole, of another's what is its own."""
    owner, group = parse_sharing_group_name(item.name)
    first = item.members[0].namespace if item.members else ""
    if owner == viewer:
        yield group_resource(owner, group, first, etag=item.etag)
    for member in item.members:
        tenant, _ = parse_namespace_name(member.namespace)
        if viewer in (tenant, owner):
            yield invitation_resource(owner, item.name, member.namespace)
        if tenant == viewer and member.state == SharingGroupMember.STATE_ACCEPTED:
            yield membership_resource(tenant, item.name, member.namespace)


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", "-")
