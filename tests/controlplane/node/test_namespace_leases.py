"""Limits of namespaces over a real database: they lie where the tenant's quota lies, and move as it does (I4)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from uuid import UUID

import pytest
from sqlalchemy import func, select

from controlplane.db import ServiceScope, ServiceTask, models
from controlplane.node.lease_keeper import LeaseKeeper
from saltern.admin.v1 import credentials_pb2, namespaces_pb2, nodes_pb2, quotas_pb2
from saltern.node.v1 import node_pb2
from tests.controlplane.node.test_leases import MIB, Metadata, Peer
from tests.support.control import Control

CHAT = "tenants/acme/namespaces/chat"


@pytest.fixture
async def as_node(control: Control) -> Metadata:
    return await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))


async def set_limit(control: Control, limit_bytes: int | None) -> None:
    limits = [] if limit_bytes is None else [
        namespaces_pb2.NamespaceLimit(tier=quotas_pb2.TIER_DRAM, limit_bytes=limit_bytes)
    ]  # fmt: skip
    namespace = namespaces_pb2.Namespace(name=CHAT, tier_limits=limits)
    request = namespaces_pb2.UpdateNamespaceRequest(namespace=namespace)
    await control.namespaces.UpdateNamespace(request, metadata=await control.bearer(control.admin_key))


def limit_of(peer: Peer) -> int | None:
    """What the policy of a node says of the namespace; None for no limit."""
    namespaces = [space for tenant in peer.policy.tenants for space in tenant.namespaces]
    limits = [limit for space in namespaces for limit in space.tier_limits]
    return limits[0].limit_bytes if limits else None


async def reaches(peer: Peer, limit_bytes: int | None) -> None:
    """Follow the policy until it says so much."""
    while limit_of(peer) != limit_bytes:
        await peer.next()


async def leases(control: Control) -> int:
    async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
        return await session.scalar(select(func.count()).select_from(models.NamespaceLease)) or 0


async def test_a_limit_follows_the_quota_from_node_to_node(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    await set_limit(control, 4 * MIB)
    async with AsyncExitStack() as stack:
        first, second = Peer(control, as_node, "node-1"), Peer(control, as_node, "node-2")
        await first.open(stack)
        assert limit_of(first) == 4 * MIB
        await first.settle()
        await second.open(stack)
        assert limit_of(second) == 0, "I4: the first may still hold all of it"
        await reaches(first, 2 * MIB)
        await first.settle()
        await reaches(second, 2 * MIB)
        await second.settle()
        drain = nodes_pb2.DrainNodeRequest(name="nodes/node-1")
        await control.nodes.DrainNode(drain, metadata=await control.bearer(control.admin_key))
        await reaches(first, 0)
        await first.settle()
        await reaches(second, 4 * MIB)


async def test_a_limit_is_set_raised_lowered_and_lifted_under_way(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    async with AsyncExitStack() as stack:
        node = Peer(control, as_node, "node-1")
        await node.open(stack)
        assert limit_of(node) is None
        for limit_bytes in (4 * MIB, 6 * MIB, MIB, 0):
            await set_limit(control, limit_bytes)
            while limit_of(node) != limit_bytes:
                await node.next()
                assert limit_of(node) != 0 or limit_bytes == 0, "nothing is evicted that need not be"
            await node.settle()
        await set_limit(control, None)
        await reaches(node, None)
        await LeaseKeeper(control.database).settle()
        assert await leases(control) == 0


async def test_leases_of_a_limit_go_with_the_namespace(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    await set_limit(control, MIB)
    async with AsyncExitStack() as stack:
        node = Peer(control, as_node, "node-1")
        await node.open(stack)
        assert await leases(control) == 1
        delete = namespaces_pb2.DeleteNamespaceRequest(name=CHAT)
        await control.namespaces.DeleteNamespace(delete, metadata=await control.bearer(control.admin_key))
        await node.next()
        assert await leases(control) == 0


async def test_a_reported_namespace_is_taken_in(control: Control, as_node: Metadata) -> None:
    """What a node says of a namespace is metered beside its tenant's."""
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    node = Peer(control, as_node, "node-1")
    await node.register()
    part = node_pb2.NamespaceUsage(namespace_id="chat", uid=str(UUID(int=2)), get_hits=1)
    usage = node_pb2.TenantUsage(tenant_id="acme", tenant_uid=str(UUID(int=1)), get_hits=3, namespaces=[part])
    request = node_pb2.ReportUsageRequest(
        node_id="node-1", fencing_epoch=node.epoch, tenants=[usage], counters_id="0" * 32, sequence=1
    )
    await control.node.ReportUsage(request, metadata=as_node)
    hits: dict[str, int] = {}
    while not hits:  # a report is answered before it is booked: the answer is the lease, which waits for no book
        async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
            books = await session.execute(select(models.OpenUsage.namespace_id, models.OpenUsage.totals))
            hits = {namespace: totals["hits"] for namespace, totals in books.all()}
        await asyncio.sleep(0.02)
    assert hits == {"": 3, "chat": 1}
