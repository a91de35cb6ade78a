from __future__ import annotations

import pytest

from controlplane.caller import Caller, authorise, calling_as, current_caller
from saltern.errors import PermissionDeniedError, UnauthenticatedError
from saltern.names import TenantId
from tenants.roles import Permission, Role

ACME, OTHER = TenantId("acme"), TenantId("other")


def test_i1_there_is_no_caller_by_default_and_none_after_the_call() -> None:
    caller = Caller("apiKeys/a", None, Role.PLATFORM_ADMIN)
    with calling_as(caller):
        assert current_caller() is caller
    for look in (current_caller, lambda: authorise(Permission.TENANTS_READ, ACME)):
        with pytest.raises(UnauthenticatedError):
            look()


@pytest.mark.parametrize(
    ("role", "tenant"), [(Role.PLATFORM_ADMIN, ACME), (Role.NODE, ACME), (Role.READER, None), (Role.TENANT_ADMIN, None)]
)
def test_a_role_and_its_tenant_go_together(role: Role, tenant: TenantId | None) -> None:
    with pytest.raises(AssertionError):
        Caller("a", tenant, role)


@pytest.mark.parametrize(
    ("role", "tenant", "permission", "target", "reason"),
    [
        (Role.PLATFORM_ADMIN, None, Permission.TENANTS_MANAGE, ACME, None),
        (Role.PLATFORM_ADMIN, None, Permission.TENANTS_MANAGE, None, None),
        (Role.PLATFORM_ADMIN, None, Permission.ENTRIES_READ, ACME, "ROLE_REQUIRED"),
        (Role.TENANT_ADMIN, ACME, Permission.CREDENTIALS_MANAGE, ACME, None),
        (Role.TENANT_ADMIN, ACME, Permission.CREDENTIALS_MANAGE, OTHER, "RESOURCE_NOT_AVAILABLE"),
        (Role.TENANT_ADMIN, ACME, Permission.CREDENTIALS_MANAGE, None, "RESOURCE_NOT_AVAILABLE"),
        (Role.TENANT_ADMIN, ACME, Permission.TENANTS_MANAGE, ACME, "ROLE_REQUIRED"),
        (Role.TENANT_ADMIN, ACME, Permission.TENANTS_MANAGE, OTHER, "RESOURCE_NOT_AVAILABLE"),
        (Role.NODE, None, Permission.TENANTS_READ, ACME, "ROLE_REQUIRED"),
    ],
)
def test_who_may_do_what(
    role: Role, tenant: TenantId | None, permission: Permission, target: TenantId | None, reason: str | None
) -> None:
    with calling_as(Caller("key", tenant, role)):
        if reason is None:
            assert authorise(permission, target).role is role
            return
        with pytest.raises(PermissionDeniedError) as caught:
            authorise(permission, target)
        assert caught.value.reason == reason
