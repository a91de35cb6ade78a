"""The table of roles, written out once more by hand: what each may do, and above all what it may not."""

from __future__ import annotations

import pytest

from saltern.errors import PermissionDeniedError
from tenants.roles import PERMISSIONS, PLATFORM_ROLES, TENANT_ROLES, Permission, Role, may, require

VIEW = {"tenants.read", "namespaces.read", "quotas.read", "salts.read", "sharing.read", "usage.read"}
EXPECTED = {
    "platform-admin": VIEW
    | {
        "tenants.manage", "namespaces.manage", "quotas.manage", "salts.manage", "sharing.manage", "credentials.manage",
        "credentials.read", "audit.read", "nodes.manage", "nodes.read", "signing-keys.manage", "signing-keys.read",
        "encryption-keys.manage", "encryption-keys.read",
    },
    "tenant-admin": VIEW
    | {
        "namespaces.manage", "salts.manage", "sharing.manage", "credentials.manage", "credentials.read", "audit.read",
    },
    "tenant-auditor": VIEW | {"credentials.read", "audit.read"},
    "writer": VIEW | {"entries.read", "entries.write"},
    "reader": VIEW | {"entries.read"},
    "node": {"node.serve"},
}  # fmt: skip


@pytest.mark.parametrize("role", sorted(Role))
def test_a_role_may_do_this_and_nothing_else(role: Role) -> None:
    assert {permission.value for permission in Permission if may(role, permission)} == EXPECTED[role.value]
    for permission in Permission:
        if may(role, permission):
            require(role, permission)
        else:
            with pytest.raises(PermissionDeniedError) as caught:
                require(role, permission)
            assert caught.value.reason == "ROLE_REQUIRED"
            assert caught.value.metadata == {"role": role.value, "permission": permission.value}


def test_roles_are_of_the_platform_or_of_a_tenant() -> None:
    assert PLATFORM_ROLES | TENANT_ROLES == set(Role) == PERMISSIONS.keys()
    assert not PLATFORM_ROLES & TENANT_ROLES


def test_i2_nobody_of_the_platform_touches_entries() -> None:
    for role in PLATFORM_ROLES:
        assert not may(role, Permission.ENTRIES_READ) and not may(role, Permission.ENTRIES_WRITE)


def test_only_the_platform_manages_tenants_and_quotas() -> None:
    nodes = {Permission.NODES_READ, Permission.NODES_MANAGE}
    for permission in nodes | {Permission.TENANTS_MANAGE, Permission.QUOTAS_MANAGE}:
        assert {role for role in Role if may(role, permission)} == {Role.PLATFORM_ADMIN}


def test_the_hint_names_the_roles_that_may() -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        require(Role.READER, Permission.ENTRIES_WRITE)
    assert caught.value.hint.endswith("writer")
