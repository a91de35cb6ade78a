"""Two tenants share and stop sharing: a real control plane, Postgres and node, over the wire and the SDK (I2, I4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.settings import LEASE_DURATION_MIN_S
from saltern import Client
from saltern.admin.v1 import (
    credentials_pb2,
    policy_pb2,
    policy_pb2_grpc,
    quotas_pb2,
    sharing_groups_pb2,
    sharing_groups_pb2_grpc,
    usage_pb2,
)
from saltern.auth.v1 import auth_pb2
from saltern.errors import SalternError
from saltern.keys import BlockHash, BlockKeyDeriver, SaltKey
from saltern.results import Hit, Miss, Stored
from tests.support.control import Control, control_plane, migrate
from tests.support.served_node import connect, serve_node
from tests.support.wire_client import WireClient, block

MIB = 1024 * 1024
GROUP = "tenants/acme/sharingGroups/research"
CHAT = {tenant: f"tenants/{tenant}/namespaces/chat" for tenant in ("acme", "blue")}
DEADLINE_S = 60
SIZE = 50_000
HASHES = [BlockHash(n.to_bytes(32, "big")) for n in range(20)]


class Pair:
    """Two tenants with a key each, a node, and the acts of their admins."""

    def __init__(self, control: Control, endpoint: str) -> None:
        self.control = control
        self.endpoint = endpoint
        self.groups: Any = sharing_groups_pb2_grpc.SharingGroupServiceStub(control.channel)
        self.policy: Any = policy_pb2_grpc.PolicyServiceStub(control.channel)
        self.keys: dict[str, str] = {}
        self.admins: dict[str, str] = {}

    async def act(self, tenant: str, method: str, request: Any) -> Any:
        metadata = await self.control.bearer(self.admins[tenant])
        answer = await getattr(self.groups, method)(request, metadata=metadata)
        await self.settle(metadata)
        return answer

    async def settle(self, metadata: Any) -> None:
        """I2: return when no node goes by an older policy any more."""
        request = policy_pb2.WaitForPolicyRequest()
        request.timeout.FromSeconds(DEADLINE_S)
        await self.policy.WaitForPolicy(request, metadata=metadata)

    async def create(self) -> None:
        create = sharing_groups_pb2.CreateSharingGroupRequest(
            parent="tenants/acme", sharing_group_id="research", namespace=CHAT["acme"]
        )
        await self.act("acme", "CreateSharingGroup", create)
        await self.invite()

    async def invite(self) -> None:
        request = sharing_groups_pb2.InviteMemberRequest(name=GROUP, namespace=CHAT["blue"])
        await self.act("acme", "InviteMember", request)

    async def accept(self) -> None:
        request = sharing_groups_pb2.AcceptInvitationRequest(name=GROUP, namespace=CHAT["blue"])
        await self.act("blue", "AcceptInvitation", request)

    async def leave(self) -> None:
        request = sharing_groups_pb2.LeaveSharingGroupRequest(name=GROUP, namespace=CHAT["blue"])
        await self.act("blue", "LeaveSharingGroup", request)

    async def exchange(self, tenant: str) -> auth_pb2.ExchangeApiKeyResponse:
        return await self.control.exchange(self.keys[tenant], "chat", sharing_group=GROUP)

    async def used_bytes(self, tenant: str) -> int:
        """As the node has last reported."""
        metadata = await self.control.bearer(self.control.admin_key)
        usage = await self.control.usage.GetUsage(
            usage_pb2.GetUsageRequest(tenant=f"tenants/{tenant}"), metadata=metadata
        )
        return sum(tier.used_bytes for tier in usage.tiers if tier.tier == quotas_pb2.TIER_DRAM)


@asynccontextmanager
async def pair_on(control: Control, folder: Path) -> AsyncIterator[Pair]:
    for tenant in CHAT:
        await control.add_tenant(tenant, "chat", limit_bytes=8 * MIB)
    node_secret = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node")
    with serve_node(folder, str(control.plane.endpoint), node_secret) as node:
        pair = Pair(control, (await node.ready())["wire_endpoint"])
        for tenant in CHAT:
            pair.keys[tenant] = await control.add_api_key(credentials_pb2.ROLE_WRITER, tenant)
            pair.admins[tenant] = await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, tenant, "admin")
        await pair.settle(await control.bearer(control.admin_key))
        yield pair


def named(salt: auth_pb2.SaltKey) -> dict[bytes, bytes]:
    keys = BlockKeyDeriver(SaltKey(salt.key), b"model of chat").derive_many(HASHES)
    return {key: block(number, SIZE) for number, key in enumerate(keys)}


def opened(stack: ExitStack, pair: Pair, token: auth_pb2.ExchangeApiKeyResponse, group: str) -> WireClient:
    client = stack.enter_context(connect(pair.endpoint))
    client.hello(token.access_token, epoch=token.salt_keys[-1].epoch, group=group)
    return client


def reason(act: Callable[[], object]) -> str:
    with pytest.raises(SalternError) as refused:
        act()
    return refused.value.reason


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_i2_no_hit_before_both_have_accepted_hits_after_and_none_once_one_has_left(
    control: Control, tmp_path: Path
) -> None:
    async with pair_on(control, tmp_path / "node") as pair:
        await pair.create()
        acme_token = await pair.exchange("acme")
        uid, entries = acme_token.sharing_group_uid, named(acme_token.salt_keys[-1])
        with ExitStack() as stack:
            acme = opened(stack, pair, acme_token, uid)
            acme.put(entries)
            assert acme.get(*entries) == entries

            # Before: no salt for blue; and with acme's, out of the group and in it, nothing.
            with pytest.raises(grpc.RpcError):
                await pair.exchange("blue")
            blue_token = await control.exchange(pair.keys["blue"], "chat")
            assert reason(lambda: opened(stack, pair, blue_token, uid)) == "GROUP_NOT_AVAILABLE"
            assert opened(stack, pair, blue_token, "").get(*entries) == {}

            await pair.accept()
            shared_token = await pair.exchange("blue")
            assert named(shared_token.salt_keys[-1]) == entries
            blue = opened(stack, pair, shared_token, uid)
            assert blue.get(*entries) == entries
            assert blue.lookup(*entries).prefix == len(entries)
            own = {bytes(range(32)): block(99, SIZE)}
            blue.put(own)
            assert acme.get(*own) == own
            # Its private entries stay its own, under the very same keys.
            assert opened(stack, pair, blue_token, "").get(*entries) == {}

            # Each has paid for what it has put, to the byte (I4, I8).
            extent = -(-SIZE // 4096) * 4096
            for tenant, count in (("acme", len(entries)), ("blue", 1)):

                async def paid(tenant: str = tenant, count: int = count) -> bool:
                    return await pair.used_bytes(tenant) == count * extent

                await until(paid)

            await pair.leave()  # and waited until every node has heard

            assert reason(lambda: blue.get(*entries)) == "GROUP_NOT_AVAILABLE"
            assert reason(lambda: acme.get(*entries)) == "EPOCH_NOT_AVAILABLE"
            assert reason(lambda: opened(stack, pair, shared_token, uid)) == "GROUP_NOT_AVAILABLE"
            again = await pair.exchange("acme")
            assert again.salt_keys[-1].epoch == acme_token.salt_keys[-1].epoch + 1
            assert opened(stack, pair, again, uid).get(*entries, *own) == {}


async def test_the_sdk_shares_by_the_name_of_the_group(control: Control, tmp_path: Path) -> None:
    async with pair_on(control, tmp_path / "node") as pair:
        await pair.create()
        await pair.accept()

        def share() -> None:
            where = str(control.plane.endpoint)
            with (
                Client(control=where, api_key=pair.keys["acme"], namespace="chat", sharing_group=GROUP) as acme,
                Client(control=where, api_key=pair.keys["blue"], namespace="chat", sharing_group=GROUP) as blue,
                Client(control=where, api_key=pair.keys["blue"], namespace="chat") as alone,
            ):
                (stored,) = acme.put_many([(acme.block_key(HASHES[0]), b"shared on purpose")])
                assert isinstance(stored, Stored)
                (hit,), (miss,) = (
                    blue.get_many(blue.block_keys(HASHES[:1])),
                    alone.get_many(alone.block_keys(HASHES[:1])),
                )
                assert isinstance(hit, Hit) and bytes(hit.payload) == b"shared on purpose"
                assert isinstance(miss, Miss)

        await asyncio.to_thread(share)


async def test_i2_a_node_that_is_cut_off_stops_sharing_within_its_lease(postgres: Any, tmp_path: Path) -> None:
    async with AsyncExitStack() as nodes, AsyncExitStack() as planes:
        database = nodes.enter_context(postgres.fresh_database(migrate))
        plane = control_plane(database, tmp_path / "control", lease_duration_s=LEASE_DURATION_MIN_S)
        control = await planes.enter_async_context(plane)
        await control.redeem()
        pair = await nodes.enter_async_context(pair_on(control, tmp_path / "node"))
        await pair.create()
        await pair.accept()
        token, blue_token = await pair.exchange("acme"), await pair.exchange("blue")
        entries, uid = named(token.salt_keys[-1]), token.sharing_group_uid
        with ExitStack() as stack:
            acme, blue = opened(stack, pair, token, uid), opened(stack, pair, blue_token, uid)
            acme.put(entries)
            blue.put({bytes(32): block(1, SIZE)})
            assert blue.get(*entries) == entries

            await planes.aclose()  # no control plane any more

            async def has_stopped() -> bool:
                return await asyncio.to_thread(lambda: blue.get(*entries) == {})

            await until(has_stopped)
            # What is a member's own is served on (I9).
            assert blue.get(bytes(32)) == {bytes(32): block(1, SIZE)}
            assert acme.get(*entries) == entries
