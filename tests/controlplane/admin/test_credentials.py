from __future__ import annotations

import asyncio
from datetime import timedelta

from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import select

from controlplane.db import models
from controlplane.secrets import api_key_matches, parse_api_key
from saltern.admin.v1 import credentials_pb2
from saltern.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)
from tenants.roles import Role
from tests.support.admin import PLATFORM, Admin, admin_of, calling, refused

PLATFORM_ROLES = (credentials_pb2.ROLE_PLATFORM_ADMIN, credentials_pb2.ROLE_NODE)
TENANT_ROLES = (
    credentials_pb2.ROLE_TENANT_ADMIN,
    credentials_pb2.ROLE_TENANT_AUDITOR,
    credentials_pb2.ROLE_WRITER,
    credentials_pb2.ROLE_READER,
)


async def test_the_secret_is_shown_once_and_only_its_hash_is_stored(admin: Admin) -> None:
    await admin.create_tenant("acme")

    created = await admin.create_api_key("acme", "ci", metadata=admin_of("acme"))

    async with admin.database.transaction() as session:
        row = (await session.scalars(select(models.ApiKey))).one()
    assert row.lookup == parse_api_key(created.secret)
    assert api_key_matches(created.secret, row.secret_sha256)
    assert row.created_by == "tenants/acme/apiKeys/admin"
    got = await admin.credentials.GetApiKey(
        credentials_pb2.GetApiKeyRequest(name="tenants/acme/apiKeys/ci"), metadata=admin_of("acme")
    )
    assert got == created.api_key
    secret_part = created.secret.split("-", 3)[3].encode()
    for event in await admin.events("acme"):
        assert secret_part not in repr((event.before, event.after, event.resource)).encode()


async def test_a_tenant_admin_gives_out_the_roles_of_its_tenant(admin: Admin) -> None:
    await admin.create_tenant("acme")

    for role in TENANT_ROLES:
        created = await admin.create_api_key("acme", f"key-{role}", role, admin_of("acme"))
        assert created.api_key.role == role


async def test_i1_a_tenant_admin_never_gives_out_a_role_of_the_platform(admin: Admin) -> None:
    await admin.create_tenant("acme")

    for role in PLATFORM_ROLES:
        within = await refused(admin.create_api_key("acme", "key", role, admin_of("acme")))
        outside = await refused(admin.create_api_key("", "key", role, admin_of("acme")))
        assert isinstance(within, PermissionDeniedError) and within.reason == "ROLE_NOT_GRANTABLE"
        assert isinstance(outside, PermissionDeniedError) and outside.reason == "RESOURCE_NOT_AVAILABLE"

    async with admin.database.transaction() as session:
        assert (await session.scalars(select(models.ApiKey))).all() == []
    denied = [event.reason for event in await admin.events("acme") if event.outcome is models.AuditOutcome.DENIED]
    assert denied == ["ROLE_NOT_GRANTABLE", "RESOURCE_NOT_AVAILABLE"] * 2


async def test_a_role_goes_with_its_owner(admin: Admin) -> None:
    await admin.create_tenant("acme")
    no_roles = (0, 99, -1, 2**31 - 1)

    for owner, roles in (("", (*TENANT_ROLES, *no_roles)), ("acme", (*PLATFORM_ROLES, *no_roles))):
        for role in roles:
            error = await refused(admin.create_api_key(owner, "key", role))
            assert isinstance(error, InvalidArgumentError), (owner, role)
            assert "choose one of" in error.hint


