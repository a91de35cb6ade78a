"""Leases over a real database: what one node gains another has given back first (I4); lost nodes, drained nodes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from controlplane.clock import utc_now
from controlplane.db import ServiceScope, ServiceTask, models
from controlplane.node import lease_keeper
from controlplane.node.lease_keeper import LeaseKeeper
from controlplane.node.registry import LOST_AFTER
from saltern.admin.v1 import credentials_pb2, nodes_pb2, quotas_pb2, usage_pb2
from saltern.auth.v1 import auth_pb2
from saltern.errors import FailedPreconditionError, PermissionDeniedError
from saltern.node.v1 import node_pb2
from tests.support.control import Control, refused

MIB = 1024**2
Metadata = tuple[tuple[str, str], ...]


@pytest.fixture
async def as_node(control: Control) -> Metadata:
    return await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))


class Peer:
    """A node's side of the line: registers, streams, settles what it is told to."""

    def __init__(self, control: Control, metadata: Metadata, node_id: str, state_id: str = "home") -> None:
        self.control, self.metadata, self.node_id, self.state_id = control, metadata, node_id, state_id
        self.epoch = 0
        self.policy = node_pb2.PolicySnapshot()
        self.call: Any = None

    async def register(self) -> node_pb2.RegisterNodeResponse:
        request = node_pb2.RegisterNodeRequest(
            node_id=self.node_id,
            state_id=self.state_id,
            endpoint=auth_pb2.NodeEndpoint(wire_endpoint="127.0.0.1:7701"),
            capacities=[node_pb2.TierCapacity(tier=quotas_pb2.TIER_DRAM, capacity_bytes=64 * MIB)],
        )
        response = await self.control.node.RegisterNode(request, metadata=self.metadata)
        self.epoch = response.fencing_epoch
        return response

    async def open(self, stack: AsyncExitStack) -> None:
        await self.register()
        self.call = self.control.node.StreamPolicy(metadata=self.metadata)
        stack.callback(self.call.cancel)
        await self._answer(0)
        await self.next()

    async def next(self) -> None:
        self.policy = (await self.call.read()).snapshot

    async def settle(self) -> None:
        await self._answer(self.policy.version)

    async def reaches(self, limit_bytes: int) -> None:
        """Follow the policy until it grants so much."""
        while self.limit_bytes != limit_bytes:
            await self.next()

    @property
    def limit_bytes(self) -> int:
        return sum(tier.limit_bytes for tenant in self.policy.tenants for tier in tenant.tiers)

    async def report(self) -> node_pb2.ReportUsageResponse:
        request = node_pb2.ReportUsageRequest(
            node_id=self.node_id,
            fencing_epoch=self.epoch,
            applied_version=self.policy.version,
            settled_version=self.policy.version,
        )
        return await self.control.node.ReportUsage(request, metadata=self.metadata)

    async def _answer(self, version: int) -> None:
        await self.call.write(
            node_pb2.StreamPolicyRequest(
                node_id=self.node_id, fencing_epoch=self.epoch, applied_version=version, settled_version=version
            )
        )


async def held(control: Control) -> dict[str, tuple[int, int]]:
    """(granted, believed) by node, as the books have them."""
    async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
        rows = await session.scalars(select(models.QuotaLease).where(models.QuotaLease.tier == "dram"))
        return {row.node_id: (row.granted_bytes, row.believed_bytes) for row in rows}


async def set_node(control: Control, node_id: str, **columns: datetime | None) -> None:
    async with control.database.transaction() as session:
        row = await session.get_one(models.Node, node_id)
        for name, value in columns.items():
            setattr(row, name, value)


