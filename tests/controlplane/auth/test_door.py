"""The control plane's door (I1): every bad token, revoked credentials, hostile bytes; and what passes."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import descriptor_pool
from sqlalchemy import text, update

from controlplane.auth.door import ADMIN_REQUEST_MAX_BYTES, OPEN_SERVICES, TENANT_CALLS_MAX
from controlplane.db import models
from controlplane.secrets import parse_api_key
from controlplane.server import MESSAGE_MAX_BYTES, SERVICE_NAMES
from saltern import errors
from saltern.admin.v1 import credentials_pb2, namespaces_pb2, quotas_pb2, tenants_pb2, tokens_pb2
from saltern.auth.v1 import auth_pb2
from tenants.tokens import Audience
from tests.support.bad_tokens import bad_tokens, good_claims, good_header, leaked, sign_raw
from tests.support.control import Control, bearer, refused

LIST_TENANTS = tenants_pb2.ListTenantsRequest()


async def test_i1_every_bad_token_is_refused_with_its_reason(
    control: Control, capfd: pytest.CaptureFixture[str]
) -> None:
    await control.add_tenant("acme")
    secret = await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme", "key")
    ring = control.key_ring
    issuer, now_s = ring.key_set.issuer, int(time.time())
    table = bad_tokens(
        ring.private_key, Ed25519PrivateKey.generate(), ring.kid, issuer, now_s, Audience.CONTROL, tenant="acme"
    )
    assert len(table) >= 100
    request = tenants_pb2.GetTenantRequest(name="tenants/acme")
    for name, token, expected_reason in table:
        error = await refused(control.tenants.GetTenant(request, metadata=bearer(token)))
        assert (type(error), error.reason) == (errors.UnauthenticatedError, expected_reason), name
        assert not token or token not in repr(vars(error)), name
        assert leaked(table, repr(vars(error))) == [], name
    assert leaked(table, "".join(capfd.readouterr())) == []
    trail = [*await control.events(""), *await control.events("tenants/acme")]
    assert leaked(table, repr(trail)) == []
    # A second on: no token of before the tenant was made is good for it.
    claims = good_claims(issuer=issuer, now_s=now_s + 1, audience=Audience.CONTROL) | {"jti": parse_api_key(secret) * 2}
    good = bearer(sign_raw(ring.private_key, good_header(ring.kid), claims))
    assert (await control.tenants.GetTenant(request, metadata=good)).name == "tenants/acme"


def test_i1_what_is_open_is_written_down_twice() -> None:
    """A service, or a method of an open one, that is new is not open before somebody has said so here as well."""
    assert {service for service in OPEN_SERVICES if service.startswith("saltern.")} == {"saltern.auth.v1.AuthService"}
    assert {service for service in OPEN_SERVICES if service not in SERVICE_NAMES} == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    (auth,) = (descriptor_pool.Default().FindServiceByName(name) for name in SERVICE_NAMES if name in OPEN_SERVICES)
    # Each of them is given what it verifies, a key or a token, in its request; the keys of the set are public.
    assert {method.name for method in auth.methods} <= {
        "ExchangeApiKey",
        "ExchangeToken",
        "GetKeySet",
        "RedeemBootstrapToken",
    }


async def test_i1_every_method_that_is_not_open_needs_a_token(control: Control) -> None:
    guarded = [service for service in SERVICE_NAMES if service not in OPEN_SERVICES]
    services = [descriptor_pool.Default().FindServiceByName(service) for service in guarded]
    methods = [method for service in services for method in service.methods]
    assert len(methods) >= 57
    for method in methods:
        # An empty body is a valid request of every method.
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.client_streaming:
            call = control.channel.stream_stream(path, request_serializer=bytes)(iter([b""])).read()
        elif method.server_streaming:
            call = control.channel.unary_stream(path, request_serializer=bytes)(b"").read()
        else:
            call = control.channel.unary_unary(path, request_serializer=bytes)(b"")
        assert (await refused(call)).reason == "TOKEN_MISSING", path


async def test_metadata_must_hold_one_bearer_token(control: Control) -> None:
    (good,) = await control.bearer(control.admin_key)
    for metadata, reason in (
        ((), "TOKEN_MISSING"),
        ((("authorization", ""),), "TOKEN_MALFORMED"),
        ((("authorization", "Bearer"),), "TOKEN_MALFORMED"),
        ((("authorization", "Bearer "),), "TOKEN_MALFORMED"),
        ((("authorization", good[1].replace("Bearer", "Basic")),), "TOKEN_MALFORMED"),
        ((good, good), "TOKEN_MALFORMED"),
        ((("authorization", "bearer " + "A" * 8000),), "TOKEN_MALFORMED"),
        ((("authorization-bin", b"\xff\xfe\x00"),), "TOKEN_MISSING"),
    ):
        error = await refused(control.tenants.ListTenants(LIST_TENANTS, metadata=metadata))
        assert (type(error), error.reason) == (errors.UnauthenticatedError, reason), metadata
    lower = (("authorization", good[1].replace("Bearer", "bearer")),)
    await control.tenants.ListTenants(LIST_TENANTS, metadata=lower)


async def test_i10_a_deleted_key_stops_working_at_once(control: Control) -> None:
    await control.add_tenant("acme")
    token = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme", "key"))
    request = tenants_pb2.GetTenantRequest(name="tenants/acme")
    await control.tenants.GetTenant(request, metadata=token)
    await control.delete_api_key("tenants/acme/apiKeys/key")
    error = await refused(control.tenants.GetTenant(request, metadata=token))
    assert (type(error), error.reason) == (errors.UnauthenticatedError, "CREDENTIAL_REVOKED")
    # A new key of the same name does not bring old tokens back.
    fresh = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme", "key"))
    assert (await refused(control.tenants.GetTenant(request, metadata=token))).reason == "CREDENTIAL_REVOKED"
    await control.tenants.GetTenant(request, metadata=fresh)


async def test_i10_a_token_that_was_revoked_by_its_id_is_refused_at_once(control: Control) -> None:
    await control.add_tenant("acme")
    secret = await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme", "key")
    token, other = (await control.exchange(secret)).access_token, await control.bearer(secret)
    request = tenants_pb2.GetTenantRequest(name="tenants/acme")
    await control.tenants.GetTenant(request, metadata=bearer(token))
    token_id = str(jwt.decode(token, options={"verify_signature": False})["jti"])
    await control.tokens.RevokeToken(
        tokens_pb2.RevokeTokenRequest(parent="tenants/acme", token_id=token_id), metadata=other
    )
    error = await refused(control.tenants.GetTenant(request, metadata=bearer(token)))
    assert (type(error), error.reason) == (errors.UnauthenticatedError, "TOKEN_REVOKED")
    await control.tenants.GetTenant(request, metadata=other)


async def test_i12_a_new_tenant_of_the_same_name_is_another_one(control: Control) -> None:
    await control.add_tenant("acme")
    token = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme", "key"))
    admin = await control.bearer(control.admin_key)
    await control.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name="tenants/acme"), metadata=admin)
    await control.add_tenant("acme")
    await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme", "key")
    request = tenants_pb2.GetTenantRequest(name="tenants/acme")
    assert (await refused(control.tenants.GetTenant(request, metadata=token))).reason == "CREDENTIAL_REVOKED"


async def test_an_expired_key_and_a_changed_role_end_their_tokens(control: Control) -> None:
    await control.add_tenant("acme")
    token = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_TENANT_AUDITOR, "acme", "key"))
    request = tenants_pb2.GetTenantRequest(name="tenants/acme")
    mine = update(models.ApiKey).where(models.ApiKey.id == "key")
    for changed, restored in (
        ({"expire_time": datetime.now(UTC) - timedelta(seconds=1)}, {"expire_time": None}),
        ({"role": "reader"}, {"role": "tenant-auditor"}),
    ):
        async with control.database.transaction() as session:
            await session.execute(mine.values(**changed))
        assert (await refused(control.tenants.GetTenant(request, metadata=token))).reason == "CREDENTIAL_REVOKED"
        async with control.database.transaction() as session:
            await session.execute(mine.values(**restored))
        await control.tenants.GetTenant(request, metadata=token)


async def test_i11_attempts_at_the_door_are_audited_where_they_belong(control: Control) -> None:
    await control.add_tenant("acme")
    token = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme", "key"))
    admin = await control.bearer(control.admin_key)
    await control.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name="tenants/acme"), metadata=admin)
    request = tenants_pb2.GetTenantRequest(name="tenants/acme")
    error = await refused(control.tenants.GetTenant(request, metadata=token))
    assert (type(error), error.reason) == (errors.FailedPreconditionError, "TENANT_SUSPENDED")
    newest = (await control.events("tenants/acme"))[0]
    assert (newest.actor, newest.reason) == ("tenants/acme/apiKeys/key", "TENANT_SUSPENDED")
    assert newest.method == "saltern.admin.v1.TenantService/GetTenant"

    await refused(control.tenants.ListTenants(LIST_TENANTS, metadata=bearer("garbage")))
    newest = (await control.events())[0]
    assert (newest.actor, newest.reason) == ("anonymous", "TOKEN_MALFORMED")


async def test_a_large_request_is_refused_and_says_the_limit(control: Control) -> None:
    admin = await control.bearer(control.admin_key)
    request = tenants_pb2.CreateTenantRequest(tenant_id="a" * (ADMIN_REQUEST_MAX_BYTES + 1))
    error = await refused(control.tenants.CreateTenant(request, metadata=admin))
    assert (type(error), error.reason) == (errors.ResourceExhaustedError, "MESSAGE_TOO_LARGE")
    assert str(ADMIN_REQUEST_MAX_BYTES) in error.message
    request = tenants_pb2.CreateTenantRequest(tenant_id="a" * (MESSAGE_MAX_BYTES + 1))
    error = await refused(control.tenants.CreateTenant(request, metadata=admin))
    assert (type(error), error.reason) == (errors.ResourceExhaustedError, "MESSAGE_TOO_LARGE")


async def test_hostile_requests_get_a_typed_error(control: Control) -> None:
    admin = await control.bearer(control.admin_key)

    async def raw(call: Any, body: bytes) -> errors.SalternError:
        method = control.channel.unary_unary(call._method, request_serializer=bytes)
        return await refused(method(body, metadata=admin))

    # Fields of the wrong type, truncated messages, invalid UTF-8, a length of 2^63, unfinished groups.
    for body in (b"\xff" * 64, b"\x0a\x7f", b"\x0a\x02\xc3\x28", b"\x0a" + b"\xff" * 9 + b"\x7f", b"\x0b" * 200):
        for call in (control.tenants.CreateTenant, control.quotas.UpdateQuota, control.auth.ExchangeApiKey):
            error = await raw(call, body)
            assert isinstance(error, errors.SalternError), body
    for name in (
        "tenants/\x00",
        "tenants/acme\x00b",
        "tenants/../x",
        "tenants/" + "a" * 100_000,
        "\n",
        "tenants/\uff41cme",
    ):
        error = await refused(control.tenants.GetTenant(tenants_pb2.GetTenantRequest(name=name), metadata=admin))
        assert type(error) is errors.InvalidArgumentError, name
        assert "\x00" not in error.message and "\n" not in error.message
    # A million elements fit into 2 MB of wire bytes: refused before anybody walks through them.
    quota = quotas_pb2.Quota(name="tenants/acme/quota", tiers=[quotas_pb2.TierQuota()] * 1_000_000)
    error = await refused(control.quotas.UpdateQuota(quotas_pb2.UpdateQuotaRequest(quota=quota), metadata=admin))
    assert type(error) is errors.ResourceExhaustedError
    with pytest.raises(grpc.RpcError) as caught:
        await control.channel.unary_unary("/saltern.admin.v1.TenantService/NoSuchMethod")(b"", metadata=admin)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (await control.exchange(control.admin_key)).access_token


async def test_garbage_on_the_port_harms_nobody(control: Control) -> None:
    host, port = control.plane.endpoint
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    payloads = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        b"\x16\x03\x01" + os.urandom(512),
        b"SLTN" + bytes(28),
        preface[:10],
        preface + os.urandom(1024),
        # Frames that claim 16 MB, unknown types, headers without an end.
        preface + settings + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(100),
        preface + settings + b"\x00\x00\x04\x01\x00\x00\x00\x00\x01" + os.urandom(4),
    ]

    async def poke(payload: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(payload)
            writer.write_eof()
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    silent = [await asyncio.open_connection(host, port) for _ in range(50)]
    await asyncio.gather(*(poke(payload) for payload in payloads * 3))
    assert (await control.exchange(control.admin_key)).access_token
    for _, writer in silent:
        writer.close()


async def test_a_cached_token_still_expires(control: Control) -> None:
    """The cache remembers the signature check, never beyond the token's own end."""
    ring = control.key_ring
    now_s = int(time.time()) + 1
    claims = good_claims(issuer=ring.key_set.issuer, now_s=now_s, audience=Audience.CONTROL) | {
        "sub": "apiKeys/bootstrap-admin",
        "tenant": "",
        "role": "platform-admin",
        "exp": now_s + 1,
        "jti": parse_api_key(control.admin_key) * 2,
    }
    token = bearer(sign_raw(ring.private_key, good_header(ring.kid), claims))
    await control.tenants.ListTenants(LIST_TENANTS, metadata=token)
    await asyncio.sleep(now_s + 1 - time.time())
    error = await refused(control.tenants.ListTenants(LIST_TENANTS, metadata=token))
    assert error.reason == "TOKEN_EXPIRED"


