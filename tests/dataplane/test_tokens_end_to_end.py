"""Signing keys and revocations through everything: control planes, real nodes, clients of every door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest

from saltern import wire
from saltern.admin.v1 import credentials_pb2, tenants_pb2, tokens_pb2
from saltern.cache.v1 import cache_pb2, cache_pb2_grpc
from saltern.client import Client
from saltern.errors import UnauthenticatedError
from saltern.results import Hit, Miss, Stored
from saltern.rpc_errors import error_from_rpc
from saltern.wire import Opcode
from tests.support.control import Control, bearer, control_plane, migrate, refused
from tests.support.served_node import connect, serve_node
from tests.support.token_load import token_load
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key

LIMIT_S = 30
State = tokens_pb2.SigningKey


@dataclass
class Cluster:
    """A control plane and its nodes; ``wire`` and ``grpc``: the endpoints of their doors."""

    control: Control
    wire: list[str]
    grpc: list[str]

    async def admin(self) -> tuple[tuple[str, str], ...]:
        return await self.control.bearer(self.control.admin_key)

    async def rotate(self, *, withdraw_now: bool = False) -> str:
        """Publish a key, or withdraw all others; returns the new one's kid."""
        request = tokens_pb2.RotateSigningKeyRequest(withdraw_now=withdraw_now)
        return (await self.control.tokens.RotateSigningKey(request, metadata=await self.admin())).kid

    async def states(self) -> dict[str, State.State.ValueType]:
        request = tokens_pb2.ListSigningKeysRequest()
        response = await self.control.tokens.ListSigningKeys(request, metadata=await self.admin())
        return {item.kid: item.state for item in response.signing_keys}

    async def refuses(self, client: WireClient, reason: str) -> None:
        """The open session is refused, as soon as the policy has come."""
        await until(lambda: refusal(client) == reason)

    async def grpc_refuses(self, token: str, reason: str) -> None:
        for endpoint in self.grpc:
            await until(lambda endpoint=endpoint: grpc_refusal(endpoint, token) == reason)


@pytest.fixture(params=[2])
async def cluster(postgres: Any, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        database = stack.enter_context(postgres.fresh_database(migrate))
        control = await stack.enter_async_context(control_plane(database, tmp_path / "control"))
        await control.redeem()
        await control.add_tenant("acme", "chat", limit_bytes=16 * 1024 * 1024)
        nodes = []
        for number in range(request.param):
            secret = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id=f"node-{number}")
            served = serve_node(
                tmp_path / f"node-{number}", str(control.plane.endpoint), secret, node_id=f"node-{number}"
            )
            nodes.append(stack.enter_context(served))
        ready = [await node.ready() for node in nodes]
        yield Cluster(control, [one["wire_endpoint"] for one in ready], [one["grpc_endpoint"] for one in ready])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


def refusal(client: WireClient) -> str:
    """Why an open session refuses a ping; empty if it does not."""
    client.send(Opcode.PING, wire.Empty())
    try:
        client.answer(wire.Empty)
    except UnauthenticatedError as error:
        return error.reason
    return ""


def hello_refusal(endpoint: str, token: str) -> str:
    with connect(endpoint) as client:
        try:
            client.hello(token)
        except UnauthenticatedError as error:
            return error.reason
    return ""


def grpc_refusal(endpoint: str, token: str) -> str:
    request = cache_pb2.GetBlocksRequest(namespace_id="chat", epoch=1, keys=[key(1)])
    with grpc.insecure_channel(endpoint) as channel:
        try:
            cache_pb2_grpc.CacheServiceStub(channel).GetBlocks(request, metadata=bearer(token), timeout=20)
        except grpc.RpcError as error:
            return error_from_rpc(error).reason
    return ""


def kid_of(token: str) -> str:
    return str(jwt.get_unverified_header(token)["kid"])


