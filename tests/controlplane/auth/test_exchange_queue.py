"""Exchanges that share a transaction: each has its own outcome and its event, and none is answered without (I11)."""

from __future__ import annotations

import asyncio

import grpc
import jwt
import psycopg
import pytest
from sqlalchemy import select

from controlplane.audit import to_chained_record
from controlplane.auth.exchange_queue import BATCH_MAX, Ask, Denied, ExchangeQueue, Granted
from controlplane.auth.signing_keys import SigningKeys
from controlplane.db import PlatformScope, models
from saltern.admin.v1 import credentials_pb2
from saltern.audit.chain import verify
from saltern.names import NamespaceId
from saltern.rpc_errors import error_from_rpc
from tenants.tokens import Audience
from tests.support.control import Control

CHAT = NamespaceId("chat")


def new_queue(control: Control) -> ExchangeQueue:
    """One as another control plane on the database has it."""
    keys = SigningKeys(control.database, control.key_encryption_key, control.key_ring)
    return ExchangeQueue(control.database, control.key_encryption_key, keys, token_lifetime_s=600)


async def chain(control: Control, name: str) -> list[models.AuditEvent]:
    async with control.database.transaction(PlatformScope()) as session:
        statement = select(models.AuditEvent).where(models.AuditEvent.chain == name)
        return list(await session.scalars(statement.order_by(models.AuditEvent.sequence)))


async def test_i11_of_many_at_a_time_each_has_its_outcome_and_its_event(control: Control) -> None:
    tenants = ("acme", "blue", "coal")
    secrets = {}
    for tenant in tenants:
        await control.add_tenant(tenant, "chat")
        secrets[tenant] = await control.add_api_key(credentials_pb2.ROLE_WRITER, tenant)
    auditor = await control.add_api_key(credentials_pb2.ROLE_TENANT_AUDITOR, "acme", "auditor")
    wrong = secrets["acme"][:-43] + "A" * 43
    asks = [Ask(secret, Audience.NODE, CHAT, f"192.0.2.1:{n}") for n in range(40) for secret in secrets.values()]
    asks += [
        Ask(wrong, Audience.NODE, CHAT, ""),
        Ask("garbage", Audience.CONTROL, None, ""),
        Ask(auditor, Audience.NODE, CHAT, ""),
        Ask(secrets["blue"], Audience.NODE, NamespaceId("absent"), ""),
        Ask(control.admin_key, Audience.CONTROL, None, ""),
    ]
    assert len(asks) > BATCH_MAX

    first, second = new_queue(control), new_queue(control)
    outcomes = await asyncio.gather(*((first, second)[n % 2].exchange(ask) for n, ask in enumerate(asks)))

    denied = [outcome for outcome in outcomes[-5:-1] if isinstance(outcome, Denied)]
    assert [outcome.error.reason for outcome in denied] == [
        "API_KEY_INVALID", "API_KEY_MALFORMED", "ROLE_REQUIRED", "RESOURCE_NOT_AVAILABLE",
    ]  # fmt: skip
    assert [outcome.tenant for outcome in denied] == [None, None, "acme", "blue"]
    granted = [outcome for outcome in outcomes if isinstance(outcome, Granted)]
    assert len(granted) == len(asks) - 4
    ids = {str(jwt.decode(one.token, options={"verify_signature": False})["jti"]) for one in granted}
    assert len(ids) == len(granted)
    found = set()
    for tenant in (*tenants, "platform"):
        events = await chain(control, tenant)
        assert verify(tenant, map(to_chained_record, events)) == []
        found |= {event.after["token_id"] for event in events if event.after and "token_id" in event.after}
    assert ids <= found
    peers = {event.peer for event in await chain(control, "acme") if event.method.endswith("/ExchangeApiKey")}
    assert {ask.peer for ask in asks[:-5] if ask.api_key == secrets["acme"]} <= peers


async def test_i11_no_token_leaves_whose_event_cannot_be_written(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    owner = control.owner_url.set(drivername="postgresql").render_as_string(hide_password=False)
    async with await psycopg.AsyncConnection.connect(owner, autocommit=True) as connection:
        await connection.execute("REVOKE INSERT ON audit_events FROM saltern_app")
        try:
            outcomes = await asyncio.gather(
                *(control.exchange(secret, "chat") for _ in range(5)), return_exceptions=True
            )
        finally:
            await connection.execute("GRANT INSERT ON audit_events TO saltern_app")
    for outcome in outcomes:
        assert isinstance(outcome, grpc.RpcError) and secret not in str(error_from_rpc(outcome))
    assert (await control.exchange(secret, "chat")).access_token


async def test_a_caller_that_hangs_up_spoils_nothing_for_the_others(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    queue = new_queue(control)
    ask = Ask(secret, Audience.NODE, CHAT, "")
    tasks = [asyncio.create_task(queue.exchange(ask)) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[7].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(outcome, Granted) for outcome in outcomes) == 8
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert isinstance(await queue.exchange(ask), Granted)
