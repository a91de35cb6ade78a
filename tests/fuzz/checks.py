"""What must be so when the fuzz is over: nothing of it is left behind but what was done in order."""

from __future__ import annotations

from typing import Any

import grpc
import psycopg
from sqlalchemy import select

from controlplane.audit import to_chained_record
from controlplane.db import models
from saltern.admin.v1 import quotas_pb2, usage_pb2, usage_pb2_grpc
from saltern.audit.chain import verify
from saltern.auth.v1 import auth_pb2
from saltern.node.v1 import node_pb2, node_pb2_grpc
from saltern.rpc_errors import error_from_rpc
from tests.fuzz.calls import Outcome
from tests.fuzz.world import GHOST, KEEPER, KEEPER_ROLE, OWN, World
from tests.support.backups import libpq_url
from tests.support.control import DatabaseUrls, bearer
from tests.support.scopes import connect_to_all

#: What a control plane may grow by after it has warmed up, whatever the length of the run.
GROWTH_MAX_BYTES = 96 * 2**20
DESCRIPTORS_MORE_MAX = 16
_USED_BYTES = 123_456_789
_GRANTED_ABOVE_QUOTA = """
    SELECT q.tenant_id, q.tier, q.limit_bytes, sum(l.granted_bytes)
    FROM quota_leases l JOIN tier_quotas q USING (tenant_id, tier)
    GROUP BY q.tenant_id, q.tier, q.limit_bytes HAVING sum(l.granted_bytes) > q.limit_bytes
"""


async def check_control(world: World, urls: DatabaseUrls, outcome: Outcome) -> list[str]:
    """Faults of the control plane after a run."""
    found = []
    control = world.control
    if not control.is_alive:
        return ["the control plane has died"]
    found += _growth(outcome)
    found += await _broken_chains(urls)
    try:
        found += await _wrong_books(world)
    except grpc.aio.AioRpcError as error:
        found.append(f"calls that are in order fail after all that: {error_from_rpc(error)}")
    with psycopg.connect(libpq_url(urls.owner)) as connection:
        connection.execute("SELECT set_config('saltern.tenant', '*', false)")
        found += [f"more is granted than the quota: {row}" for row in connection.execute(_GRANTED_ABOVE_QUOTA)]
    found += [f"the log says: {line[:300]} ... {line[-3000:]}" for line in control.unexpected()[:20]]
    return found


def _growth(outcome: Outcome) -> list[str]:
    """Of memory and descriptors from the first third of the run to its end."""
    warm = len(outcome.descriptors) // 3
    if not outcome.descriptors[warm:]:
        return []
    found = []
    grown_bytes = outcome.resident_bytes[-1] - outcome.resident_bytes[warm]
    if grown_bytes > GROWTH_MAX_BYTES:
        found.append(f"memory has grown by {grown_bytes >> 20} MiB: {[size >> 20 for size in outcome.resident_bytes]}")
    if outcome.descriptors[-1] > max(outcome.descriptors[: warm + 1]) + DESCRIPTORS_MORE_MAX:
        found.append(f"descriptors have grown: {outcome.descriptors}")
    return found


async def _broken_chains(urls: DatabaseUrls) -> list[str]:
    database = connect_to_all(urls.app, pool_connections=1)
    try:
        found = []
        async with database.transaction() as session:
            for chain in (await session.scalars(select(models.AuditEvent.chain).distinct())).all():
                events = select(models.AuditEvent).where(models.AuditEvent.chain == chain)
                rows = (await session.scalars(events.order_by(models.AuditEvent.sequence))).all()
                found += [f"the chain of {chain}: {fault}" for fault in verify(chain, map(to_chained_record, rows))]
        return found
    finally:
        await database.close()


async def _wrong_books(world: World) -> list[str]:
    """A node that reports after all that is the node whose numbers are shown, to the byte (I8)."""
    nodes: Any = node_pb2_grpc.NodeServiceStub(world.channel)
    usages: Any = usage_pb2_grpc.UsageServiceStub(world.channel)
    world.forget_tokens()
    used_bytes = 0
    for role, node, used_here in ((KEEPER_ROLE, KEEPER, _USED_BYTES), ("node", GHOST, 1)):
        metadata = bearer(await world.token(role))
        capacity = node_pb2.TierCapacity(tier=quotas_pb2.TIER_DRAM, capacity_bytes=2**50)
        registered = await nodes.RegisterNode(
            node_pb2.RegisterNodeRequest(
                node_id=node, endpoint=auth_pb2.NodeEndpoint(wire_endpoint="127.0.0.1:7701"), capacities=[capacity]
            ),
            metadata=metadata,
        )
        tier = node_pb2.TenantTierUsage(tier=quotas_pb2.TIER_DRAM, used_bytes=used_here)
        usage = node_pb2.TenantUsage(tenant_id=OWN, tiers=[tier])
        await nodes.ReportUsage(
            node_pb2.ReportUsageRequest(node_id=node, fencing_epoch=registered.fencing_epoch, tenants=[usage]),
            metadata=metadata,
        )
        used_bytes += used_here
    shown = await usages.GetUsage(
        usage_pb2.GetUsageRequest(tenant=f"tenants/{OWN}"), metadata=bearer(await world.token("tenant-admin"))
    )
    found = sum(tier.used_bytes for tier in shown.tiers if tier.tier == quotas_pb2.TIER_DRAM)
    return [] if found == used_bytes else [f"{found} bytes are shown as used, and {used_bytes} were reported"]
