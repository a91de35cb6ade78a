"""What a deployment consists of, as plain values: the same for what a file declares and for what the service says.

A resource is a kind, a name and fields. A file declares only the fields that it mentions, and only those are compared;
what it says nothing about stays as it is. Some kinds are finer than the service's own resources, so that each can be
put in order by itself: every tier's quota, the rates, the state of a tenant, an invitation and its acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import Final, TypeAlias

from saltern.names import (
    ApiKeyId,
    NamespaceId,
    SharingGroupId,
    TenantId,
    api_key_name,
    namespace_name,
    quota_name,
    salt_policy_name,
    sharing_group_name,
    tenant_name,
)

#: None is a value of its own: no limit, no expiry.
Value: TypeAlias = str | int | None
TIERS: Final = ("dram", "ssd")
ROLES: Final = ("tenant-admin", "tenant-auditor", "writer", "reader")
SCOPES: Final = ("tenant", "namespace", "project", "user", "session")
ACTIVE: Final = "active"
SUSPENDED: Final = "suspended"


@unique
class Kind(StrEnum):
    """Kinds of resources; the value is what people read."""

    TENANT = "tenant"
    STATE = "state"
    QUOTA = "quota"
    RATES = "rates"
    SALT = "salt policy"
    NAMESPACE = "namespace"
    KEY = "API key"
    GROUP = "sharing group"
    INVITATION = "invitation"
    MEMBERSHIP = "membership"


#: Which resource, and which complete list of resources: a kind and the name of what has them.
Identity: TypeAlias = tuple[Kind, str]
Section: TypeAlias = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource, or what a file says of it.

    Attributes:
        tenant: whose it is: of an invitation the group's owner, of a membership the member.
        name: unique within the kind.
        parent: name of what it is listed under.
        fields: see :mod:`saltern.apply.schema` for the names; bytes, seconds and plain numbers.
        etag: as the service gave it; empty in what a file declares.
        origin: ``FILE:LINE:COLUMN`` in a file; empty for what the service said.
        lookup: of an API key, which of all keys it is; empty elsewhere.
    """

    kind: Kind
    tenant: TenantId
    name: str
    parent: str = ""
    fields: Mapping[str, Value] = field(default_factory=dict)
    etag: str = ""
    origin: str = ""
    lookup: str = ""

    @property
    def identity(self) -> Identity:
        return self.kind, self.name


def tenant_resource(tenant: TenantId, fields: Mapping[str, Value], *, etag: str = "", origin: str = "") -> Resource:
    """``display_name``."""
    return Resource(Kind.TENANT, tenant, tenant_name(tenant), "", fields, etag, origin)


def state_resource(tenant: TenantId, state: str, *, etag: str = "", origin: str = "") -> Resource:
    """``state``: ``ACTIVE`` or ``SUSPENDED``."""
    name = tenant_name(tenant)
    return Resource(Kind.STATE, tenant, f"{name}/state", name, {"state": state}, etag, origin)


def tier_resource(
    tenant: TenantId, tier: str, fields: Mapping[str, Value], *, etag: str = "", origin: str = ""
) -> Resource:
    """``reserved_bytes``, ``limit_bytes``, ``weight`` of one tier."""
    return Resource(
        Kind.QUOTA, tenant, f"{quota_name(tenant)}/{tier}", tenant_name(tenant), {"tier": tier, **fields}, etag, origin
    )


def rates_resource(tenant: TenantId, fields: Mapping[str, Value], *, etag: str = "", origin: str = "") -> Resource:
    """``operations_per_s``, ``bytes_per_s``, ``ssd_write_bytes_per_s``; 0 is no limit."""
    name = tenant_name(tenant)
    return Resource(Kind.RATES, tenant, f"{name}/rates", name, fields, etag, origin)


def salt_resource(tenant: TenantId, fields: Mapping[str, Value], *, etag: str = "", origin: str = "") -> Resource:
    """``scope``, ``rotation_period_s`` (0: on demand), ``grace_period_s``."""
    return Resource(Kind.SALT, tenant, salt_policy_name(tenant), tenant_name(tenant), fields, etag, origin)


def namespace_resource(
    tenant: TenantId, namespace: NamespaceId, fields: Mapping[str, Value], *, etag: str = "", origin: str = ""
) -> Resource:
    """``model_fingerprint``, ``block_tokens``, ``block_bytes``;
    ``dram_limit_bytes``, ``ssd_limit_bytes`` (None: no limit)."""
    return Resource(
        Kind.NAMESPACE, tenant, namespace_name(tenant, namespace), tenant_name(tenant), fields, etag, origin
    )


def key_resource(
    tenant: TenantId, key: ApiKeyId, fields: Mapping[str, Value], *, etag: str = "", origin: str = "", lookup: str = ""
) -> Resource:
    """``role``, ``display_name``, ``expire_time_s`` (Unix seconds; None: never), ``project``, ``user``."""
    return Resource(Kind.KEY, tenant, api_key_name(tenant, key), tenant_name(tenant), fields, etag, origin, lookup)


def group_resource(
    owner: TenantId, group: SharingGroupId, namespace: str, *, etag: str = "", origin: str = ""
) -> Resource:
    """``namespace``: resource name of its first member."""
    return Resource(
        Kind.GROUP, owner, sharing_group_name(owner, group), tenant_name(owner), {"namespace": namespace}, etag, origin
    )


def invitation_resource(owner: TenantId, group: str, namespace: str, *, origin: str = "") -> Resource:
    """That ``namespace`` is invited to ``group`` or in it; both are resource names."""
    return Resource(
        Kind.INVITATION, owner, _member_name(group, namespace), group, _member(group, namespace), "", origin
    )


def membership_resource(member: TenantId, group: str, namespace: str, *, origin: str = "") -> Resource:
    """That ``namespace`` has accepted to be in ``group``; both are resource names."""
    return Resource(
        Kind.MEMBERSHIP,
        member,
        _member_name(group, namespace),
        tenant_name(member),
        _member(group, namespace),
        "",
        origin,
    )


def _member_name(group: str, namespace: str) -> str:
    return f"{group}/members/{namespace.removeprefix('tenants/').replace('/namespaces', '')}"


def _member(group: str, namespace: str) -> Mapping[str, Value]:
    return {"group": group, "namespace": namespace}


@dataclass(frozen=True, slots=True)
class World:
    """What is there, as far as it was looked at."""

    resources: Mapping[Identity, Resource]

    @staticmethod
    def of(resources: Iterable[Resource]) -> World:
        return World({resource.identity: resource for resource in resources})


@dataclass(frozen=True, slots=True)
class Declaration:
    """What files say there should be.

    Attributes:
        tenants: each tenant and where it is declared, in order.
        resources: in the order of the files.
        sections: lists that the files write out, so that what they leave out can be pruned.
    """

    tenants: Mapping[TenantId, str]
    resources: Mapping[Identity, Resource]
    sections: frozenset[Section]

    def kinds(self) -> Mapping[TenantId, frozenset[Kind]]:
        """The kinds of which anything is said about each tenant."""
        said: dict[TenantId, set[Kind]] = {tenant: set() for tenant in self.tenants}
        for resource in self.resources.values():
            said.setdefault(resource.tenant, set()).add(resource.kind)
        for kind, parent in self.sections:
            said.setdefault(TenantId(parent.split("/")[1]), set()).add(kind)
        return {tenant: frozenset(kinds) for tenant, kinds in said.items()}
