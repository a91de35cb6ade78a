from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from sqlalchemy import select

from controlplane.db import models
from controlplane.secrets import LocalKeyEncryptionKey, root_secret_context
from saltern.admin.v1 import credentials_pb2
from saltern.admin.v1.salt_policies_pb2 import (
    GetSaltPolicyRequest,
    RotateSaltRequest,
    SaltPolicy,
    UpdateSaltPolicyRequest,
)
from saltern.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    SalternError,
)
from tenants.roles import Role
from tests.support.admin import PLATFORM, Admin, admin_of, calling, refused

NAME = "tenants/acme/saltPolicy"
DAY_S = 86400


async def get(admin: Admin) -> SaltPolicy:
    return await admin.salt_policies.GetSaltPolicy(GetSaltPolicyRequest(name=NAME), metadata=PLATFORM)


async def rotate(admin: Admin, grace_s: int | None = None, **fields: Any) -> SaltPolicy:
    grace = {} if grace_s is None else {"grace_period": Duration(seconds=grace_s)}
    request = RotateSaltRequest(name=NAME, **grace, **fields)
    return await admin.salt_policies.RotateSalt(request, metadata=admin_of("acme"))


async def update(admin: Admin, *paths: str, request_id: str = "", **fields: Any) -> SaltPolicy:
    request = UpdateSaltPolicyRequest(
        salt_policy=SaltPolicy(name=NAME, **fields), update_mask=FieldMask(paths=paths), request_id=request_id
    )
    return await admin.salt_policies.UpdateSaltPolicy(request, metadata=admin_of("acme"))


async def roots(admin: Admin) -> dict[int, bytes]:
    async with admin.database.transaction() as session:
        owner = await session.get_one(models.Tenant, "acme")
        rows = list(await session.scalars(select(models.SaltEpoch).where(models.SaltEpoch.tenant_id == "acme")))
    key = LocalKeyEncryptionKey(bytes(32))
    return {
        row.epoch: await key.unwrap(row.wrapped_root_secret, root_secret_context(owner.uid, row.epoch)) for row in rows
    }


async def test_a_new_tenant_has_one_epoch_and_no_schedule(admin: Admin) -> None:
    await admin.create_tenant("acme")

    policy = await get(admin)

    assert policy.scope == SaltPolicy.SCOPE_TENANT
    assert [(epoch.epoch, epoch.HasField("read_until_time")) for epoch in policy.epochs] == [(1, False)]
    assert policy.grace_period.seconds == DAY_S
    assert not policy.HasField("rotation_period") and not policy.HasField("next_rotation_time")


async def test_i12_each_rotation_begins_an_epoch_with_a_root_of_its_own_and_keeps_the_others_for_the_grace(
    admin: Admin,
) -> None:
    await admin.create_tenant("acme")
    before = await roots(admin)
    version = await admin.policy_version()

    policy = await rotate(admin)

    assert policy.epoch == 2
    first, second = policy.epochs
    assert (first.epoch, second.epoch) == (1, 2)
    assert first.read_until_time.ToDatetime() == second.create_time.ToDatetime() + timedelta(days=1)
    after = await roots(admin)
    assert after[1] == before[1] and after[2] not in before.values()
    assert policy == await get(admin)
    assert await admin.policy_version() == version + 1
    event = (await admin.events("acme"))[-1]
    assert (event.method, event.resource) == ("saltern.admin.v1.SaltPolicyService/RotateSalt", NAME)
    assert event.before is not None and event.after is not None
    assert [epoch["epoch"] for epoch in event.before["epochs"]] == ["1"]
    assert [epoch["epoch"] for epoch in event.after["epochs"]] == ["1", "2"]
    assert await admin.chain_faults("acme") == []


