"""Whose cache a request uses, by the token that it carries; on a real control plane."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from saltern.admin.v1 import credentials_pb2
from saltern.client import Client
from saltern.deadline import Deadline
from saltern.errors import FailedPreconditionError, UnauthenticatedError, UnavailableError
from saltern.exchange import TokenGrant, exchange_token
from saltern.grant import Grant
from saltern.names import NamespaceId, TenantId
from saltern.token_credentials import TokenCredentials
from saltern.vllm.cache_salts import cache_salts
from saltern.vllm.request_tenancy import HandedCredentials, RequestTenancy
from saltern.vllm.tenancy import Ticket
from saltern.vllm.token_seal import TOKEN_FIELD, TokenSeal
from tests.support.control import Control

WRITER, READER = credentials_pb2.ROLE_WRITER, credentials_pb2.ROLE_READER
SEAL = TokenSeal(bytes(32))


class Plane:
    """Asks the real control plane, counts, and can be held or be away."""

    def __init__(self, control: Control) -> None:
        self.endpoint = f"127.0.0.1:{control.plane.endpoint.port}"
        self.calls = 0
        self.is_away = False
        self.open = threading.Event()
        self.open.set()

    def __call__(self, token: str) -> TokenGrant:
        self.calls += 1
        assert self.open.wait(30)
        if self.is_away:
            raise UnavailableError("away", reason="CONTROL_PLANE_UNAVAILABLE")
        return exchange_token(self.endpoint, token, timeout_ms=5000)

    async def salt(self, token: str) -> str:
        found = await asyncio.to_thread(exchange_token, self.endpoint, token, timeout_ms=5000)
        return cache_salts(found.grant)[-1]


@contextmanager
def tenancy_of(plane: Plane, **options: float) -> Iterator[RequestTenancy]:
    tenancy = RequestTenancy(
        plane,
        Client.from_credentials,
        seal=SEAL,
        wait_ms=options.pop("wait_ms", 20_000.0),
        **options,  # type: ignore[arg-type]
    )
    try:
        yield tenancy
    finally:
        tenancy.close()


def ticket_of(tenancy: RequestTenancy, token: str, salt: str) -> Ticket | None:
    return tenancy.ticket_for(salt, {TOKEN_FIELD: SEAL.seal(token, salt)})


async def client_of(tenancy: RequestTenancy, token: str, salt: str) -> Client | None:
    """As the lookups do it: the ticket at once, the client in another thread."""
    ticket = ticket_of(tenancy, token, salt)
    return None if ticket is None else await asyncio.to_thread(tenancy.client, ticket)


async def token_of(control: Control, tenant: str, key: str = "writer", role: int = WRITER, **narrowing: str) -> str:
    secret = await control.add_api_key(role, tenant, key)  # type: ignore[arg-type]
    return (await control.exchange(secret, "chat", **narrowing)).access_token


async def test_i2_tokens_that_open_the_same_share_a_client_and_no_others_do(control: Control) -> None:
    for tenant in ("acme", "blue"):
        await control.add_tenant(tenant, "chat")
    plane = Plane(control)
    tokens = [
        await token_of(control, "acme", "one"),
        await token_of(control, "acme", "two"),
        await token_of(control, "acme", "ann", user_id="ann"),
        await token_of(control, "acme", "reader", READER),
        await token_of(control, "blue"),
    ]
    with tenancy_of(plane) as tenancy:
        salts = [await plane.salt(token) for token in tokens]
        clients = [await client_of(tenancy, token, salt) for token, salt in zip(tokens, salts, strict=True)]
        assert None not in clients
        one, two, ann, reader, blue = clients
        assert one is two and len({id(client) for client in (one, ann, reader, blue)}) == 4
        assert one is not None and blue is not None and (one.tenant, blue.tenant) == ("acme", "blue")
        calls = plane.calls
        assert await client_of(tenancy, tokens[0], salts[0]) is one
        assert plane.calls == calls == len(tokens), "what was just verified is not asked for again"
        assert not any(token in repr(vars(tenancy)) for token in tokens)


async def test_i10_without_a_good_token_of_the_requests_own_salt_there_is_no_remote_cache(control: Control) -> None:
    for tenant in ("acme", "blue"):
        await control.add_tenant(tenant, "chat")
    plane = Plane(control)
    token, other = await token_of(control, "acme"), await token_of(control, "blue")
    salt, other_salt = await plane.salt(token), await plane.salt(other)
    with tenancy_of(plane) as tenancy:
        sealed = SEAL.seal(token, salt)
        for cache_salt, params in (
            (salt, None),
            (salt, {}),
            (salt, {TOKEN_FIELD: 7}),
            (salt, {TOKEN_FIELD: ""}),
            (salt, {TOKEN_FIELD: token}),  # not sealed: vLLM may have logged it
            (salt, {TOKEN_FIELD: sealed + "A"}),
            (salt, {TOKEN_FIELD: "sealed1." + "A" * 9000}),
            (None, {TOKEN_FIELD: sealed}),
            ("", {TOKEN_FIELD: sealed}),
            (other_salt, {TOKEN_FIELD: sealed}),
        ):
            assert tenancy.ticket_for(cache_salt, params) is None
        assert plane.calls == 0
        # A token with another's salt, sealed as if by the gateway: found out when it is verified, and then at once.
        ticket = ticket_of(tenancy, token, other_salt)
        assert ticket is not None and await asyncio.to_thread(tenancy.client, ticket) is None
        assert ticket_of(tenancy, token, other_salt) is None
        assert await client_of(tenancy, "a.b.c", salt) is None
        assert await client_of(tenancy, token, salt) is not None
        assert token not in repr(ticket) and tenancy.client(Ticket("made up", "a.b.c")) is None


async def test_i10_the_scheduler_never_waits_and_a_lookup_not_for_long(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    plane = Plane(control)
    token = await token_of(control, "acme")
    salt = await plane.salt(token)
    with tenancy_of(plane, wait_ms=1.0) as tenancy:
        plane.open.clear()
        ticket = ticket_of(tenancy, token, salt)
        assert ticket is not None and tenancy.client(ticket) is None
        plane.open.set()
        while tenancy.client(ticket) is None:
            await asyncio.sleep(0)
        assert plane.calls == 1


async def test_i10_a_revocation_is_felt_and_a_control_plane_that_is_away_is_not(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    plane = Plane(control)
    token = await token_of(control, "acme")
    salt = await plane.salt(token)
    with tenancy_of(plane, check_every_s=0.0) as tenancy:
        assert await client_of(tenancy, token, salt) is not None
        plane.is_away = True
        assert await client_of(tenancy, token, salt) is not None
        plane.is_away = False
        await control.delete_api_key("tenants/acme/apiKeys/writer")
        while await client_of(tenancy, token, salt) is not None:
            await asyncio.sleep(0)
        assert await client_of(tenancy, token, salt) is None


def test_a_token_that_a_node_refused_gives_way_to_another_and_comes_back_once_it_is_verified_again() -> None:
    def grant(token: str, lifetime_s: float = 600.0) -> Grant:
        return Grant(token, time.time() + lifetime_s, TenantId("acme"), NamespaceId("chat"), ())

    credentials = HandedCredentials(grant("one"))
    credentials.offer(grant("two"))
    assert credentials.grant(Deadline(1)).access_token == "one"
    credentials.reject("one")
    for useless in (grant("one"), grant("two", lifetime_s=-1)):
        credentials.offer(useless)
        with pytest.raises(UnauthenticatedError):
            credentials.grant(Deadline(1))
    credentials.offer(grant("two"))
    assert credentials.grant(Deadline(1)).access_token == "two"
    credentials.hand(grant("one"))
    assert credentials.grant(Deadline(1)).access_token == "one"


async def test_what_is_kept_is_bounded_and_what_had_to_go_comes_back(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    plane = Plane(control)
    tokens = [await token_of(control, "acme", f"key-{user}", user_id=user) for user in ("a", "b", "c")]
    salts = [await plane.salt(token) for token in tokens]
    with tenancy_of(plane, tokens_max=2, clients_max=1) as tenancy:
        for _ in range(2):
            for token, salt in zip(tokens, salts, strict=True):
                while await client_of(tenancy, token, salt) is None:
                    await asyncio.sleep(0)
                assert repr(tenancy) in ("RequestTenancy(1 tokens, 1 clients)", "RequestTenancy(2 tokens, 1 clients)")


async def test_i9_credentials_of_a_token_end_with_it_and_with_its_key_and_not_with_the_control_plane(
    control: Control,
) -> None:
    await control.add_tenant("acme", "chat")
    plane = Plane(control)
    token = await token_of(control, "acme")

    def credentials(check_every_s: float) -> TokenCredentials:
        return TokenCredentials(control=plane.endpoint, access_token=token, check_every_s=check_every_s)

    quick, slow = await asyncio.to_thread(lambda: (credentials(0.0), credentials(600.0)))
    given = await asyncio.to_thread(slow.grant, Deadline(5000))
    assert (given.access_token, given.tenant, len(given.salts)) == (token, "acme", 1) and token not in repr(slow)

    await control.delete_api_key("tenants/acme/apiKeys/writer")
    assert slow.grant(Deadline(5000)) is given, "looks again after check_every_s only"

    def until_refused() -> UnauthenticatedError:
        while True:
            try:
                quick.grant(Deadline(5000))
            except UnauthenticatedError as error:
                return error

    assert (await asyncio.to_thread(until_refused)).reason == "CREDENTIAL_REVOKED"
    # An engine asks for each block, and what it asked with is not kept with the verdict.
    depths = {len(traceback.extract_tb(until_refused().__traceback__)) for _ in range(5)}
    assert len(depths) == 1
    with pytest.raises(UnauthenticatedError):
        await asyncio.to_thread(credentials, 30.0)
    slow._accept(replace(given, expires_at_s=time.time() - 1))
    with pytest.raises(UnauthenticatedError, match="expired"):
        slow.grant(Deadline(5000))
    slow.close()
    with pytest.raises((UnauthenticatedError, FailedPreconditionError)):
        slow.grant(Deadline(5000))
