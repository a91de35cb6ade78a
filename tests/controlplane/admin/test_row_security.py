"""What is left when a service forgets to authorise: row-level security, and nothing of another tenant (I2)."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToJson
from sqlalchemy import text

import controlplane.admin
from controlplane.caller import Caller, authorise, current_caller
from saltern.admin.v1 import credentials_pb2, tenants_pb2
from saltern.errors import InternalError, NotFoundError, PermissionDeniedError
from saltern.rpc_errors import error_from_rpc
from tenants.roles import Role
from tests.controlplane.admin.test_authorisation import PLATFORM_METHODS, TENANT_METHODS, prepare
from tests.support.admin import PLATFORM, Admin, admin_of, calling, refused

MODULES = [
    importlib.import_module(f"controlplane.admin.{module.name}")
    for module in pkgutil.iter_modules(controlplane.admin.__path__)
]


@pytest.fixture
def unauthorised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: every administrative service lets every verified caller do everything."""

    def everybody(*_: object) -> Caller:
        return current_caller()

    removed = [module for module in MODULES if getattr(module, "authorise", None) is authorise]
    assert len(removed) >= 6
    for module in removed:
        monkeypatch.setattr(module, "authorise", everybody)


async def answer(admin: Admin, service: str, method: str, request: Any) -> str:
    """What the tenant acme hears, without what it has said itself and without what is drawn anew each time."""
    call = getattr(getattr(admin, service), method)
    try:
        response = await call(request, metadata=admin_of("acme"))
    except grpc.RpcError as failure:
        error = error_from_rpc(failure)
        return f"{type(error).__name__} {error.reason}"
    return MessageToJson(response)


async def rows_of(admin: Admin, tenant: str) -> list[Any]:
    """Everything in the database that is the tenant's, but for the trail of attempts."""
    tables = (
        "namespaces",
        "tier_quotas",
        "rate_limits",
        "salt_policies",
        "salt_epochs",
        "sharing_groups",
        "sharing_group_members",
        "api_keys",
        "token_revocations",
    )
    owners = {"tenants": "id"} | dict.fromkeys(tables, "tenant_id")
    async with admin.database.transaction() as session:
        found = []
        for table, owner in owners.items():
            rows = await session.execute(text(f"SELECT * FROM {table} WHERE {owner} = :tenant"), {"tenant": tenant})
            found.append(rows.all())
    return found


@pytest.mark.usefixtures("unauthorised")
async def test_i2_services_that_forget_to_authorise_leak_nothing_of_another_tenant(admin: Admin) -> None:
    await prepare(admin)
    before = await rows_of(admin, "other")

    for service, method, _, request in TENANT_METHODS:
        of_other = await answer(admin, service, method, request("other"))
        of_nobody = await answer(admin, service, method, request("nobody"))
        assert of_other.replace("other", "nobody") == of_nobody, method
    assert await rows_of(admin, "other") == before
    assert len(before[0]) == 1


@pytest.mark.usefixtures("unauthorised")
async def test_i2_services_that_forget_to_authorise_give_a_tenant_nothing_of_the_platforms(admin: Admin) -> None:
    await prepare(admin)

    listed = await admin.tenants.ListTenants(tenants_pb2.ListTenantsRequest(), metadata=admin_of("acme"))
    assert [tenant.name for tenant in listed.tenants] == ["tenants/acme"]
    keys = await admin.credentials.ListApiKeys(credentials_pb2.ListApiKeysRequest(), metadata=admin_of("acme"))
    assert list(keys.api_keys) == []
    for service, method, _, request in PLATFORM_METHODS:
        if method.startswith(("Create", "Delete")):
            error = await refused(getattr(getattr(admin, service), method)(request, metadata=admin_of("acme")))
            assert isinstance(error, InternalError | PermissionDeniedError), method
    listed = await admin.tenants.ListTenants(tenants_pb2.ListTenantsRequest(), metadata=PLATFORM)
    assert [tenant.name for tenant in listed.tenants] == ["tenants/acme", "tenants/other"]
    keys = await admin.credentials.ListApiKeys(credentials_pb2.ListApiKeysRequest(), metadata=PLATFORM)
    assert [key.name for key in keys.api_keys] == ["apiKeys/node"]


@pytest.mark.usefixtures("unauthorised")
async def test_the_planted_fault_is_one(admin: Admin) -> None:
    """A reader may then do in its own tenant what only its administrator may: row-level security knows no roles."""
    await prepare(admin)

    request = credentials_pb2.DeleteApiKeyRequest(name="tenants/acme/apiKeys/ci")
    await admin.credentials.DeleteApiKey(request, metadata=calling(Role.READER, "acme"))
    gone = credentials_pb2.GetApiKeyRequest(name=request.name)
    assert isinstance(await refused(admin.credentials.GetApiKey(gone, metadata=PLATFORM)), NotFoundError)