async def test_a_rotation_under_load_refuses_nobody(cluster: Cluster) -> None:
    writer = await cluster.control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    (old,) = await cluster.states()
    async with token_load(str(cluster.control.plane.endpoint), writer, cluster.wire) as load:
        await until(lambda: len(load.kids) > 20)
        new = await cluster.rotate()
        await until(lambda: new in load.kids)
        signed = len(load.kids)
        await until(lambda: len(load.kids) > signed + 5)
    assert load.failures == []
    # Never back to the old one, and never the new one before both nodes knew it: that would be among the failures.
    assert load.kids == sorted(load.kids, key=lambda kid: kid == new)
    assert await cluster.states() == {old: State.STATE_RETIRING, new: State.STATE_SIGNING}


async def test_a_key_does_not_sign_while_a_node_does_not_answer(cluster: Cluster) -> None:
    """A node that has registered and acknowledges nothing, as one that cannot take the policy."""
    from saltern.auth.v1 import auth_pb2
    from saltern.node.v1 import node_pb2

    control = cluster.control
    node = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="deaf"))
    endpoint = auth_pb2.NodeEndpoint(
        node_id="deaf", wire_endpoint="127.0.0.1:1", grpc_endpoint="127.0.0.1:2", host_id="h"
    )
    request = node_pb2.RegisterNodeRequest(node_id="deaf", endpoint=endpoint, software_version="0")
    epoch = (await control.node.RegisterNode(request, metadata=node)).fencing_epoch
    new = await cluster.rotate()
    for _ in range(3):  # as often as a key keeper looks in three seconds
        await asyncio.sleep(1)
        assert (await cluster.states())[new] == State.STATE_PUBLISHED
    report = node_pb2.ReportUsageRequest(node_id="deaf", fencing_epoch=epoch)
    report.applied_version = (await control.node.ReportUsage(report, metadata=node)).policy_version
    await control.node.ReportUsage(report, metadata=node)
    async with asyncio.timeout(LIMIT_S):
        while (await cluster.states())[new] != State.STATE_SIGNING:
            await asyncio.sleep(0.05)


async def test_i10_a_withdrawn_key_is_refused_by_every_door_and_the_nodes_stay(
    cluster: Cluster, tmp_path: Path
) -> None:
    control = cluster.control
    writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    old = (await control.exchange(writer, "chat")).access_token
    of_admin = await cluster.admin()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(control_plane(control_urls(control), tmp_path / "control"))
        assert (await other.tenants.ListTenants(tenants_pb2.ListTenantsRequest(), metadata=of_admin)).tenants
        sessions = [stack.enter_context(connect(endpoint)) for endpoint in cluster.wire]
        for session in sessions:
            await asyncio.to_thread(session.hello, old)
            assert refusal(session) == ""

        new = await cluster.rotate(withdraw_now=True)

        for plane in (control, other):  # both at once: nothing has to reach them
            error = await refused(plane.tenants.ListTenants(tenants_pb2.ListTenantsRequest(), metadata=of_admin))
            assert (type(error), error.reason) == (UnauthenticatedError, "TOKEN_UNKNOWN_KEY")
        for session in sessions:
            await cluster.refuses(session, "TOKEN_UNKNOWN_KEY")
        await cluster.grpc_refuses(old, "TOKEN_UNKNOWN_KEY")
        good = (await other.exchange(writer, "chat")).access_token
        assert kid_of(good) == new
        for endpoint in cluster.wire:
            assert await asyncio.to_thread(hello_refusal, endpoint, good) == ""
        assert await cluster.states() == {new: State.STATE_SIGNING}
        # The nodes' own tokens died with the key: they got others, and hear of the next change.
        await control.tokens.RevokeTenantTokens(
            tokens_pb2.RevokeTenantTokensRequest(name="tenants/acme"), metadata=await cluster.admin()
        )
        await cluster.grpc_refuses(good, "TOKEN_REVOKED")


