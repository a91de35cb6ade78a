"""RotateApiKey: a new secret at once, the one before for a while."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import select

from controlplane.db import models
from controlplane.secrets import parse_api_key
from saltern.admin.v1 import credentials_pb2
from saltern.errors import AbortedError, FailedPreconditionError, InvalidArgumentError
from tests.support.admin import PLATFORM, Admin, Metadata, admin_of, refused

NAME = "tenants/acme/apiKeys/ci"
HOUR_S = 3600
DAY_S = 24 * HOUR_S


async def rotate(
    admin: Admin,
    name: str = NAME,
    *,
    overlap_s: int | None = None,
    expires_in: timedelta | None = None,
    metadata: Metadata = PLATFORM,
    **fields: Any,
) -> credentials_pb2.RotateApiKeyResponse:
    request = credentials_pb2.RotateApiKeyRequest(name=name, **fields)
    if overlap_s is not None:
        request.overlap.CopyFrom(Duration(seconds=overlap_s))
    if expires_in is not None:
        request.expire_time.FromDatetime(admin.clock.now + expires_in)
    return await admin.credentials.RotateApiKey(request, metadata=metadata)


async def revoked_prefixes(admin: Admin) -> set[str]:
    async with admin.database.transaction() as session:
        return set(await session.scalars(select(models.TokenRevocation.token_id_prefix)))


def after(start: datetime, seconds: int) -> Timestamp:
    moment = Timestamp()
    moment.FromDatetime(start + timedelta(seconds=seconds))
    return moment


async def test_the_new_secret_is_shown_once_and_the_old_one_has_its_time(admin: Admin) -> None:
    await admin.create_tenant("acme")
    created = await admin.create_api_key("acme", "ci")

    rotated = await rotate(admin, metadata=admin_of("acme"))

    key = rotated.api_key
    assert rotated.secret != created.secret
    assert (key.lookup, key.previous.lookup) == (parse_api_key(rotated.secret), parse_api_key(created.secret))
    assert key.previous.expire_time == after(key.rotate_time.ToDatetime(), DAY_S)
    assert (key.name, key.role, key.create_time) == (NAME, created.api_key.role, created.api_key.create_time)
    assert key.etag != created.api_key.etag
    listed = await admin.credentials.ListApiKeys(
        credentials_pb2.ListApiKeysRequest(parent="tenants/acme"), metadata=admin_of("acme")
    )
    assert list(listed.api_keys) == [key]
    assert await revoked_prefixes(admin) == set()  # nothing has ended yet
    (event,) = [event for event in await admin.events("acme") if event.method.endswith("/RotateApiKey")]
    assert (event.before or {})["lookup"] == (event.after or {})["previous"]["lookup"]
    for secret in (created.secret, rotated.secret):
        assert secret.split("-", 3)[3] not in repr((event.before, event.after))
    assert await admin.chain_faults("acme") == []

    admin.clock.now += timedelta(seconds=DAY_S)
    got = await admin.credentials.GetApiKey(credentials_pb2.GetApiKeyRequest(name=NAME), metadata=PLATFORM)
    assert not got.HasField("previous")


async def test_a_repeated_request_rotates_once_and_never_shows_the_secret_again(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_api_key("acme", "ci")
    request_id = str(uuid4())

    first = await rotate(admin, request_id=request_id)
    again = await rotate(admin, request_id=request_id)

    assert again.api_key == first.api_key
    assert (bool(first.secret), again.secret) == (True, "")


async def test_a_key_has_two_secrets_at_most(admin: Admin) -> None:
    await admin.create_tenant("acme")
    one = parse_api_key((await admin.create_api_key("acme", "ci")).secret)
    two = parse_api_key((await rotate(admin)).secret)

    error = await refused(rotate(admin))
    assert isinstance(error, FailedPreconditionError) and error.reason == "ROTATION_IN_PROGRESS"
    assert "--end-previous" in error.hint

    ended = await rotate(admin, end_previous=True)
    assert ended.api_key.previous.lookup == two
    assert await revoked_prefixes(admin) == {one}  # nodes refuse its tokens
    admin.clock.now += timedelta(seconds=DAY_S)
    await rotate(admin)  # the overlap is over: nothing to end
    assert two not in await revoked_prefixes(admin)


async def test_without_overlap_the_old_secret_and_its_tokens_end_at_once(admin: Admin) -> None:
    await admin.create_tenant("acme")
    old = parse_api_key((await admin.create_api_key("acme", "ci")).secret)

    rotated = await rotate(admin, overlap_s=0)

    assert not rotated.api_key.HasField("previous")
    assert await revoked_prefixes(admin) == {old}
    async with admin.database.transaction() as session:
        (row,) = await session.scalars(select(models.ApiKey))
    assert (row.previous_lookup, row.previous_secret_sha256) == (None, None)


@pytest.mark.parametrize("overlap_s", [1, HOUR_S - 1, 30 * DAY_S + 1, -1, -(2**63), 2**63 - 1])
async def test_an_overlap_is_none_or_no_shorter_than_a_tokens_life(admin: Admin, overlap_s: int) -> None:
    error = await refused(rotate(admin, overlap_s=overlap_s))

    assert isinstance(error, InvalidArgumentError) and error.metadata == {"field": "overlap"}


async def test_the_overlap_ends_with_the_key_and_a_rotation_can_extend_it(admin: Admin) -> None:
    await admin.create_tenant("acme")
    request = credentials_pb2.CreateApiKeyRequest(
        parent="tenants/acme", api_key_id="ci", api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_WRITER)
    )
    request.api_key.expire_time.FromDatetime(admin.clock.now + timedelta(hours=2))
    expires = (await admin.credentials.CreateApiKey(request, metadata=PLATFORM)).api_key.expire_time

    rotated = (await rotate(admin, expires_in=timedelta(days=90))).api_key

    assert rotated.previous.expire_time == expires
    assert rotated.expire_time.ToDatetime() > expires.ToDatetime()
    error = await refused(rotate(admin, expires_in=timedelta(minutes=59)))
    assert isinstance(error, InvalidArgumentError) and error.metadata == {"field": "expire_time"}


async def test_an_expired_key_needs_a_new_time(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_api_key("acme", "ci")
    await rotate(admin, overlap_s=0, expires_in=timedelta(hours=2))
    admin.clock.now += timedelta(hours=2)

    error = await refused(rotate(admin))
    assert isinstance(error, FailedPreconditionError) and error.reason == "API_KEY_EXPIRED"

    revived = await rotate(admin, expires_in=timedelta(days=1))
    assert not revived.api_key.HasField("previous")  # what had expired stays so


async def test_who_has_read_an_older_state_does_not_rotate_twice(admin: Admin) -> None:
    await admin.create_tenant("acme")
    etag = (await admin.create_api_key("acme", "ci")).api_key.etag
    await rotate(admin, etag=etag)

    error = await refused(rotate(admin, etag=etag, end_previous=True))

    assert isinstance(error, AbortedError) and error.reason == "ETAG_MISMATCH"


async def test_keys_of_the_platform_rotate_too(admin: Admin) -> None:
    await admin.create_api_key("", "node", credentials_pb2.ROLE_NODE)

    rotated = await rotate(admin, "apiKeys/node", overlap_s=HOUR_S)
    await rotate(admin, "apiKeys/node", overlap_s=0, end_previous=True)

    assert rotated.api_key.previous.lookup
    assert [event.method.rpartition("/")[2] for event in await admin.events("platform")][-2:] == ["RotateApiKey"] * 2
