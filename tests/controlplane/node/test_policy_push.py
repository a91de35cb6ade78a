"""What goes out on a policy stream: a snapshot first, then deltas that make the very same policy of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import pytest
from sqlalchemy import delete

from controlplane.db import Database, ServiceScope, ServiceTask, bump_policy_version, models
from controlplane.node import push
from controlplane.node.policy_rows import PolicyRows, read_policy_rows
from dataplane.policy_codec import decode_snapshot
from saltern.admin.v1 import credentials_pb2, nodes_pb2, quotas_pb2, tenants_pb2, tokens_pb2
from saltern.auth.v1 import auth_pb2
from saltern.names import TenantId
from saltern.node.v1 import node_pb2
from tenants.policy import TenantPolicy
from tests.support.control import Control
from tests.support.follower import MIB, Follower, Metadata, following


@pytest.fixture
async def as_node(control: Control) -> Metadata:
    return await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))


async def version(control: Control) -> int:
    async with control.database.transaction() as session:
        state = await session.get_one(models.PolicyState, 1)
        return state.version


def by_tenant(policy: node_pb2.PolicySnapshot) -> dict[str, node_pb2.TenantPolicy]:
    return {tenant.tenant_id: tenant for tenant in policy.tenants}


def rules(policy: node_pb2.PolicySnapshot) -> Mapping[TenantId, TenantPolicy]:
    return decode_snapshot(policy)[0].tenants


async def test_a_change_of_one_tenant_goes_out_as_that_tenant(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    await control.add_tenant("blue", "chat", limit_bytes=10 * MIB)
    async with following(control, as_node) as one:
        await one.follow(await version(control))
        admin = await control.bearer(control.admin_key)
        await control.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name="tenants/blue"), metadata=admin)
        push = await one.next()
        assert isinstance(push, node_pb2.PolicyDelta)
        assert [tenant.tenant_id for tenant in push.tenants] == ["blue"]
        assert push.tenants[0].state == tenants_pb2.Tenant.STATE_SUSPENDED
        assert push.key_set == await control.auth.GetKeySet(auth_pb2.GetKeySetRequest())
        assert push.HasField("lease_duration")
        await one.answer()
        await control.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name="tenants/blue"), metadata=admin)
        push = await one.next()
        assert isinstance(push, node_pb2.PolicyDelta)
        assert list(push.removed_tenant_ids) == ["blue"]


async def test_changes_wait_together_while_a_push_is_not_answered(control: Control, as_node: Metadata) -> None:
    async with following(control, as_node) as one:
        await one.follow(await version(control))
        await control.add_tenant("first")
        await one.next()  # and no answer: the node is busy, or frozen
        for number in range(10):
            await control.add_tenant(f"t-{number}")
        await one.answer()
        push = await one.next()
        assert isinstance(push, node_pb2.PolicyDelta)
        assert set(by_tenant(one.policy)) == {"first", *(f"t-{number}" for number in range(10))}


async def test_a_refused_delta_is_followed_by_a_snapshot_and_a_refused_snapshot_by_the_next_change(
    control: Control, as_node: Metadata
) -> None:
    async with following(control, as_node) as one:
        await one.follow(await version(control))
        before = one.policy.version
        await control.add_tenant("acme")
        assert isinstance(await one.next(), node_pb2.PolicyDelta)
        await one.answer(error_message="it does not fit", applied_version=before)
        assert isinstance(await one.next(), node_pb2.PolicySnapshot)
        await one.answer(error_message="nor does it", applied_version=before)
        await control.add_tenant("blue")
        push = await one.next()
        assert isinstance(push, node_pb2.PolicySnapshot)
        assert set(by_tenant(push)) == {"acme", "blue"}
        await one.answer()
        await control.add_tenant("cyan")
        assert isinstance(await one.next(), node_pb2.PolicyDelta)


async def test_a_node_that_says_it_goes_by_another_version_gets_a_snapshot(control: Control, as_node: Metadata) -> None:
    async with following(control, as_node) as one:
        await one.follow(await version(control))
        await control.add_tenant("acme")
        await one.next()
        await one.answer(applied_version=1)
        assert isinstance(await one.next(), node_pb2.PolicySnapshot)


async def test_where_it_cannot_be_told_what_changed_everything_goes_out(control: Control, as_node: Metadata) -> None:
    async with following(control, as_node) as one:
        await one.follow(await version(control))
        await control.add_tenant("acme")
        await one.next()
        await control.add_tenant("blue")
        async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
            await session.execute(delete(models.PolicyChange).where(models.PolicyChange.version > one.policy.version))
        await one.answer()
        assert isinstance(await one.next(), node_pb2.PolicySnapshot)
        await one.answer()


@pytest.mark.parametrize("seed", range(3))
async def test_a_snapshot_and_its_deltas_are_the_snapshot_of_the_end(
    control: Control, as_node: Metadata, seed: int
) -> None:
    draw = random.Random(seed)
    admin = await control.bearer(control.admin_key)
    async with following(control, as_node) as one, following(control, as_node, "node-2") as two:
        there: list[str] = []
        for step in range(20):
            act = draw.choice(["create", "quota", "quota", "suspend", "delete"]) if there else "create"
            if act == "create":
                there.append(f"t-{step}")
                await control.add_tenant(there[-1], "chat")
            elif act == "quota":
                await control.set_quota(draw.choice(there), limit_bytes=draw.randint(0, 8) * MIB)
            elif act == "suspend":
                name = f"tenants/{draw.choice(there)}"
                await control.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name=name), metadata=admin)
            else:
                name = f"tenants/{there.pop(draw.randrange(len(there)))}"
                await control.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name=name), metadata=admin)
            if draw.random() < 0.5:
                await draw.choice([one, two]).follow(await version(control))
        await settled(control, one, two)
        led_by_deltas = [rules(one.policy), rules(two.policy)]
        assert "delta" in one.pushes
        for follower, led in zip((one, two), led_by_deltas, strict=True):
            async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
                await bump_policy_version(session, datetime.now(UTC))  # a change of any: everything goes out
            await settled(control, one, two)
            assert rules(follower.policy) == led


async def settled(control: Control, *nodes: Follower) -> None:
    """Follow until leases have stopped to move."""
    newest = 0
    while newest != (newest := await version(control)):
        for one in nodes:
            await one.follow(newest)
        await asyncio.sleep(0.05)


async def test_what_concerns_no_tenant_goes_out_as_a_delta_of_none(control: Control, as_node: Metadata) -> None:
    """A key of the platform, a node that is cordoned, the signing keys: of 10,000 tenants nothing is said anew."""
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    admin = await control.bearer(control.admin_key)
    async with following(control, as_node) as one:
        await settled(control, one)
        tenants, keys, before = list(one.policy.tenants), len(one.policy.key_set.keys), len(one.pushes)
        await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="another")
        await one.follow(await version(control))
        await control.nodes.CordonNode(nodes_pb2.CordonNodeRequest(name="nodes/node-1"), metadata=admin)
        await one.follow(await version(control))
        await control.tokens.RotateSigningKey(tokens_pb2.RotateSigningKeyRequest(), metadata=admin)
        await one.follow(await version(control))
        assert set(one.pushes[before:]) == {"delta"}
        assert list(one.policy.tenants) == tenants
        assert len(one.policy.key_set.keys) == keys + 1


async def test_of_a_node_that_joins_the_others_hear_in_deltas(control: Control, as_node: Metadata) -> None:
    """What is split by capacity changes at once; leases follow, and go out as the tenants that they are of."""
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    await control.add_tenant("blue", "chat")
    async with following(control, as_node) as one:
        await settled(control, one)
        await control.set_quota("acme", limit_bytes=10 * MIB, reserved_bytes=4 * MIB)
        await settled(control, one)
        before = len(one.pushes)
        async with following(control, as_node, "node-2") as two:
            async with asyncio.timeout(30):
                while [(share.limit_bytes, share.reserved_bytes) for share in acme_on(one, two)] != [
                    (5 * MIB, 2 * MIB),
                    (5 * MIB, 2 * MIB),
                ]:
                    await settled(control, one, two)
            assert set(one.pushes[before:]) == {"delta"}


def acme_on(*nodes: Follower) -> list[quotas_pb2.TierQuota]:
    tiers = [tier for node in nodes for tier in by_tenant(node.policy)["acme"].tiers]
    return [tier for tier in tiers if tier.tier == quotas_pb2.TIER_DRAM]


async def test_a_node_whose_lease_begins_anew_gets_everything_anew(control: Control, as_node: Metadata) -> None:
    """It waited for an earlier process, and had nothing: no tenant was changed by name."""
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    async with following(control, as_node), following(control, as_node) as elsewhere:
        await elsewhere.follow(await version(control))
        assert acme_on(elsewhere)[0].limit_bytes == 0
        async with control.database.transaction() as session:
            (await session.get_one(models.Node, "node-1")).lease_from_time = datetime.now(UTC)
        while acme_on(elsewhere)[0].limit_bytes == 0:
            await elsewhere.next()
            await elsewhere.answer()
        assert elsewhere.pushes[-1] == "snapshot"


async def test_a_stream_is_not_fenced_by_rows_from_before_its_registration(
    control: Control, as_node: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams share what is read: what was read for another one may not know yet that this node has registered."""
    go_on, has_read = asyncio.Event(), asyncio.Event()

    async def read_slowly(database: Database, base_version: int | None = None) -> PolicyRows:
        rows = await read_policy_rows(database, base_version)
        has_read.set()
        await go_on.wait()
        return rows

    async with asyncio.timeout(30), asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        monkeypatch.setattr(push, "read_policy_rows", read_slowly)
        opening = group.create_task(stack.enter_async_context(following(control, as_node, "node-1")))
        await has_read.wait()
        joining = group.create_task(stack.enter_async_context(following(control, as_node, "node-2")))
        while not await control_knows(control, "node-2"):
            await asyncio.sleep(0.01)
        go_on.set()
        assert (await opening).policy.version
        assert (await joining).policy.version


async def control_knows(control: Control, node_id: str) -> bool:
    async with control.database.transaction() as session:
        return await session.get(models.Node, node_id) is not None
