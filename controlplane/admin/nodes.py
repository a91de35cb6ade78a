"""NodesService: cordon, drain and remove cache nodes; and what a node looks like from outside."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.fields import to_timestamp
from controlplane.admin.service import AdminServicer, Change, method
from controlplane.caller import authorise
from controlplane.db.locks import lock_leases, lock_quotas
from controlplane.db.models import Concern, Node, NodeAdminState, QuotaLease, TierQuota
from controlplane.node.policy_rows import read_version
from controlplane.node.registry import capacity_bytes
from controlplane.rpc import Context
from saltern.admin.v1 import nodes_pb2, nodes_pb2_grpc, usage_pb2
from saltern.errors import FailedPreconditionError, NotFoundError
from saltern.names import NodeId, node_name, parse_node_name
from tenants.quota import Tier, check_reservations
from tenants.roles import Permission

_ADMIN_STATE_TO_PROTO = {
    NodeAdminState.ACTIVE: usage_pb2.Node.ADMIN_STATE_ACTIVE,
    NodeAdminState.CORDONED: usage_pb2.Node.ADMIN_STATE_CORDONED,
    NodeAdminState.DRAINING: usage_pb2.Node.ADMIN_STATE_DRAINING,
}


class NodesService(AdminServicer, nodes_pb2_grpc.NodesServiceServicer):
    service = "saltern.admin.v1.NodesService"

    @method
    async def CordonNode(self, request: nodes_pb2.CordonNodeRequest, context: Context) -> usage_pb2.Node:
        return await self._set("CordonNode", request, NodeAdminState.CORDONED)

    @method
    async def DrainNode(self, request: nodes_pb2.DrainNodeRequest, context: Context) -> usage_pb2.Node:
        return await self._set("DrainNode", request, NodeAdminState.DRAINING)

    @method
    async def UncordonNode(self, request: nodes_pb2.UncordonNodeRequest, context: Context) -> usage_pb2.Node:
        return await self._set("UncordonNode", request, NodeAdminState.ACTIVE)

    @method
    async def RemoveNode(self, request: nodes_pb2.RemoveNodeRequest, context: Context) -> nodes_pb2.RemoveNodeResponse:
        authorise(Permission.NODES_MANAGE, None)
        node = parse_node_name(request.name)

        async def act(session: AsyncSession, now: datetime) -> Change[nodes_pb2.RemoveNodeResponse]:
            await lock_leases(session)  # before any row: a step of the leases may be at this node's
            await lock_quotas(session)
            row = await _load(session, node)
            before = await _shown(session, row, now, self._parts.node_lost_after)
            _check_gone(before, now)
            await _check_reservations_without(session, node)
            await session.delete(row)
            return Change(
                tenant=None,
                resource=request.name,
                response=nodes_pb2.RemoveNodeResponse(),
                before=before,
                concern=Concern.MEMBERS,
            )

        return await self._change("RemoveNode", request, nodes_pb2.RemoveNodeResponse, act)

    async def _set(
        self,
        name: str,
        request: nodes_pb2.CordonNodeRequest | nodes_pb2.DrainNodeRequest | nodes_pb2.UncordonNodeRequest,
        state: NodeAdminState,
    ) -> usage_pb2.Node:
        authorise(Permission.NODES_MANAGE, None)
        node = parse_node_name(request.name)

        async def act(session: AsyncSession, now: datetime) -> Change[usage_pb2.Node]:
            row = await _load(session, node)
            before = await _shown(session, row, now, self._parts.node_lost_after)
            drains = NodeAdminState.DRAINING in (row.admin_state, state)
            row.admin_state = state
            after = await _shown(session, row, now, self._parts.node_lost_after)
            return Change(
                tenant=None,
                resource=request.name,
                response=after,
                before=before,
                after=after,
                # Clients go elsewhere; leases move only to and from a node that drains.
                concern=Concern.MEMBERS if drains else Concern.NOBODY,
            )

        return await self._change(name, request, usage_pb2.Node, act)


async def leased_bytes(session: AsyncSession, nodes: Iterable[str]) -> dict[str, tuple[int, int]]:
    """What each node is granted of DRAM, and the most that it may still go by; sums over all tenants."""
    believed = case(
        (Node.settled_version >= QuotaLease.version, QuotaLease.granted_bytes), else_=QuotaLease.believed_bytes
    )
    rows = await session.execute(
        select(QuotaLease.node_id, func.sum(QuotaLease.granted_bytes), func.sum(believed))
        .join(Node, Node.id == QuotaLease.node_id)
        .where(QuotaLease.node_id.in_(list(nodes)), QuotaLease.tier == Tier.DRAM)
        .group_by(QuotaLease.node_id)
    )
    return {node: (int(granted), int(believed_sum)) for node, granted, believed_sum in rows}


def to_node(
    row: Node, leased: tuple[int, int], now: datetime, lost_after: timedelta, newest_version: int
) -> usage_pb2.Node:
    """A node as a resource; ``leased`` as :func:`leased_bytes` gives it, ``newest_version`` of the policy."""
    silent = now - row.last_report_time
    if silent >= lost_after:
        state = usage_pb2.Node.STATE_LOST
    elif silent >= lost_after / 2:
        state = usage_pb2.Node.STATE_LATE
    else:
        state = usage_pb2.Node.STATE_LIVE
    return usage_pb2.Node(
        name=node_name(NodeId(row.id)),
        state=state,
        admin_state=_ADMIN_STATE_TO_PROTO[row.admin_state],
        wire_endpoint=row.wire_endpoint,
        grpc_endpoint=row.grpc_endpoint,
        dram_capacity_bytes=row.dram_capacity_bytes,
        policy_version=row.applied_version,
        tls_server_name=row.tls_server_name,
        last_report_time=to_timestamp(row.last_report_time),
        fencing_epoch=row.fencing_epoch,
        lease_expire_time=to_timestamp(row.lease_expire_time),
        granted_bytes=leased[0],
        believed_bytes=leased[1],
        settled_version=row.settled_version,
        policy_lag=max(0, newest_version - row.applied_version),
    )


async def _shown(session: AsyncSession, row: Node, now: datetime, lost_after: timedelta) -> usage_pb2.Node:
    leased = (await leased_bytes(session, [row.id])).get(row.id, (0, 0))
    return to_node(row, leased, now, lost_after, await read_version(session))


async def _load(session: AsyncSession, node: NodeId) -> Node:
    row = await session.get(Node, node, with_for_update={"key_share": True})
    if row is None:
        raise NotFoundError(
            f"there is no node {node}", reason="NODE_NOT_FOUND", hint="see `saltern node list`", metadata={"node": node}
        )
    return row


def _check_gone(node: usage_pb2.Node, now: datetime) -> None:
    """Raises FailedPreconditionError: NODE_IN_USE: it is there, or may still grow by what it was leased (I4)."""
    held = node.HasField("lease_expire_time") and node.lease_expire_time.ToDatetime(now.tzinfo) > now
    if node.state == usage_pb2.Node.STATE_LOST and not (held and node.believed_bytes):
        return
    what = "it reports" if node.state != usage_pb2.Node.STATE_LOST else "it may still grow by its leases"
    raise FailedPreconditionError(
        f"{node.name} cannot be removed: {what}",
        reason="NODE_IN_USE",
        hint="drain it, wait until `saltern node list` shows nothing held, and stop it; of a node that was lost the"
        " leases run out by themselves",
        metadata={"node": node.name, "believed_bytes": str(node.believed_bytes)},
    )


async def _check_reservations_without(session: AsyncSession, node: NodeId) -> None:
    rows = [row for row in await session.scalars(select(Node)) if row.id != node]
    if not rows:
        return  # an empty cluster promises nothing until a node comes
    quotas = list(await session.scalars(select(TierQuota)))
    for tier in Tier:
        total_bytes = sum(capacity_bytes(row, tier) for row in rows)
        check_reservations((quota.reserved_bytes for quota in quotas if quota.tier is tier), total_bytes, tier)
