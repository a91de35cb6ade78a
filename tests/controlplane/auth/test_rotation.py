"""A rotated key at the doors: both secrets open until the overlap ends, each with its own tokens and last use."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from sqlalchemy import text, update

from controlplane.db import models
from controlplane.secrets import parse_api_key
from saltern import errors
from saltern.admin.v1 import credentials_pb2, namespaces_pb2
from tenants.tokens import Audience, verify_token
from tests.support.control import Control, bearer, refused

NAME = "tenants/acme/apiKeys/key"


async def rotate(control: Control, overlap_s: int = 3600) -> str:
    request = credentials_pb2.RotateApiKeyRequest(name=NAME, overlap=Duration(seconds=overlap_s))
    return (await control.credentials.RotateApiKey(request, metadata=await control.bearer(control.admin_key))).secret


async def stored_key(control: Control) -> credentials_pb2.ApiKey:
    request = credentials_pb2.GetApiKeyRequest(name=NAME)
    return await control.credentials.GetApiKey(request, metadata=await control.bearer(control.admin_key))


async def set_columns(control: Control, **values: Any) -> None:
    async with control.database.transaction() as session:
        await session.execute(update(models.ApiKey).where(models.ApiKey.id == "key").values(**values))


async def test_both_secrets_open_until_the_overlap_ends(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    old = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    new = await rotate(control)
    listing = namespaces_pb2.ListNamespacesRequest(parent="tenants/acme")
    key_set = control.key_ring.key_set
    tokens = {}
    for secret in (old, new):
        tokens[secret] = (await control.exchange(secret)).access_token
        claims = verify_token(
            tokens[secret], key_set, audience=Audience.CONTROL, now_s=int(datetime.now(UTC).timestamp())
        )
        assert claims.subject == NAME
        assert claims.token_id.startswith(parse_api_key(secret))
        await control.namespaces.ListNamespaces(listing, metadata=bearer(tokens[secret]))
        assert (await control.exchange(secret, "chat")).salt_keys
    # A secret of the one half and a lookup of the other is neither.
    mixed = old[:28] + new[28:]
    assert (await refused(control.exchange(mixed))).reason == "API_KEY_INVALID"

    await set_columns(control, previous_expire_time=datetime.now(UTC) - timedelta(seconds=1))

    assert (await refused(control.exchange(old))).reason == "API_KEY_INVALID"
    error = await refused(control.namespaces.ListNamespaces(listing, metadata=bearer(tokens[old])))
    assert (type(error), error.reason) == (errors.UnauthenticatedError, "CREDENTIAL_REVOKED")
    await control.namespaces.ListNamespaces(listing, metadata=bearer(tokens[new]))


async def test_without_overlap_the_old_secret_and_its_token_end_at_once(control: Control) -> None:
    await control.add_tenant("acme")
    old = await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme")
    token = await control.bearer(old)

    new = await rotate(control, overlap_s=0)

    assert (await refused(control.exchange(old))).reason == "API_KEY_INVALID"
    error = await refused(
        control.namespaces.ListNamespaces(namespaces_pb2.ListNamespacesRequest(parent="tenants/acme"), metadata=token)
    )
    assert isinstance(error, errors.UnauthenticatedError)
    await control.exchange(new)


async def test_no_token_outlives_the_secret_that_it_came_from(control: Control) -> None:
    await control.add_tenant("acme")
    old = await control.add_api_key(credentials_pb2.ROLE_READER, "acme")
    new = await rotate(control)
    soon = datetime.now(UTC) + timedelta(seconds=30)
    await set_columns(control, previous_expire_time=soon)

    assert (await control.exchange(old)).expire_time.ToDatetime(UTC) <= soon
    assert (await control.exchange(new)).expire_time.ToDatetime(UTC) > soon


async def test_each_secret_has_its_own_last_use(control: Control) -> None:
    await control.add_tenant("acme")
    old = await control.add_api_key(credentials_pb2.ROLE_READER, "acme")
    await control.exchange(old)
    used = (await stored_key(control)).last_used_time
    new = await rotate(control)
    rotated = await stored_key(control)
    assert not rotated.HasField("last_used_time")
    assert rotated.previous.last_used_time == used

    await control.exchange(new)
    rotated = await stored_key(control)
    assert rotated.last_used_time.ToDatetime() > used.ToDatetime()
    assert rotated.previous.last_used_time == used  # a minute has not passed, and it was not the one used
    await set_columns(control, previous_last_used_time=datetime.now(UTC) - timedelta(minutes=2))
    await control.exchange(old)
    assert (await stored_key(control)).previous.last_used_time.ToDatetime() >= rotated.last_used_time.ToDatetime()


async def test_an_exchange_writes_last_use_at_most_once_a_minute(control: Control) -> None:
    await control.add_tenant("acme")
    secret = await control.add_api_key(credentials_pb2.ROLE_READER, "acme")
    versions = []
    for _ in range(3):
        await control.exchange(secret)
        async with control.database.transaction() as session:
            # The transaction that wrote the row last.
            versions.append(await session.scalar(text("SELECT xmin::text FROM api_keys WHERE id = 'key'")))
    assert len(set(versions)) == 1

    await set_columns(control, last_used_time=datetime.now(UTC) - timedelta(minutes=2))
    await control.exchange(secret)
    assert (await stored_key(control)).last_used_time.ToDatetime(UTC) > datetime.now(UTC) - timedelta(minutes=1)
