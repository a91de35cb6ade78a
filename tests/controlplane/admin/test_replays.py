"""What is sent back altered, again, elsewhere or at the same time: page tokens, etags, request ids."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.admin.etags import check_etag, make_etag
from controlplane.admin.fields import to_timestamp
from controlplane.admin.pages import decode_identifier_token, encode_page_token
from saltern.admin.v1 import credentials_pb2, namespaces_pb2, tenants_pb2
from saltern.errors import AbortedError, InvalidArgumentError, SalternError
from saltern.keys import frame
from tenants.roles import Role
from tests.support.admin import PLATFORM, Admin, admin_of, admin_services, calling, refused
from tests.support.control import control_plane, migrate

identifiers = st.from_regex(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
bits = st.integers(0, 10_000)


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit changed."""
    at, mask = bit // 8 % len(data), 1 << bit % 8
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


@settings(deadline=None)  # a busy machine is no fault
@given(identifiers, bits)
def test_a_page_token_with_a_bit_changed_is_refused_or_names_another_place_of_the_same_list(
    last: str, bit: int
) -> None:
    """Tokens are not secret: another place is one that its bearer may read. Of another list they never become one."""
    token = encode_page_token("tenants/acme/namespaces", last)
    padded = token + "=" * (-len(token) % 4)
    altered = base64.urlsafe_b64encode(flipped(base64.urlsafe_b64decode(padded), bit)).rstrip(b"=").decode()
    try:
        assert decode_identifier_token(altered, "tenants/acme/namespaces") != last
    except SalternError as error:
        assert isinstance(error, InvalidArgumentError) and error.reason == "INVALID_PAGE_TOKEN" and error.hint
    try:
        raise AssertionError(decode_identifier_token(altered, "tenants/other/namespaces"))
    except InvalidArgumentError:
        pass


@settings(deadline=None)
@given(identifiers, bits)
def test_a_page_token_with_a_character_changed_is_never_another_error(last: str, bit: int) -> None:
    altered = flipped(encode_page_token("tenants", last).encode(), bit).decode("latin-1")
    try:
        decode_identifier_token(altered, "tenants")
    except SalternError as error:
        assert error.reason == "INVALID_PAGE_TOKEN"


@settings(deadline=None)
@given(st.uuids(), st.lists(st.integers(0, 2**63 - 1), max_size=3), bits)
def test_an_etag_with_a_bit_changed_is_none(uid: uuid.UUID, revisions: list[int], bit: int) -> None:
    etag = make_etag(uid, *revisions)
    check_etag(etag, etag, "tenants/acme")
    altered = flipped(etag.encode(), bit).decode("latin-1")
    try:
        check_etag(altered, etag, "tenants/acme")
    except AbortedError as error:
        assert error.reason == "ETAG_MISMATCH" and error.hint
    else:
        raise AssertionError(altered)


@settings(deadline=None)
@given(st.uuids(), st.uuids(), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_etags_are_alike_only_for_one_form_of_one_resource(
    one: uuid.UUID, other: uuid.UUID, first: int, second: int
) -> None:
    assert (make_etag(one, first) == make_etag(other, second)) == ((one, first) == (other, second))


@settings(deadline=None)
@given(st.uuids(), st.lists(st.integers(0, 2**64 - 1), max_size=3))
def test_an_etag_is_of_the_frame_of_what_it_stands_for(uid: uuid.UUID, revisions: list[int]) -> None:
    framed = frame("saltern/etag/1", uid.bytes, *revisions)
    assert make_etag(uid, *revisions) == hashlib.sha256(framed).hexdigest()[:20]


@settings(deadline=None)
@given(st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC)))
def test_a_time_is_told_to_the_microsecond(time: datetime) -> None:
    timestamp = to_timestamp(time)
    assert timestamp is not None and timestamp.ToDatetime(UTC) == time


def creation(tenant: str, request_id: str, display_name: str = "") -> tenants_pb2.CreateTenantRequest:
    return tenants_pb2.CreateTenantRequest(
        tenant_id=tenant, tenant=tenants_pb2.Tenant(display_name=display_name), request_id=request_id
    )