async def test_open_services_need_no_token(control: Control) -> None:
    assert (await control.auth.GetKeySet(auth_pb2.GetKeySetRequest())).keys


async def _stalled(channel: grpc.aio.Channel, path: str, count: int, metadata: Any = ()) -> list[Any]:
    """Calls that were begun and never send their message; all those past a limit have been refused already."""
    calls = [channel.stream_unary(path)(metadata=metadata) for _ in range(count)]
    for call in calls:
        await call.wait_for_connection()
    return calls


async def _refusal(calls: list[Any]) -> grpc.StatusCode:
    """How the first of ``calls`` that ends has ended."""
    codes = [asyncio.ensure_future(call.code()) for call in calls]
    done, pending = await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
    for code in pending:
        code.cancel()
    return done.pop().result()


@pytest.mark.parametrize(
    ("path", "calls_max"),
    [
        ("/saltern.auth.v1.AuthService/GetKeySet", OPEN_SERVICES["saltern.auth.v1.AuthService"]),
        ("/grpc.health.v1.Health/Watch", OPEN_SERVICES["grpc.health.v1.Health"]),
    ],
)
async def test_i10_callers_without_a_token_cannot_take_every_place(control: Control, path: str, calls_max: int) -> None:
    admin = await control.bearer(control.admin_key)
    async with AsyncExitStack() as stack:
        calls = []
        for _ in range(0, calls_max + 1, 100):  # a connection carries so many streams
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(str(control.plane.endpoint), options=options)
            calls += await _stalled(await stack.enter_async_context(channel), path, 100)
        assert await _refusal(calls) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await control.tenants.ListTenants(LIST_TENANTS, metadata=admin)
        for call in calls:
            call.cancel()


