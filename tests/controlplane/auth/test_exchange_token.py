"""What a token is good for: the same as came with it, never more, and only while all that it hangs on holds."""

from __future__ import annotations

import asyncio
import time
from itertools import product

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.json_format import MessageToDict

from controlplane.auth.exchange_token import TENANT_EXCHANGES_MAX
from controlplane.db import ServiceScope, ServiceTask
from controlplane.db.locks import lock_audit_chains
from saltern import errors
from saltern.admin.v1 import (
    audit_pb2,
    credentials_pb2,
    sharing_groups_pb2,
    sharing_groups_pb2_grpc,
    tenants_pb2,
    tokens_pb2,
)
from saltern.auth.v1 import auth_pb2
from saltern.errors import SalternError
from tenants.tokens import Audience, verify_token
from tests.support.bad_tokens import bad_tokens, leaked
from tests.support.control import Control, refused

WRITER = credentials_pb2.ROLE_WRITER


async def exchange(control: Control, token: str, **narrowing: str) -> auth_pb2.ExchangeTokenResponse:
    request = auth_pb2.ExchangeTokenRequest(access_token=token, **narrowing)
    response: auth_pb2.ExchangeTokenResponse = await control.auth.ExchangeToken(request)
    return response


async def reason(control: Control, token: str, **narrowing: str) -> str:
    error: SalternError = await refused(exchange(control, token, **narrowing))
    assert len(token) < 9 or token not in repr(vars(error))
    return error.reason


async def writer(control: Control, tenant: str = "acme", *, project_id: str = "") -> str:
    await control.add_tenant(tenant, "chat")
    return await control.add_api_key(WRITER, tenant, "writer", project_id=project_id)


async def exchanges(control: Control, tenant: str = "acme") -> list[audit_pb2.AuditEvent]:
    return [
        event
        for event in await control.events(f"tenants/{tenant}", exchanges=True)
        if event.method.endswith("/ExchangeToken")
    ]


async def test_i2_a_token_gives_what_came_with_it_to_whoever_holds_it(control: Control) -> None:
    secret = await writer(control)
    await control.rotate_salt("acme")
    given = await control.exchange(secret, "chat")

    answer = await exchange(control, given.access_token)

    assert [salt.epoch for salt in answer.salt_keys] == [1, 2]
    for name in (
        "expire_time",
        "tenant_id",
        "salt_keys",
        "model_fingerprint",
        "block_tokens",
        "block_bytes",
        "nodes",
        "sharing_group_uid",
    ):
        assert getattr(answer, name) == getattr(given, name), name
    assert (answer.namespace_id, answer.project_id, answer.user_id, answer.session_id) == ("chat", "", "", "")
    assert answer.can_write
    reader = await control.add_api_key(credentials_pb2.ROLE_READER, "acme", "reader")
    assert not (await exchange(control, (await control.exchange(reader, "chat")).access_token)).can_write


async def test_i2_a_narrowed_token_gives_its_own_salts_only(control: Control) -> None:
    secret = await writer(control)
    wide = await control.exchange(secret, "chat")
    for names in product(("", "p"), ("", "u"), ("", "s")):
        narrowing = dict(zip(("project_id", "user_id", "session_id"), names, strict=True))
        given = await control.exchange(secret, "chat", **narrowing)
        answer = await exchange(control, given.access_token)
        assert answer.salt_keys == given.salt_keys
        assert (answer.project_id, answer.user_id, answer.session_id) == names
        assert (answer.salt_keys == wide.salt_keys) == (names == ("", "", ""))


