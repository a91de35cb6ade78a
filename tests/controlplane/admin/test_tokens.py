"""The administrative side of signing keys and revocations; what comes of them at the doors is tested elsewhere."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import select

from controlplane.db import PlatformScope, models
from saltern.admin.v1 import credentials_pb2, tokens_pb2
from saltern.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from tenants.revocation import KEEP_S, REVOCATIONS_MAX
from tests.support.admin import PLATFORM, Admin, admin_of, refused

State = tokens_pb2.SigningKey


def token_id(number: int) -> str:
    return f"{number:032x}"


async def keys(admin: Admin) -> list[tokens_pb2.SigningKey]:
    response = await admin.tokens.ListSigningKeys(tokens_pb2.ListSigningKeysRequest(), metadata=PLATFORM)
    return list(response.signing_keys)


async def revoke(admin: Admin, number: int, tenant: str = "acme") -> tokens_pb2.TokenRevocation:
    request = tokens_pb2.RevokeTokenRequest(parent=f"tenants/{tenant}" if tenant else "", token_id=token_id(number))
    return await admin.tokens.RevokeToken(request, metadata=PLATFORM)


async def in_force(admin: Admin, tenant: str = "acme", page_size: int = 0) -> list[str]:
    found, page_token = [], ""
    while True:
        request = tokens_pb2.ListTokenRevocationsRequest(
            parent=f"tenants/{tenant}" if tenant else "", page_size=page_size, page_token=page_token
        )
        page = await admin.tokens.ListTokenRevocations(request, metadata=PLATFORM)
        found += [revocation.token_id_prefix for revocation in page.revocations]
        page_token = page.next_page_token
        if not page_token:
            return found


async def row_of(admin: Admin, tenant: str) -> models.Tenant:
    async with admin.database.transaction(PlatformScope()) as session:
        return await session.get_one(models.Tenant, tenant)


async def test_a_rotation_publishes_a_key_that_does_not_sign_yet(admin: Admin) -> None:
    version = await admin.policy_version()

    made = await admin.tokens.RotateSigningKey(tokens_pb2.RotateSigningKeyRequest(), metadata=PLATFORM)

    assert made.state == State.STATE_PUBLISHED and not made.HasField("sign_time")
    assert version < made.publish_version <= await admin.policy_version()
    assert [key.kid for key in await keys(admin)] == [made.kid]
    error = await refused(admin.tokens.RotateSigningKey(tokens_pb2.RotateSigningKeyRequest(), metadata=PLATFORM))
    assert (type(error), error.reason) == (FailedPreconditionError, "ROTATION_IN_PROGRESS")


async def test_i11_an_emergency_leaves_one_key_and_a_trace_without_a_secret(admin: Admin) -> None:
    first = await admin.tokens.RotateSigningKey(tokens_pb2.RotateSigningKeyRequest(), metadata=PLATFORM)
    request = tokens_pb2.RotateSigningKeyRequest(withdraw_now=True)

    second = await admin.tokens.RotateSigningKey(request, metadata=PLATFORM)

    assert [(key.kid, key.state) for key in await keys(admin)] == [(second.kid, State.STATE_SIGNING)]
    event = (await admin.events("platform"))[-1]
    assert event.method == "saltern.admin.v1.TokenService/RotateSigningKey"
    assert first.kid in str(event.before) and first.kid not in str(event.after) and second.kid in str(event.after)
    async with admin.database.transaction(PlatformScope()) as session:
        row = (await session.scalars(select(models.SigningKey))).one()
    assert row.wrapped_private_key is not None and row.public_x not in str(event.after)
    assert not await admin.chain_faults("platform")


async def test_a_repeated_rotation_is_one(admin: Admin) -> None:
    request = tokens_pb2.RotateSigningKeyRequest(request_id="0b5b5a2e-6ad4-4a0f-9b3c-2f4f6a2f9d11")
    first = await admin.tokens.RotateSigningKey(request, metadata=PLATFORM)
    assert await admin.tokens.RotateSigningKey(request, metadata=PLATFORM) == first
    assert len(await keys(admin)) == 1


async def test_revocations_are_listed_page_by_page_and_forgotten_when_they_mean_nothing(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_tenant("other")
    for number in range(5):
        revoked = await revoke(admin, number)
        assert revoked.token_id_prefix == token_id(number) and not revoked.HasField("issued_before_time")
    await revoke(admin, 9, "other")

    assert await in_force(admin, page_size=2) == [token_id(number) for number in range(5)]
    assert await in_force(admin, "other") == [token_id(9)]
    admin.clock.now += timedelta(seconds=KEEP_S)
    assert await in_force(admin) == []
    await revoke(admin, 7)
    async with admin.database.transaction(PlatformScope()) as session:
        rows = await session.scalars(select(models.TokenRevocation).where(models.TokenRevocation.tenant_id == "acme"))
        assert [row.token_id_prefix for row in rows] == [token_id(7)]


async def test_i10_too_many_revocations_become_one_of_all_tokens(admin: Admin) -> None:
    await admin.create_tenant("acme")
    for number in range(REVOCATIONS_MAX):
        assert not (await revoke(admin, number)).widened_to_tenant
    before = await row_of(admin, "acme")

    assert (await revoke(admin, REVOCATIONS_MAX)).widened_to_tenant

    assert await in_force(admin) == []
    after = await row_of(admin, "acme")
    assert after.min_issue_time > max(before.min_issue_time, admin.clock.now)


async def test_revoking_all_tokens_again_and_again_does_not_run_ahead_of_the_clock(admin: Admin) -> None:
    await admin.create_tenant("acme")
    request = tokens_pb2.RevokeTenantTokensRequest(name="tenants/acme")
    error = None
    for _ in range(6):
        try:
            await admin.tokens.RevokeTenantTokens(request, metadata=admin_of("acme"))
        except Exception:
            error = await refused(admin.tokens.RevokeTenantTokens(request, metadata=admin_of("acme")))
    assert isinstance(error, ResourceExhaustedError) and error.reason == "REVOKED_TOO_FAST"
    assert (await row_of(admin, "acme")).min_issue_time <= admin.clock.now + timedelta(seconds=5)
    admin.clock.now += timedelta(seconds=5)
    await admin.tokens.RevokeTenantTokens(request, metadata=admin_of("acme"))


async def test_ending_the_tokens_of_a_key_keeps_the_key(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_api_key("acme", "ci")
    request = tokens_pb2.RevokeApiKeyTokensRequest(name="tenants/acme/apiKeys/ci")

    revoked = await admin.tokens.RevokeApiKeyTokens(request, metadata=admin_of("acme"))

    async with admin.database.transaction(PlatformScope()) as session:
        key = (await session.scalars(select(models.ApiKey))).one()
    assert revoked.token_id_prefix == key.lookup
    assert key.min_issue_time is not None
    assert revoked.issued_before_time.seconds == key.min_issue_time.timestamp() > admin.clock.now.timestamp()


async def test_deleting_a_key_ends_its_tokens_for_good(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_api_key("acme", "ci")
    async with admin.database.transaction(PlatformScope()) as session:
        lookup = (await session.scalars(select(models.ApiKey.lookup))).one()

    delete = credentials_pb2.DeleteApiKeyRequest(name="tenants/acme/apiKeys/ci")
    await admin.credentials.DeleteApiKey(delete, metadata=admin_of("acme"))

    assert await in_force(admin) == [lookup]


@pytest.mark.parametrize(
    "bad", ["", "0" * 16, "0" * 31, "g" * 32, "A" * 32, "0" * 31 + "\n", "eyJhbGciOiJFZERTQSJ9.e30"]
)
async def test_what_is_no_token_id_is_refused(admin: Admin, bad: str) -> None:
    await admin.create_tenant("acme")
    request = tokens_pb2.RevokeTokenRequest(parent="tenants/acme", token_id=bad)
    error = await refused(admin.tokens.RevokeToken(request, metadata=PLATFORM))
    assert isinstance(error, InvalidArgumentError) and error.hint
    assert not bad or bad not in str(error)


async def test_a_key_that_is_not_there_has_no_tokens(admin: Admin) -> None:
    await admin.create_tenant("acme")
    request = tokens_pb2.RevokeApiKeyTokensRequest(name="tenants/acme/apiKeys/nobody")
    assert isinstance(await refused(admin.tokens.RevokeApiKeyTokens(request, metadata=PLATFORM)), NotFoundError)