async def test_a_single_node_has_the_whole_quota_with_its_first_policy(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", limit_bytes=10 * MIB)
    async with AsyncExitStack() as stack:
        node = Peer(control, as_node, "node-1")
        await node.open(stack)
        assert node.limit_bytes == 10 * MIB
        assert node.policy.lease_duration.seconds == 600
        answer = await node.report()
        assert (answer.lease_duration.seconds, answer.policy_version) == (600, node.policy.version)
        assert answer.lease_version <= node.policy.version
        again = Peer(control, as_node, "node-1")
        await again.open(stack)
        assert again.limit_bytes == 10 * MIB, "a successor in the same folder waits for nothing"


async def test_i4_a_node_that_joins_waits_for_what_the_other_gives_back(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", limit_bytes=10 * MIB)
    async with AsyncExitStack() as stack:
        first, second = Peer(control, as_node, "node-1"), Peer(control, as_node, "node-2")
        await first.open(stack)
        await first.settle()
        await second.open(stack)
        assert second.limit_bytes == 0
        await first.reaches(5 * MIB)
        assert (await held(control))["node-1"] == (5 * MIB, 10 * MIB)
        await first.settle()
        await second.reaches(5 * MIB)
        await second.settle()
        await control.set_quota("acme", limit_bytes=4 * MIB)
        await first.reaches(2 * MIB)
        await second.reaches(2 * MIB)


async def test_i4_a_process_elsewhere_gets_nothing_while_the_other_may_live(
    control: Control, as_node: Metadata
) -> None:
    await control.add_tenant("acme", limit_bytes=10 * MIB)
    async with AsyncExitStack() as stack:
        await Peer(control, as_node, "node-1", "home").open(stack)
        moved = Peer(control, as_node, "node-1", "elsewhere")
        await moved.open(stack)
        assert moved.limit_bytes == 0
        await set_node(control, "node-1", lease_from_time=utc_now())
        await moved.reaches(10 * MIB)  # the keeper looks every second


async def test_i9_a_lost_nodes_part_goes_to_the_living_when_its_lease_has_run_out(
    control: Control, as_node: Metadata
) -> None:
    await control.add_tenant("acme", limit_bytes=10 * MIB)
    async with AsyncExitStack() as stack:
        first, second = Peer(control, as_node, "node-1"), Peer(control, as_node, "node-2")
        await first.open(stack)
        await second.open(stack)
        await first.reaches(5 * MIB)
        await first.settle()
        await second.reaches(5 * MIB)
        await set_node(control, "node-1", last_report_time=utc_now() - 2 * LOST_AFTER)
        keeper = LeaseKeeper(control.database, reclaim_grace_s=0)
        await keeper.tick()
        assert (await held(control))["node-1"] == (5 * MIB, 10 * MIB) or (await held(control))["node-1"][0] == 5 * MIB
        await set_node(control, "node-1", lease_expire_time=utc_now() - timedelta(seconds=1))
        await keeper.tick()
        await second.reaches(10 * MIB)
        assert (await held(control))["node-1"] == (0, 0)
        # Its process was only cut off: it may report, but an answer counts for the policy that took its part alone.
        answer = await first.report()
        assert answer.lease_version > first.policy.version


async def test_i9_nothing_is_taken_back_right_after_the_database_was_away(
    control: Control, as_node: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes were silent then: the first to come back must not inherit from the others, which are on their way."""
    await control.add_tenant("acme", limit_bytes=10 * MIB)
    async with AsyncExitStack() as stack:
        first, second = Peer(control, as_node, "node-1"), Peer(control, as_node, "node-2")
        await first.open(stack)
        await second.open(stack)
        await first.reaches(5 * MIB)
        await first.settle()
        await second.reaches(5 * MIB)
        now_s = 1000.0
        monkeypatch.setattr(lease_keeper, "monotonic", lambda: now_s)
        keeper = LeaseKeeper(control.database, reclaim_grace_s=20)
        for _ in range(5):
            now_s += 5
            await keeper.tick()
        now_s += 60  # the database is away; when it is back, one node was faster than the other
        await set_node(
            control,
            "node-1",
            last_report_time=utc_now() - 2 * LOST_AFTER,
            lease_expire_time=utc_now() - timedelta(seconds=1),
        )
        for _ in range(4):
            await keeper.tick()
            assert (await held(control))["node-1"][0] == 5 * MIB
            now_s += 5
        now_s += 1
        # It has not come back. The control plane's own keeper, which waits for longer, may be at it in between.
        async with asyncio.timeout(30):
            while (await held(control))["node-1"] != (0, 0):
                await keeper.tick()


async def test_a_drained_node_gives_everything_back_and_can_then_be_removed(
    control: Control, as_node: Metadata
) -> None:
    await control.add_tenant("acme", limit_bytes=10 * MIB)
    admin = await control.bearer(control.admin_key)
    nodes = control.nodes
    async with AsyncExitStack() as stack:
        first, second = Peer(control, as_node, "node-1"), Peer(control, as_node, "node-2")
        await first.open(stack)
        await second.open(stack)
        await first.reaches(5 * MIB)
        await first.settle()
        await second.reaches(5 * MIB)
        shown = await nodes.CordonNode(nodes_pb2.CordonNodeRequest(name="nodes/node-1"), metadata=admin)
        assert shown.admin_state == usage_pb2.Node.ADMIN_STATE_CORDONED
        assert shown.granted_bytes == 5 * MIB, "cordoning moves nothing"
        await nodes.DrainNode(nodes_pb2.DrainNodeRequest(name="nodes/node-1"), metadata=admin)
        await first.reaches(0)
        await first.settle()
        await second.reaches(10 * MIB)
        remove = nodes_pb2.RemoveNodeRequest(name="nodes/node-1")
        await set_node(control, "node-1", last_report_time=utc_now())  # on a busy machine it may be long ago
        error = await refused(nodes.RemoveNode(remove, metadata=admin))
        assert (type(error), error.reason) == (FailedPreconditionError, "NODE_IN_USE")
        await set_node(control, "node-1", last_report_time=utc_now() - 2 * LOST_AFTER)
        await nodes.RemoveNode(remove, metadata=admin)
        listed = await control.usage.ListNodes(usage_pb2.ListNodesRequest(), metadata=admin)
        assert [node.name for node in listed.nodes] == ["nodes/node-2"]
        assert listed.nodes[0].believed_bytes == 10 * MIB
    done = [event.method.rpartition("/")[2] for event in await control.events() if "NodesService" in event.method]
    assert done == ["RemoveNode", "DrainNode", "CordonNode"]


async def test_only_a_platform_administrator_manages_nodes(control: Control, as_node: Metadata) -> None:
    for call, request in (
        (control.nodes.CordonNode, nodes_pb2.CordonNodeRequest(name="nodes/node-1")),
        (control.nodes.RemoveNode, nodes_pb2.RemoveNodeRequest(name="nodes/node-1")),
    ):
        assert type(await refused(call(request, metadata=as_node))) is PermissionDeniedError