async def test_i2_a_request_narrows_further_and_never_beside_or_wider(control: Control) -> None:
    secret = await writer(control)

    async def token(**narrowing: str) -> str:
        return (await control.exchange(secret, "chat", **narrowing)).access_token

    ann = await control.exchange(secret, "chat", user_id="ann", session_id="1")
    assert (await exchange(control, await token(), user_id="ann", session_id="1")).salt_keys == ann.salt_keys
    of_ann = await token(user_id="ann")
    assert (await exchange(control, of_ann, session_id="1")).salt_keys == ann.salt_keys
    assert (await exchange(control, of_ann, user_id="ann", session_id="1")).salt_keys == ann.salt_keys

    assert await reason(control, of_ann, user_id="bob") == "OUTSIDE_TOKEN"
    assert await reason(control, of_ann, project_id="p") == "OUTSIDE_TOKEN"
    # Session 1 of whoever is no way into session 1 of ann.
    assert await reason(control, await token(session_id="1"), user_id="ann") == "OUTSIDE_TOKEN"
    assert await reason(control, of_ann, session_id="a b") == "INVALID_SCOPE_ID"
    assert await reason(control, of_ann, session_id=of_ann) == "INVALID_SCOPE_ID"  # too long for a name
    assert await reason(control, of_ann, session_id=secret) == "SECRET_IN_FIELD"


async def test_i2_a_bound_keys_token_is_narrowed_as_the_key_is(control: Control) -> None:
    secret = await writer(control, project_id="p-1")
    given = await control.exchange(secret, "chat")

    answer = await exchange(control, given.access_token)

    assert answer.salt_keys == given.salt_keys and answer.project_id == "p-1"
    assert await reason(control, given.access_token, project_id="p-2") == "OUTSIDE_TOKEN"


async def test_i2_a_token_of_a_sharing_group_gives_the_groups_salts_while_it_is_in_it(control: Control) -> None:
    secret = await writer(control)
    metadata = await control.bearer(control.admin_key)
    groups = sharing_groups_pb2_grpc.SharingGroupServiceStub(control.channel)
    create = sharing_groups_pb2.CreateSharingGroupRequest(
        parent="tenants/acme", sharing_group_id="research", namespace="tenants/acme/namespaces/chat"
    )
    await groups.CreateSharingGroup(create, metadata=metadata)
    name = "tenants/acme/sharingGroups/research"
    given = await control.exchange(secret, "chat", sharing_group=name)

    answer = await exchange(control, given.access_token)

    assert answer.salt_keys == given.salt_keys and answer.sharing_group_uid == given.sharing_group_uid != ""
    assert (await exchanges(control))[0].after["sharing_group_uid"] == given.sharing_group_uid
    assert await reason(control, given.access_token, user_id="ann") == "SALT_SCOPE_TOO_NARROW"

    await groups.DeleteSharingGroup(sharing_groups_pb2.DeleteSharingGroupRequest(name=name), metadata=metadata)
    await groups.CreateSharingGroup(create, metadata=metadata)  # one made anew under its name is another
    assert await reason(control, given.access_token) == "RESOURCE_NOT_AVAILABLE"


async def test_i1_tokens_off_the_profile_are_refused_for_their_own_reason_and_never_recorded(control: Control) -> None:
    secret = await writer(control)
    good = (await control.exchange(secret, "chat")).access_token
    now_s = int(time.time())
    table = bad_tokens(
        control.key_ring.private_key,
        Ed25519PrivateKey.generate(),
        control.key_ring.kid,
        control.key_ring.key_set.issuer,
        now_s,
        Audience.NODE,
        subject="tenants/acme/apiKeys/writer",
    )
    for row in table:
        assert await reason(control, row.token) == row.expected_reason, row.name
    assert await reason(control, (await control.exchange(secret)).access_token) == "TOKEN_AUDIENCE"
    trail = str(await control.events(exchanges=True)) + str(await exchanges(control))
    assert not leaked(table, trail) and good not in trail