@pytest.mark.parametrize("by", ["token", "key", "deleted key", "tenant"])
async def test_i10_revoked_tokens_are_refused_at_every_door_and_the_next_is_good(cluster: Cluster, by: str) -> None:
    control = cluster.control
    writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "ci")
    bystander = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "other")
    token = (await control.exchange(writer, "chat")).access_token
    of_bystander = (await control.exchange(bystander, "chat")).access_token
    of_control = await control.bearer(writer)
    token_id = str(jwt.decode(token, options={"verify_signature": False})["jti"])
    with connect(cluster.wire[0]) as first, connect(cluster.wire[1]) as second, connect(cluster.wire[0]) as third:
        for session, its in ((first, token), (second, token), (third, of_bystander)):
            await asyncio.to_thread(session.hello, its)
        metadata = await cluster.admin()
        name = "tenants/acme/apiKeys/ci"
        match by:
            case "token":
                request = tokens_pb2.RevokeTokenRequest(parent="tenants/acme", token_id=token_id)
                await control.tokens.RevokeToken(request, metadata=metadata)
            case "key":
                await control.tokens.RevokeApiKeyTokens(
                    tokens_pb2.RevokeApiKeyTokensRequest(name=name), metadata=metadata
                )
            case "deleted key":
                await control.credentials.DeleteApiKey(
                    credentials_pb2.DeleteApiKeyRequest(name=name), metadata=metadata
                )
            case "tenant":
                await control.tokens.RevokeTenantTokens(
                    tokens_pb2.RevokeTenantTokensRequest(name="tenants/acme"), metadata=metadata
                )
        if by != "token":
            error = await refused(
                control.tenants.GetTenant(tenants_pb2.GetTenantRequest(name="tenants/acme"), metadata=of_control)
            )
            expected = "TOKEN_REVOKED" if by == "key" else "CREDENTIAL_REVOKED"
            assert (type(error), error.reason) == (UnauthenticatedError, expected)
        for session in (first, second):
            await cluster.refuses(session, "TOKEN_REVOKED")
        await cluster.grpc_refuses(token, "TOKEN_REVOKED")
        assert await asyncio.to_thread(hello_refusal, cluster.wire[0], token) == "TOKEN_REVOKED"
        assert refusal(third) == ("TOKEN_REVOKED" if by == "tenant" else "")
        if by == "deleted key":
            assert (await refused(control.exchange(writer, "chat"))).reason == "API_KEY_INVALID"
        else:
            good = (await control.exchange(writer, "chat")).access_token
            assert await asyncio.to_thread(hello_refusal, cluster.wire[0], good) == ""
            first.send(Opcode.REFRESH, wire.Refresh(good))
            first.answer(wire.RefreshReply)
            assert refusal(first) == ""


async def test_i10_a_client_whose_token_was_revoked_gets_one_more_and_then_misses(cluster: Cluster) -> None:
    control = cluster.control
    writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "ci")

    def prepared() -> tuple[Client, Any]:
        client = Client(control=str(control.plane.endpoint), api_key=writer, namespace="chat", deadline_ms=20_000)
        name = client.block_keys([bytes(32)])[0]
        wait_until(lambda: isinstance(client.put_many([(name, b"x" * 1000)])[0], Stored), LIMIT_S)
        return client, name

    client, name = await asyncio.to_thread(prepared)
    with client:
        revoke = tokens_pb2.RevokeApiKeyTokensRequest(name="tenants/acme/apiKeys/ci")
        await control.tokens.RevokeApiKeyTokens(revoke, metadata=await cluster.admin())
        before = len(await exchanges(control))
        results = [(await asyncio.to_thread(client.get_many, [name]))[0] for _ in range(50)]
        assert [result for result in results if not isinstance(result, Hit)] == []

        delete = credentials_pb2.DeleteApiKeyRequest(name="tenants/acme/apiKeys/ci")
        await control.credentials.DeleteApiKey(delete, metadata=await cluster.admin())
        await until(lambda: isinstance(client.get_many([name])[0], Miss))
        results = [(await asyncio.to_thread(client.get_many, [name]))[0] for _ in range(50)]
        assert [result for result in results if not isinstance(result, Miss)] == []
        assert len(await exchanges(control)) - before <= 5


async def exchanges(control: Control) -> list[Any]:
    """Exchanges of API keys by acme's clients, granted or refused, that the audit trail holds."""
    events = [*await control.events("tenants/acme", exchanges=True), *await control.events("")]
    return [event for event in events if event.method.endswith("/ExchangeApiKey")]


def control_urls(control: Control) -> Any:
    """The database of a control plane, for another one beside it."""

    class Urls:
        owner = control.owner_url
        app = control.database.engine.url

    return Urls
