"""A node on the other end of a policy stream that takes deltas, without anything behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from dataplane.policy_log import merge
from saltern.admin.v1 import quotas_pb2
from saltern.auth.v1 import auth_pb2
from saltern.node.v1 import node_pb2
from tests.support.control import Control

MIB = 1024**2
Metadata = tuple[tuple[str, str], ...]


class Follower:
    """A node that takes deltas, and keeps what they make."""

    def __init__(self, call: Any, node_id: str, fencing_epoch: int) -> None:
        self._call = call
        self.node_id = node_id
        self.fencing_epoch = fencing_epoch
        self.policy = node_pb2.PolicySnapshot()
        self.pushes: list[str] = []

    async def next(self) -> node_pb2.PolicySnapshot | node_pb2.PolicyDelta:
        """Take the next push, without an answer."""
        response = await self._call.read()
        assert response is not grpc.aio.EOF, await self._call.details()
        if response.HasField("snapshot"):
            snapshot: node_pb2.PolicySnapshot = response.snapshot
            self.policy = snapshot
            self.pushes.append("snapshot")
            return snapshot
        delta: node_pb2.PolicyDelta = response.delta
        assert delta.base_version == self.policy.version
        self.policy = merge(self.policy, [delta])
        self.pushes.append("delta")
        return delta

    async def answer(self, *, error_message: str = "", applied_version: int | None = None) -> None:
        version = self.policy.version if applied_version is None else applied_version
        await self._call.write(
            node_pb2.StreamPolicyRequest(
                node_id=self.node_id,
                fencing_epoch=self.fencing_epoch,
                applied_version=version,
                settled_version=version,
                error_message=error_message,
                accepts_deltas=True,
            )
        )

    async def follow(self, version: int) -> None:
        """Take and answer pushes until one is of ``version`` or later."""
        while self.policy.version < version:
            await self.next()
            await self.answer()


@asynccontextmanager
async def following(control: Control, as_node: Metadata, node_id: str = "node-1") -> AsyncIterator[Follower]:
    registered = await control.node.RegisterNode(
        node_pb2.RegisterNodeRequest(
            node_id=node_id,
            endpoint=auth_pb2.NodeEndpoint(wire_endpoint="127.0.0.1:7701"),
            capacities=[node_pb2.TierCapacity(tier=quotas_pb2.TIER_DRAM, capacity_bytes=64 * MIB)],
        ),
        metadata=as_node,
    )
    call = control.node.StreamPolicy(metadata=as_node)
    node = Follower(call, node_id, registered.fencing_epoch)
    await node.answer()
    try:
        await node.follow(registered.lease_version)
        yield node
    finally:
        call.cancel()