async def test_i12_a_rotation_without_grace_destroys_every_earlier_root_in_the_same_act(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await rotate(admin)

    policy = await rotate(admin, grace_s=0)

    assert [epoch.epoch for epoch in policy.epochs] == [3]
    assert set(await roots(admin)) == {3}


async def test_a_repeated_rotation_rotates_once(admin: Admin) -> None:
    await admin.create_tenant("acme")
    request_id = str(uuid4())

    first = await rotate(admin, request_id=request_id)
    again = await rotate(admin, request_id=request_id)

    assert first == again == await get(admin)


async def test_a_change_goes_by_the_mask_or_by_what_is_given(admin: Admin) -> None:
    await admin.create_tenant("acme")

    policy = await update(admin, rotation_period=Duration(seconds=7 * DAY_S))
    assert (policy.rotation_period.seconds, policy.grace_period.seconds) == (7 * DAY_S, DAY_S)
    created = policy.epochs[0].create_time.ToDatetime()
    assert policy.next_rotation_time.ToDatetime() == created + timedelta(days=7)
    assert policy.epoch == 1

    policy = await update(admin, "grace_period", grace_period=Duration(seconds=60), rotation_period=Duration())
    assert (policy.rotation_period.seconds, policy.grace_period.seconds) == (7 * DAY_S, 60)

    policy = await update(admin, "*", scope=SaltPolicy.SCOPE_TENANT, grace_period=Duration(seconds=5))
    assert not policy.HasField("rotation_period") and not policy.HasField("next_rotation_time")
    assert policy.epoch == 1
    assert await admin.chain_faults("acme") == []


@pytest.mark.parametrize("scope", ["SCOPE_NAMESPACE", "SCOPE_PROJECT", "SCOPE_USER", "SCOPE_SESSION"])
async def test_i2_another_scope_begins_a_new_epoch_and_ends_the_others_at_once(admin: Admin, scope: str) -> None:
    """A client that kept a salt of the wider scope would go on finding and leaving entries under it."""
    await admin.create_tenant("acme")

    policy = await update(admin, scope=SaltPolicy.Scope.Value(scope))

    assert policy.scope == SaltPolicy.Scope.Value(scope)
    assert [epoch.epoch for epoch in policy.epochs] == [2]
    assert set(await roots(admin)) == {2}
    again = await update(admin, scope=SaltPolicy.Scope.Value(scope))
    assert again.epoch == 2


async def test_another_scope_and_a_schedule_come_together(admin: Admin) -> None:
    """Found by the fuzz: what was written in between had a period and no time when it is over."""
    await admin.create_tenant("acme")
    scope = SaltPolicy.SCOPE_USER

    begun = await update(admin, scope=scope, rotation_period=Duration(seconds=30 * DAY_S))
    assert (begun.scope, begun.epoch, begun.rotation_period.seconds) == (scope, 2, 30 * DAY_S)
    assert begun.next_rotation_time.seconds == begun.epochs[-1].create_time.seconds + 30 * DAY_S
    ended = await update(admin, "scope", "rotation_period", scope=SaltPolicy.SCOPE_TENANT)
    assert ended.epoch == 3 and not ended.HasField("next_rotation_time")


async def test_a_stale_etag_changes_nothing(admin: Admin) -> None:
    await admin.create_tenant("acme")
    stale = (await get(admin)).etag
    current = await rotate(admin, etag=stale)

    for call in (rotate(admin, etag=stale), update(admin, etag=stale, grace_period=Duration(seconds=1))):
        error = await refused(call)
        assert isinstance(error, AbortedError) and error.reason == "ETAG_MISMATCH"
    assert await get(admin) == current


@pytest.mark.parametrize(
    ("paths", "fields"),
    [
        ([], {}),
        (["epoch"], {"epoch": 9}),
        (["name"], {}),
        (["scope"], {}),
        ([], {"scope": 99}),
        ([], {"rotation_period": Duration(seconds=3599)}),
        ([], {"rotation_period": Duration(seconds=3600, nanos=1)}),
        ([], {"rotation_period": Duration(seconds=-3600)}),
        ([], {"rotation_period": Duration(seconds=400 * DAY_S + 1)}),
        ([], {"grace_period": Duration(seconds=-1)}),
        ([], {"grace_period": Duration(seconds=90 * DAY_S + 1)}),
        ([], {"grace_period": Duration(nanos=1)}),
    ],
)
async def test_a_malformed_change_is_refused(admin: Admin, paths: list[str], fields: dict[str, Any]) -> None:
    await admin.create_tenant("acme")

    error = await refused(update(admin, *paths, **fields))

    assert isinstance(error, InvalidArgumentError) and error.hint
    assert (await get(admin)).epoch == 1


async def test_readers_and_auditors_change_no_salt(admin: Admin) -> None:
    await admin.create_tenant("acme")

    for role in (Role.TENANT_AUDITOR, Role.WRITER, Role.READER):
        metadata = calling(role, "acme")
        error = await refused(admin.salt_policies.RotateSalt(RotateSaltRequest(name=NAME), metadata=metadata))
        assert isinstance(error, PermissionDeniedError)
        assert await admin.salt_policies.GetSaltPolicy(GetSaltPolicyRequest(name=NAME), metadata=metadata)


async def test_a_suspended_tenant_rotates_nothing_by_itself(admin: Admin) -> None:
    from saltern.admin.v1.tenants_pb2 import SuspendTenantRequest

    await admin.create_tenant("acme")
    await admin.tenants.SuspendTenant(SuspendTenantRequest(name="tenants/acme"), metadata=PLATFORM)

    error = await refused(rotate(admin))

    assert isinstance(error, FailedPreconditionError) and error.reason == "TENANT_SUSPENDED"


async def bound_key(
    admin: Admin, role: int, project: str = "", user: str = ""
) -> credentials_pb2.ApiKey | SalternError:
    request = credentials_pb2.CreateApiKeyRequest(
        parent="tenants/acme",
        api_key_id="bound",
        api_key=credentials_pb2.ApiKey(role=role, project_id=project, user_id=user),  # type: ignore[arg-type]
    )
    return (await admin.credentials.CreateApiKey(request, metadata=admin_of("acme"))).api_key


async def test_a_key_says_what_it_is_bound_to(admin: Admin) -> None:
    await admin.create_tenant("acme")

    made = await bound_key(admin, credentials_pb2.ROLE_WRITER, "p-1", "user@example.org")

    read = await admin.credentials.GetApiKey(
        credentials_pb2.GetApiKeyRequest(name="tenants/acme/apiKeys/bound"), metadata=PLATFORM
    )
    assert made == read
    assert (read.project_id, read.user_id) == ("p-1", "user@example.org")


@pytest.mark.parametrize(
    ("role", "project"),
    [
        (credentials_pb2.ROLE_TENANT_ADMIN, "p"),
        (credentials_pb2.ROLE_TENANT_AUDITOR, "p"),
        (credentials_pb2.ROLE_WRITER, "a b"),
        (credentials_pb2.ROLE_WRITER, "x" * 129),
    ],
)
async def test_i2_only_keys_of_entries_are_bound_and_to_a_well_formed_name(
    admin: Admin, role: int, project: str
) -> None:
    await admin.create_tenant("acme")

    error = await refused(bound_key(admin, role, project))

    assert isinstance(error, InvalidArgumentError)