async def test_i10_a_tenant_cannot_take_every_place(control: Control) -> None:
    await control.add_tenant("acme")
    admin = await control.bearer(control.admin_key)
    token = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_READER, "acme", "key"))
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(str(control.plane.endpoint), options=options) as channel:
        path = "/saltern.admin.v1.TenantService/GetTenant"
        calls = await _stalled(channel, path, TENANT_CALLS_MAX + 1, token)
        assert await _refusal(calls) is grpc.StatusCode.RESOURCE_EXHAUSTED
        request = tenants_pb2.GetTenantRequest(name="tenants/acme")
        assert (await refused(control.tenants.GetTenant(request, metadata=token))).reason == "TOO_MANY_CALLS"
        assert (await control.tenants.GetTenant(request, metadata=admin)).name == "tenants/acme"
        for call in calls:
            call.cancel()


async def test_i10_a_tenant_whose_calls_are_slow_does_not_take_every_connection(control: Control) -> None:
    tokens = {}
    for tenant in ("acme", "beta"):
        await control.add_tenant(tenant)
        tokens[tenant] = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_READER, tenant, "key"))
    async with control.database.transaction() as session:
        await session.execute(text("LOCK TABLE namespaces IN ACCESS EXCLUSIVE MODE"))  # which only acme asks for
        wanted = namespaces_pb2.ListNamespacesRequest(parent="tenants/acme")
        slow = [control.namespaces.ListNamespaces(wanted, metadata=tokens["acme"]) for _ in range(40)]
        request = tenants_pb2.GetTenantRequest(name="tenants/beta")
        for _ in range(5):
            assert (await control.tenants.GetTenant(request, metadata=tokens["beta"], timeout=3)).name == request.name
        assert not any(call.done() for call in slow)
    assert {len((await call).namespaces) for call in slow} == {0}


async def test_i10_a_call_without_a_token_is_answered_before_its_message(control: Control) -> None:
    (call,) = await _stalled(control.channel, "/saltern.admin.v1.TenantService/ListTenants", 1)
    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_i10_a_key_that_is_deleted_before_the_message_comes_is_refused(control: Control) -> None:
    """The token is verified when the call begins, the credential behind it at the last moment."""
    await control.add_tenant("acme")
    token = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme", "key"))
    method = control.channel.stream_unary("/saltern.admin.v1.TenantService/GetTenant")
    call = method(metadata=token)
    await call.wait_for_connection()
    await control.delete_api_key("tenants/acme/apiKeys/key")
    await call.write(tenants_pb2.GetTenantRequest(name="tenants/acme").SerializeToString())
    assert (await refused(call)).reason == "CREDENTIAL_REVOKED"