async def test_keys_are_listed_by_owner(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_tenant("other")
    for owner, key_id, role in (
        ("acme", "a", credentials_pb2.ROLE_READER),
        ("other", "b", credentials_pb2.ROLE_READER),
        ("", "c", credentials_pb2.ROLE_NODE),
    ):
        await admin.create_api_key(owner, key_id, role)

    async def names(parent: str) -> list[str]:
        request = credentials_pb2.ListApiKeysRequest(parent=parent)
        return [key.name for key in (await admin.credentials.ListApiKeys(request, metadata=PLATFORM)).api_keys]

    assert await names("tenants/acme") == ["tenants/acme/apiKeys/a"]
    assert await names("tenants/other") == ["tenants/other/apiKeys/b"]
    assert await names("") == ["apiKeys/c"]


async def test_an_id_is_used_once_per_owner(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_api_key("acme", "ci")
    await admin.create_api_key("", "ci", credentials_pb2.ROLE_NODE)

    for owner, role in (("acme", credentials_pb2.ROLE_READER), ("", credentials_pb2.ROLE_NODE)):
        error = await refused(admin.create_api_key(owner, "ci", role))
        assert isinstance(error, AlreadyExistsError) and error.reason == "API_KEY_EXISTS"


async def test_a_deleted_key_is_gone(admin: Admin) -> None:
    await admin.create_tenant("acme")
    created = await admin.create_api_key("acme", "ci")
    request = credentials_pb2.DeleteApiKeyRequest(name=created.api_key.name, etag=created.api_key.etag)

    await admin.credentials.DeleteApiKey(request, metadata=admin_of("acme"))

    error = await refused(admin.credentials.DeleteApiKey(request, metadata=PLATFORM))
    assert isinstance(error, NotFoundError)
    second = await admin.create_api_key("acme", "ci")
    assert second.secret != created.secret
    assert second.api_key.etag != created.api_key.etag


async def test_the_last_platform_admin_key_stays(admin: Admin) -> None:
    for key_id in ("one", "two"):
        await admin.create_api_key("", key_id, credentials_pb2.ROLE_PLATFORM_ADMIN)

    outcomes = await asyncio.gather(
        *(
            refused_or_done(
                admin.credentials.DeleteApiKey(
                    credentials_pb2.DeleteApiKeyRequest(name=f"apiKeys/{key_id}"), metadata=PLATFORM
                )
            )
            for key_id in ("one", "two")
        )
    )

    assert sorted(outcomes) == ["", "FAILED_PRECONDITION"]
    async with admin.database.transaction() as session:
        (survivor,) = await session.scalars(select(models.ApiKey))
    error = await refused(
        admin.credentials.DeleteApiKey(
            credentials_pb2.DeleteApiKeyRequest(name=f"apiKeys/{survivor.id}"), metadata=PLATFORM
        )
    )
    assert isinstance(error, FailedPreconditionError) and error.reason == "LAST_ADMIN_KEY"


async def refused_or_done(call: object) -> str:
    try:
        await call  # type: ignore[misc]
    except Exception as error:
        return error.code().name  # type: ignore[attr-defined, no-any-return]
    return ""


async def test_an_expiry_must_be_in_the_future(admin: Admin) -> None:
    def request(expire_time: Timestamp, key_id: str = "key") -> credentials_pb2.CreateApiKeyRequest:
        return credentials_pb2.CreateApiKeyRequest(
            api_key_id=key_id,
            api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_NODE, expire_time=expire_time),
        )

    future, past = Timestamp(), Timestamp()
    future.FromDatetime(admin.clock.now + timedelta(days=1))
    past.FromDatetime(admin.clock.now - timedelta(days=1))
    created = await admin.credentials.CreateApiKey(request(future), metadata=PLATFORM)
    assert created.api_key.expire_time == future

    hostile = [
        Timestamp(seconds=s, nanos=n) for s, n in ((2**63 - 1, 0), (-(2**63), 0), (2**40, 0), (2, -1), (2, 2**31 - 1))
    ]
    for value in (past, *hostile):
        error = await refused(admin.credentials.CreateApiKey(request(value, "other"), metadata=PLATFORM))
        assert isinstance(error, InvalidArgumentError)
        assert error.metadata["field"] == "expire_time"


async def test_only_those_who_may_read_credentials_see_them(admin: Admin) -> None:
    await admin.create_tenant("acme")
    request = credentials_pb2.ListApiKeysRequest(parent="tenants/acme")
    await admin.credentials.ListApiKeys(request, metadata=calling(Role.TENANT_AUDITOR, "acme"))

    for role in (Role.READER, Role.WRITER):
        error = await refused(admin.credentials.ListApiKeys(request, metadata=calling(role, "acme")))
        assert isinstance(error, PermissionDeniedError) and error.reason == "ROLE_REQUIRED"
