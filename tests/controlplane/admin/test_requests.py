"""Request ids (AIP-155), and that a change is one transaction."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta

from sqlalchemy import func, select

from controlplane.admin.requests import RETENTION
from controlplane.db import models
from saltern.admin.v1 import credentials_pb2, tenants_pb2
from saltern.errors import InvalidArgumentError
from tenants.roles import Role
from tests.support.admin import PLATFORM, Admin, admin_of, calling, refused

REQUEST_ID = "0123abcd-0000-4000-8000-0000000000ef"


async def test_a_repeated_request_answers_the_same_and_changes_nothing(admin: Admin) -> None:
    first = await admin.create_tenant("acme", request_id=REQUEST_ID)
    version = await admin.policy_version()

    second = await admin.create_tenant("acme", request_id=REQUEST_ID)
    third = await admin.create_tenant("acme", request_id=REQUEST_ID.upper())

    assert first == second == third
    assert await admin.policy_version() == version
    assert len(await admin.events("acme")) == 1


async def test_a_request_id_belongs_to_one_request(admin: Admin) -> None:
    await admin.create_tenant("acme", request_id=REQUEST_ID)

    error = await refused(admin.create_tenant("other", request_id=REQUEST_ID))

    assert isinstance(error, InvalidArgumentError) and error.reason == "REQUEST_ID_REUSED"
    assert len(await admin.events("other")) == 0


async def test_requests_repeated_at_a_time_act_once(admin: Admin) -> None:
    answers = await asyncio.gather(*(admin.create_tenant("acme", request_id=REQUEST_ID) for _ in range(5)))

    assert all(answer == answers[0] for answer in answers)
    assert len(await admin.events("acme")) == 1


async def test_a_repeated_creation_of_a_key_does_not_show_its_secret_again(admin: Admin) -> None:
    await admin.create_tenant("acme")
    first = await admin.create_api_key("acme", "ci", request_id=REQUEST_ID)
    second = await admin.create_api_key("acme", "ci", request_id=REQUEST_ID)

    assert first.secret and not second.secret
    assert second.api_key == first.api_key
    async with admin.database.transaction() as session:
        (logged,) = await session.scalars(select(models.RequestLog.response))
    assert first.secret.encode() not in logged


async def test_a_repeated_deletion_succeeds(admin: Admin) -> None:
    await admin.create_tenant("acme")
    request = tenants_pb2.DeleteTenantRequest(name="tenants/acme", request_id=REQUEST_ID)

    await admin.tenants.DeleteTenant(request, metadata=PLATFORM)
    await admin.tenants.DeleteTenant(request, metadata=PLATFORM)

    assert len(await admin.events("acme")) == 2


async def test_i2_request_ids_of_different_callers_do_not_meet(admin: Admin) -> None:
    await admin.create_tenant("a")
    await admin.create_tenant("b")

    answers = [
        await admin.create_api_key(tenant, "ci", metadata=admin_of(tenant), request_id=REQUEST_ID)
        for tenant in ("a", "b")
    ]

    assert [answer.api_key.name for answer in answers] == ["tenants/a/apiKeys/ci", "tenants/b/apiKeys/ci"]
    assert all(answer.secret for answer in answers)


async def test_i12_requests_of_a_deleted_tenant_are_forgotten(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_api_key("acme", "ci", metadata=admin_of("acme"), request_id=REQUEST_ID)
    await admin.delete_tenant("acme")
    await admin.create_tenant("acme")

    again = await admin.create_api_key("acme", "ci", metadata=admin_of("acme"), request_id=REQUEST_ID)

    assert again.secret


async def test_a_refused_request_may_be_repeated_with_its_id(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await refused(admin.create_tenant("acme", request_id=REQUEST_ID))
    await admin.delete_tenant("acme")

    assert (await admin.create_tenant("acme", request_id=REQUEST_ID)).name == "tenants/acme"


async def test_old_request_ids_are_purged(admin: Admin) -> None:
    await admin.create_tenant("acme", request_id=REQUEST_ID)
    admin.clock.now += RETENTION + timedelta(seconds=1)

    await admin.create_tenant("other", request_id=str(uuid.uuid4()))

    async with admin.database.transaction() as session:
        assert await session.scalar(select(func.count()).select_from(models.RequestLog)) == 1


async def test_a_request_id_must_be_a_uuid(admin: Admin) -> None:
    for request_id in ("1", "not-a-uuid", "{" + REQUEST_ID + "}", REQUEST_ID + "\0", "x" * 10_000):
        error = await refused(admin.create_tenant("acme", request_id=request_id))

        assert isinstance(error, InvalidArgumentError)
        assert error.metadata["field"] == "request_id"


async def test_every_change_raises_the_policy_version_and_a_refused_one_does_not(admin: Admin) -> None:
    version = await admin.policy_version()
    await admin.create_tenant("acme")
    await admin.create_namespace("acme", "chat")
    await admin.set_quota("acme", limit_bytes=1)
    await admin.create_api_key("acme", "ci", credentials_pb2.ROLE_READER)
    assert await admin.policy_version() == version + 4

    await refused(admin.create_namespace("acme", "chat"))
    await refused(admin.create_namespace("acme", "other", calling(Role.READER, "acme")))
    assert await admin.policy_version() == version + 4
