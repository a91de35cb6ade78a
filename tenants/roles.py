"""Roles and what each may do: one table, read by every door."""

from __future__ import annotations

from enum import StrEnum, unique

from saltern.errors import PermissionDeniedError


@unique
class Role(StrEnum):
    """What a credential is for. The first and the last belong to the platform, the others to one tenant."""

    PLATFORM_ADMIN = "platform-admin"
    TENANT_ADMIN = "tenant-admin"
    TENANT_AUDITOR = "tenant-auditor"
    WRITER = "writer"
    READER = "reader"
    NODE = "node"


@unique
class Permission(StrEnum):
    """One thing that a caller may do, inside its own tenant unless the role is of the platform."""

    TENANTS_MANAGE = "tenants.manage"
    TENANTS_READ = "tenants.read"
    NAMESPACES_MANAGE = "namespaces.manage"
    NAMESPACES_READ = "namespaces.read"
    QUOTAS_MANAGE = "quotas.manage"
    QUOTAS_READ = "quotas.read"
    SALTS_MANAGE = "salts.manage"
    SALTS_READ = "salts.read"
    SHARING_MANAGE = "sharing.manage"
    SHARING_READ = "sharing.read"
    CREDENTIALS_MANAGE = "credentials.manage"
    CREDENTIALS_READ = "credentials.read"
    SIGNING_KEYS_MANAGE = "signing-keys.manage"
    SIGNING_KEYS_READ = "signing-keys.read"
    ENCRYPTION_KEYS_MANAGE = "encryption-keys.manage"
    ENCRYPTION_KEYS_READ = "encryption-keys.read"
    AUDIT_READ = "audit.read"
    USAGE_READ = "usage.read"
    NODES_READ = "nodes.read"
    NODES_MANAGE = "nodes.manage"
    NODE_SERVE = "node.serve"
    ENTRIES_READ = "entries.read"
    ENTRIES_WRITE = "entries.write"


PLATFORM_ROLES = frozenset({Role.PLATFORM_ADMIN, Role.NODE})
TENANT_ROLES = frozenset(Role) - PLATFORM_ROLES

_TENANT_VIEW = frozenset(
    {
        Permission.TENANTS_READ,
        Permission.NAMESPACES_READ,
        Permission.QUOTAS_READ,
        Permission.SALTS_READ,
        Permission.SHARING_READ,
        Permission.USAGE_READ,
    }
)
PERMISSIONS: dict[Role, frozenset[Permission]] = {
    # The platform's administrator manages every tenant but reads nobody's entries.
    Role.PLATFORM_ADMIN: frozenset(Permission)
    - {Permission.ENTRIES_READ, Permission.ENTRIES_WRITE, Permission.NODE_SERVE},
    Role.TENANT_ADMIN: _TENANT_VIEW
    | {
        Permission.NAMESPACES_MANAGE,
        Permission.SALTS_MANAGE,
        Permission.SHARING_MANAGE,
        Permission.CREDENTIALS_MANAGE,
        Permission.CREDENTIALS_READ,
        Permission.AUDIT_READ,
    },
    Role.TENANT_AUDITOR: _TENANT_VIEW | {Permission.CREDENTIALS_READ, Permission.AUDIT_READ},
    Role.WRITER: _TENANT_VIEW | {Permission.ENTRIES_READ, Permission.ENTRIES_WRITE},
    Role.READER: _TENANT_VIEW | {Permission.ENTRIES_READ},
    Role.NODE: frozenset({Permission.NODE_SERVE}),
}


def may(role: Role, permission: Permission) -> bool:
    """Whether ``role`` holds ``permission``."""
    return permission in PERMISSIONS[role]


def require(role: Role, permission: Permission) -> None:
    """Raise PermissionDeniedError (reason ROLE_REQUIRED) unless ``role`` holds ``permission``."""
    if not may(role, permission):
        holders = ", ".join(sorted(r.value for r, held in PERMISSIONS.items() if permission in held))
        raise PermissionDeniedError(
            f"role {role.value} lacks the permission {permission.value}",
            reason="ROLE_REQUIRED",
            hint=f"use a credential with one of the roles: {holders}",
            metadata={"role": role.value, "permission": permission.value},
        )