async def test_i10_every_way_in_which_a_token_ends_ends_what_it_gives(control: Control) -> None:
    secret = await writer(control)
    metadata = await control.bearer(control.admin_key)

    async def token() -> str:
        return (await control.exchange(secret, "chat")).access_token

    first, second = await token(), await token()
    claims = verify_token(first, control.key_ring.key_set, audience=Audience.NODE, now_s=int(time.time()))
    revoke = tokens_pb2.RevokeTokenRequest(parent="tenants/acme", token_id=claims.token_id)
    await control.tokens.RevokeToken(revoke, metadata=metadata)
    assert await reason(control, first) == "TOKEN_REVOKED"
    assert (await exchange(control, second)).salt_keys, "the other one is as good as before"

    await control.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name="tenants/acme"), metadata=metadata)
    assert await reason(control, second) == "TENANT_SUSPENDED"
    await control.tenants.ResumeTenant(tenants_pb2.ResumeTenantRequest(name="tenants/acme"), metadata=metadata)
    assert (await exchange(control, second)).salt_keys

    await control.delete_api_key("tenants/acme/apiKeys/writer")
    assert await reason(control, second) == "CREDENTIAL_REVOKED"


async def test_i1_another_key_of_the_same_name_does_not_bring_a_token_back(control: Control) -> None:
    secret = await writer(control)
    token = (await control.exchange(secret, "chat")).access_token
    await control.delete_api_key("tenants/acme/apiKeys/writer")
    await control.add_api_key(WRITER, "acme", "writer")
    assert await reason(control, token) == "CREDENTIAL_REVOKED"


async def test_i11_each_exchange_and_each_attempt_is_in_the_tenants_trail_without_the_token(control: Control) -> None:
    secret = await writer(control)
    token = (await control.exchange(secret, "chat", user_id="ann")).access_token
    await exchange(control, token, session_id="s-1")
    await reason(control, token, user_id="bob")

    denied, granted = await exchanges(control)

    after = MessageToDict(granted.after)
    assert granted.actor == denied.actor == "tenants/acme/apiKeys/writer"
    assert granted.resource == denied.resource == "tenants/acme/namespaces/chat"
    assert granted.peer and (after["user_id"], after["session_id"]) == ("ann", "s-1")
    assert after.keys() == {"token_id", "expires_at_s", "user_id", "session_id"}
    assert (denied.outcome, denied.reason) == (audit_pb2.AuditEvent.OUTCOME_DENIED, "OUTSIDE_TOKEN")
    assert token not in str(granted) + str(denied)


@pytest.mark.parametrize("text", ["", "hunter2", "a" * 60_000, "\u00fc"])
async def test_what_is_no_token_is_refused_without_repeating_it(control: Control, text: str) -> None:
    error = await refused(exchange(control, text))
    assert type(error) is errors.UnauthenticatedError and error.reason == "TOKEN_MALFORMED"
    assert not text or text not in repr(vars(error))


async def test_i2_a_tenant_that_asks_without_end_takes_no_place_from_others(control: Control) -> None:
    """As long as the database does not answer: those of one tenant wait, up to a number, and others beside them."""
    tokens = {
        tenant: (await control.exchange(await writer(control, tenant), "chat")).access_token
        for tenant in ("acme", "blue")
    }
    async with control.database.transaction(ServiceScope(ServiceTask.CREDENTIAL_LOOKUP)) as session:
        await lock_audit_chains(session, ["acme"])  # what each of acme's exchanges waits for, holding its place
        waiting = [asyncio.ensure_future(exchange(control, tokens["acme"])) for _ in range(TENANT_EXCHANGES_MAX)]
        assert await _all_in(waiting)
        refusals = [await reason(control, tokens["acme"])]
        others = asyncio.ensure_future(exchange(control, tokens["blue"]))
    assert refusals == ["TOO_MANY_CALLS"]
    assert (await others).tenant_id == "blue"
    assert {answer.tenant_id for answer in await asyncio.gather(*waiting)} == {"acme"}
    assert (await exchange(control, tokens["acme"])).tenant_id == "acme"


async def _all_in(calls: list[asyncio.Future[auth_pb2.ExchangeTokenResponse]]) -> bool:
    """Whether none has ended a moment after all were sent."""
    done, _ = await asyncio.wait(calls, timeout=2)
    return not done