async def outcome_of(call: Any) -> Any:
    try:
        return await call
    except Exception as error:
        return error


async def test_of_two_bodies_under_one_request_id_at_a_time_one_is_done(admin: Admin) -> None:
    for number in range(5):
        request_id = str(uuid.uuid4())
        outcomes = await asyncio.gather(
            *(
                outcome_of(admin.tenants.CreateTenant(creation(f"{name}-{number}", request_id), metadata=PLATFORM))
                for name in ("one", "two", "one", "two")
            )
        )
        done = {outcome.name for outcome in outcomes if isinstance(outcome, tenants_pb2.Tenant)}
        assert len(done) == 1
        made = [name for name in ("one", "two") if await admin.events(f"{name}-{number}")]
        assert done == {f"tenants/{made[0]}-{number}"} and len(made) == 1


async def test_replays_meet_in_the_database_whichever_control_plane_takes_them(postgres: Any) -> None:
    """Two control planes on one database, as behind one name."""
    request_id = str(uuid.uuid4())
    with postgres.fresh_database(migrate) as urls:
        async with admin_services(urls) as one, admin_services(urls) as two:
            both = [
                service.tenants.CreateTenant(creation("acme", request_id), metadata=PLATFORM)
                for service in (one, two, one, two)
            ]
            answers = await asyncio.gather(*both)
            assert all(answer == answers[0] for answer in answers)
            assert len(await one.events("acme")) == 1
            error = await refused(two.tenants.CreateTenant(creation("acme", request_id, "other"), metadata=PLATFORM))
            assert error.reason == "REQUEST_ID_REUSED"


async def test_a_replay_after_a_restart_is_answered_as_before(postgres: Any, tmp_path: Path) -> None:
    request_id = str(uuid.uuid4())
    with postgres.fresh_database(migrate) as urls:
        async with control_plane(urls, tmp_path) as control:
            key = await control.redeem()
            first = await control.tenants.CreateTenant(creation("acme", request_id), metadata=await control.bearer(key))
        async with control_plane(urls, tmp_path) as control:
            control.admin_key = key
            metadata = await control.bearer(key)
            assert await control.tenants.CreateTenant(creation("acme", request_id), metadata=metadata) == first
            error = await refused(control.tenants.CreateTenant(creation("beta", request_id), metadata=metadata))
            assert error.reason == "REQUEST_ID_REUSED"
            created = [event for event in await control.events("tenants/acme") if event.method.endswith("CreateTenant")]
            assert len(created) == 1


async def test_i2_a_replay_by_another_caller_is_a_request_of_its_own(admin: Admin) -> None:
    """Neither another key of the tenant nor another tenant's is answered with what the first was told."""
    await admin.create_tenant("a")
    await admin.create_tenant("b")
    request_id = str(uuid.uuid4())
    request = credentials_pb2.CreateApiKeyRequest(
        parent="tenants/a", api_key_id="ci", api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_WRITER)
    )
    request.request_id = request_id
    first = await admin.credentials.CreateApiKey(request, metadata=admin_of("a"))
    assert first.secret
    same_tenant = await refused(admin.credentials.CreateApiKey(request, metadata=admin_of("a", "second")))
    assert same_tenant.reason == "API_KEY_EXISTS"
    other_tenant = await refused(admin.credentials.CreateApiKey(request, metadata=admin_of("b")))
    assert other_tenant.reason == "RESOURCE_NOT_AVAILABLE"


async def test_i2_a_replay_by_a_caller_who_may_no_longer_do_it_is_refused(admin: Admin) -> None:
    """Who asks is looked at before what was answered."""
    await admin.create_tenant("a")
    request = namespaces_pb2.DeleteNamespaceRequest(name="tenants/a/namespaces/chat", request_id=str(uuid.uuid4()))
    await admin.create_namespace("a", "chat")
    await admin.namespaces.DeleteNamespace(request, metadata=admin_of("a"))
    error = await refused(admin.namespaces.DeleteNamespace(request, metadata=calling(Role.READER, "a", "admin")))
    assert error.reason == "ROLE_REQUIRED"
