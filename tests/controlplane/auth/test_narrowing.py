"""Whose salts an exchange gives: by what is asked for, what the key is bound to, and what the policy demands."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
from google.protobuf.json_format import MessageToDict
from sqlalchemy import event

from controlplane.db import models
from controlplane.salts.roots import open_root
from controlplane.secrets import root_secret_context
from saltern.admin.v1 import audit_pb2, credentials_pb2, salt_policies_pb2
from saltern.auth.v1 import auth_pb2
from saltern.errors import FailedPreconditionError, InvalidArgumentError, PermissionDeniedError
from saltern.keys import Narrowing, SaltScope, derive_salt_key
from saltern.names import NamespaceId, TenantId
from tests.support.control import Control, refused

WRITER = credentials_pb2.ROLE_WRITER


def salts(response: auth_pb2.ExchangeApiKeyResponse) -> list[tuple[int, bytes]]:
    return [(one.epoch, one.key) for one in response.salt_keys]


async def last_exchange(control: Control, *, denied: bool = False) -> audit_pb2.AuditEvent:
    wanted = audit_pb2.AuditEvent.OUTCOME_DENIED if denied else audit_pb2.AuditEvent.OUTCOME_SUCCESS
    return next(
        event
        for event in await control.events("tenants/acme", exchanges=True)
        if event.method.endswith("/ExchangeApiKey") and event.outcome == wanted
    )


async def test_i2_every_combination_of_names_has_salts_of_its_own(control: Control) -> None:
    await control.add_tenant("acme", "chat", "code")
    secret = await control.add_api_key(WRITER, "acme")
    seen: dict[bytes, tuple[str, ...]] = {}

    for namespace, *names in product(("chat", "code"), ("", "a"), ("", "a", "b"), ("", "a")):
        narrowing = dict(zip(("project_id", "user_id", "session_id"), names, strict=True))
        ((_, key),) = salts(await control.exchange(secret, namespace, **narrowing))
        assert key not in seen, (seen.get(key), namespace, names)
        seen[key] = (namespace, *names)


async def test_i12_salts_of_every_readable_epoch_come_from_its_own_root_current_last(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(WRITER, "acme")
    ((_, first),) = salts(await control.exchange(secret, "chat", user_id="u"))
    await control.rotate_salt("acme")

    given = salts(await control.exchange(secret, "chat", user_id="u"))

    assert [epoch for epoch, _ in given] == [1, 2] and given[0] == (1, first)
    async with control.database.transaction() as session:
        owner = await session.get_one(models.Tenant, "acme")
        rows = [await session.get_one(models.SaltEpoch, ("acme", epoch)) for epoch in (1, 2)]
    for row, (epoch, key) in zip(rows, given, strict=True):
        root = await open_root(
            control.key_encryption_key, row.wrapped_root_secret, root_secret_context(owner.uid, epoch)
        )
        scope, scope_id = Narrowing(user="u").of_scope(SaltScope.TENANT)
        assert key == derive_salt_key(
            root,
            tenant=TenantId("acme"),
            namespace=NamespaceId("chat"),
            scope=scope,
            scope_id=scope_id,
            epoch=epoch,
        )
    await control.rotate_salt("acme", grace_s=0)
    assert [epoch for epoch, _ in salts(await control.exchange(secret, "chat", user_id="u"))] == [3]


async def test_i2_a_bound_key_gets_its_own_projects_salts_and_no_wider_or_other_ones(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    free = await control.add_api_key(WRITER, "acme", "free")
    bound = await control.add_api_key(WRITER, "acme", "bound", project_id="p-1")

    own = salts(await control.exchange(bound, "chat"))

    assert own == salts(await control.exchange(bound, "chat", project_id="p-1"))
    assert own == salts(await control.exchange(free, "chat", project_id="p-1"))
    assert own != salts(await control.exchange(free, "chat"))
    assert salts(await control.exchange(bound, "chat", user_id="u")) == salts(
        await control.exchange(free, "chat", project_id="p-1", user_id="u")
    )
    succeeded = MessageToDict((await last_exchange(control)).after)
    assert (succeeded["project_id"], succeeded["user_id"]) == ("p-1", "u")

    request = auth_pb2.ExchangeApiKeyRequest(
        api_key=bound, audience=auth_pb2.AUDIENCE_NODE, namespace_id="chat", project_id="p-2"
    )
    error = await refused(control.auth.ExchangeApiKey(request))
    assert isinstance(error, PermissionDeniedError) and error.reason == "OUTSIDE_KEY_BINDING"
    assert "p-1" not in str(error) and error.hint
    denied = await last_exchange(control, denied=True)
    assert (denied.reason, denied.actor) == ("OUTSIDE_KEY_BINDING", "tenants/acme/apiKeys/bound")


@pytest.mark.parametrize("scope", ["project", "user", "session"])
async def test_i2_a_policy_that_demands_a_name_gives_nobody_a_wider_salt(control: Control, scope: str) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(WRITER, "acme")
    await control.set_salt("acme", scope=salt_policies_pb2.SaltPolicy.Scope.Value(f"SCOPE_{scope.upper()}"))

    request = auth_pb2.ExchangeApiKeyRequest(api_key=secret, audience=auth_pb2.AUDIENCE_NODE, namespace_id="chat")
    error = await refused(control.auth.ExchangeApiKey(request))
    assert isinstance(error, FailedPreconditionError) and error.reason == "SALT_SCOPE_REQUIRED"
    assert f"{scope}_id" in error.hint

    assert salts(await control.exchange(secret, "chat", **{f"{scope}_id": "x"}))
    assert (await control.exchange(secret)).access_token, "the control plane needs no salt"


async def test_names_are_checked_before_anything_else(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(WRITER, "acme")
    node, plane = auth_pb2.AUDIENCE_NODE, auth_pb2.AUDIENCE_CONTROL
    for request, reason in (
        (
            auth_pb2.ExchangeApiKeyRequest(api_key=secret, audience=node, namespace_id="chat", user_id="a b"),
            "INVALID_SCOPE_ID",
        ),
        (
            auth_pb2.ExchangeApiKeyRequest(api_key=secret, audience=node, namespace_id="chat", session_id=secret),
            "SECRET_IN_FIELD",
        ),
        (
            auth_pb2.ExchangeApiKeyRequest(api_key=secret, audience=plane, user_id="u"),
            "SALT_SCOPE_NOT_ALLOWED",
        ),
    ):
        error = await refused(control.auth.ExchangeApiKey(request))
        assert isinstance(error, InvalidArgumentError) and error.reason == reason
        assert secret not in str(error)


async def test_i2_exchanges_of_one_batch_get_their_own_salts_each(control: Control) -> None:
    """They share one transaction, and what one is refused the others are not."""
    await control.add_tenant("acme", "chat")
    free = await control.add_api_key(WRITER, "acme", "free")
    bound = await control.add_api_key(WRITER, "acme", "bound", user_id="u-0")
    alone = {name: salts(await control.exchange(free, "chat", user_id=name)) for name in ("u-0", "u-1", "u-2")}

    wanted = ["u-0", "u-1", "u-2"] * 4
    answers = await asyncio.gather(
        *(control.exchange(free, "chat", user_id=name) for name in wanted),
        control.exchange(bound, "chat"),
        control.exchange(bound, "chat", user_id="u-1"),
        return_exceptions=True,
    )

    *granted, own, outside = answers
    for name, answer in zip(wanted, granted, strict=True):
        assert isinstance(answer, auth_pb2.ExchangeApiKeyResponse) and salts(answer) == alone[name]
    assert isinstance(own, auth_pb2.ExchangeApiKeyResponse) and salts(own) == alone["u-0"]
    assert isinstance(outside, Exception)


async def test_an_exchange_asks_the_database_no_more_for_epochs_and_names(control: Control) -> None:
    """The policy and its epochs come with one statement, for however many tenants and epochs."""
    from controlplane.auth.exchange import find_salting

    await control.add_tenant("acme", "chat")
    await control.add_tenant("other", "chat")
    await control.rotate_salt("acme")
    statements: list[str] = []
    engine = control.database.engine.sync_engine

    async with control.database.transaction() as session:
        await session.connection()
        event.listen(engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
        found = await find_salting(session, ["acme", "other"])

    assert len(statements) == 1
    assert {tenant: [row.epoch for row in one.epochs] for tenant, one in found.items()} == {
        "acme": [1, 2],
        "other": [1],
    }
