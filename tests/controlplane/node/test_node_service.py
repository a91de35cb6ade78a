"""NodeService: registration and fencing, the policy stream, usage reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from sqlalchemy import func, select, text

from controlplane.db import models
from saltern import errors
from saltern.admin.v1 import credentials_pb2, quotas_pb2, tenants_pb2, usage_pb2
from saltern.auth.v1 import auth_pb2
from saltern.node.v1 import node_pb2
from saltern.rpc_errors import error_from_rpc
from tests.support.control import Control, refused

MIB = 1024**2
#: A stream that does not end has not noticed; no measure of speed.
DEADLINE_S = 60
Metadata = tuple[tuple[str, str], ...]


@pytest.fixture
async def as_node(control: Control) -> Metadata:
    return await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))


def register_request(node_id: str = "node-1", dram_bytes: int = 64 * MIB) -> node_pb2.RegisterNodeRequest:
    return node_pb2.RegisterNodeRequest(
        node_id=node_id,
        endpoint=auth_pb2.NodeEndpoint(wire_endpoint="127.0.0.1:7701"),
        capacities=[node_pb2.TierCapacity(tier=quotas_pb2.TIER_DRAM, capacity_bytes=dram_bytes)],
    )


class PolicyStream:
    """A node's side of StreamPolicy."""

    def __init__(self, call: Any, node_id: str, fencing_epoch: int) -> None:
        self.call = call
        self.node_id = node_id
        self.fencing_epoch = fencing_epoch

    async def answer(self, applied_version: int = 0, error_message: str = "") -> None:
        await self.call.write(
            node_pb2.StreamPolicyRequest(
                node_id=self.node_id,
                fencing_epoch=self.fencing_epoch,
                applied_version=applied_version,
                error_message=error_message,
            )
        )

    async def next(self) -> node_pb2.PolicySnapshot:
        response = await self.call.read()
        assert response is not grpc.aio.EOF, await self.call.details()
        return response.snapshot

    async def next_with(self, condition: Any) -> node_pb2.PolicySnapshot:
        """The first snapshot from here on for which ``condition`` holds."""
        while True:
            snapshot = await self.next()
            if condition(snapshot):
                return snapshot


@asynccontextmanager
async def streaming(
    control: Control, metadata: Metadata, node_id: str = "node-1", fencing_epoch: int = 1
) -> AsyncIterator[PolicyStream]:
    call = control.node.StreamPolicy(metadata=metadata)
    stream = PolicyStream(call, node_id, fencing_epoch)
    await stream.answer()
    try:
        yield stream
    finally:
        call.cancel()


def dram_in(policy: node_pb2.TenantPolicy) -> quotas_pb2.TierQuota:
    return next(quota for quota in policy.tiers if quota.tier == quotas_pb2.TIER_DRAM)


async def test_every_registration_raises_the_fencing_epoch(control: Control, as_node: Metadata) -> None:
    for expected in (1, 2, 3):
        response = await control.node.RegisterNode(register_request(), metadata=as_node)
        assert (response.name, response.fencing_epoch) == ("nodes/node-1", expected)
        assert response.report_interval.seconds > 0
    other = await control.node.RegisterNode(register_request("node-2"), metadata=as_node)
    assert other.fencing_epoch == 1
    registered = [event for event in await control.events() if event.method.endswith("RegisterNode")]
    assert [event.resource for event in registered] == ["nodes/node-2", *["nodes/node-1"] * 3]


async def test_only_the_role_node_may_call(control: Control) -> None:
    admin = await control.bearer(control.admin_key)
    error = await refused(control.node.RegisterNode(register_request(), metadata=admin))
    assert (type(error), error.reason) == (errors.PermissionDeniedError, "ROLE_REQUIRED")
    error = await refused(control.node.ReportUsage(node_pb2.ReportUsageRequest(node_id="node-1"), metadata=admin))
    assert error.reason == "ROLE_REQUIRED"
    async with streaming(control, admin) as stream:
        assert (await refused(stream.call.read())).reason == "ROLE_REQUIRED"
    denied = [event for event in await control.events() if event.reason == "ROLE_REQUIRED"]
    assert [event.method.rpartition("/")[2] for event in denied] == ["StreamPolicy", "ReportUsage", "RegisterNode"]
    assert {event.actor for event in denied} == {"apiKeys/bootstrap-admin"}


async def test_malformed_registrations_are_refused(control: Control, as_node: Metadata) -> None:
    tier = node_pb2.TierCapacity(tier=quotas_pb2.TIER_DRAM, capacity_bytes=1)
    for change in (
        node_pb2.RegisterNodeRequest(node_id="Node_1"),
        node_pb2.RegisterNodeRequest(node_id="node\x00"),
        node_pb2.RegisterNodeRequest(endpoint=auth_pb2.NodeEndpoint(wire_endpoint="a\x00b")),
        node_pb2.RegisterNodeRequest(endpoint=auth_pb2.NodeEndpoint(host_id="h" * 10_000)),
        node_pb2.RegisterNodeRequest(software_version="1\n2"),
        node_pb2.RegisterNodeRequest(capacities=[tier]),
        node_pb2.RegisterNodeRequest(capacities=[node_pb2.TierCapacity(capacity_bytes=1)]),
        node_pb2.RegisterNodeRequest(capacities=[node_pb2.TierCapacity(tier=2, capacity_bytes=-1)]),
        node_pb2.RegisterNodeRequest(capacities=[node_pb2.TierCapacity(tier=2, capacity_bytes=2**62)]),
        node_pb2.RegisterNodeRequest(capacities=[node_pb2.TierCapacity(tier=2)] * 20_000),
    ):
        request = register_request()
        request.MergeFrom(change)
        error = await refused(control.node.RegisterNode(request, metadata=as_node))
        assert type(error) is errors.InvalidArgumentError, change
    async with control.database.transaction() as session:
        assert (await session.execute(select(func.count()).select_from(models.Node))).scalar_one() == 0


async def test_the_stream_pushes_a_snapshot_at_once_and_after_every_change(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", "chat", limit_bytes=10 * MIB)
    await control.node.RegisterNode(register_request(), metadata=as_node)
    async with streaming(control, as_node) as stream:
        first = await stream.next()
        assert first.key_set == await control.auth.GetKeySet(auth_pb2.GetKeySetRequest())
        (acme,) = first.tenants
        assert (acme.tenant_id, acme.state) == ("acme", tenants_pb2.Tenant.STATE_ACTIVE)
        quota = dram_in(acme)
        assert (quota.limit_bytes, quota.weight) == (10 * MIB, 100)
        (namespace,) = acme.namespaces
        assert (namespace.namespace_id, namespace.block_bytes, list(namespace.epochs)) == ("chat", 65536, [1])
        assert namespace.uid and acme.min_issue_time.seconds > 0

        await control.set_quota("acme", limit_bytes=20 * MIB)
        second = await stream.next_with(lambda snapshot: dram_in(snapshot.tenants[0]).limit_bytes == 20 * MIB)
        assert second.version > first.version

        admin = await control.bearer(control.admin_key)
        await control.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name="tenants/acme"), metadata=admin)
        await stream.next_with(lambda snapshot: snapshot.tenants[0].state == tenants_pb2.Tenant.STATE_SUSPENDED)
        await control.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name="tenants/acme"), metadata=admin)
        await stream.next_with(lambda snapshot: not snapshot.tenants)


async def test_versions_only_grow_and_the_last_one_holds_everything(control: Control, as_node: Metadata) -> None:
    await control.node.RegisterNode(register_request(), metadata=as_node)
    names = [f"tenant-{number}" for number in range(12)]
    async with streaming(control, as_node) as stream:
        adding = asyncio.gather(*(control.add_tenant(name) for name in names))
        versions = []
        while True:
            snapshot = await stream.next()
            versions.append(snapshot.version)
            if len(snapshot.tenants) == len(names):
                break
        await adding
    assert versions == sorted(set(versions))


async def test_i1_no_secret_is_in_a_snapshot(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    salt = (await control.exchange(secret, "chat")).salt_keys[0].key
    await control.node.RegisterNode(register_request(), metadata=as_node)
    async with streaming(control, as_node) as stream:
        raw = (await stream.next()).SerializeToString()
    assert salt not in raw and secret.encode() not in raw
    assert control.key_ring.private_key.private_bytes_raw() not in raw


async def test_i4_shares_of_all_nodes_never_sum_past_the_quota(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", limit_bytes=1_000_003)
    shares = {}
    for node_id, dram_bytes in (("node-1", MIB), ("node-2", 2 * MIB), ("node-3", 4 * MIB)):
        await control.node.RegisterNode(register_request(node_id, dram_bytes), metadata=as_node)
    # A round of the lease keeper between two registrations gives the first ones more, which they then have to give up.
    for _ in range(50):
        for node_id in ("node-1", "node-2", "node-3"):
            async with streaming(control, as_node, node_id) as stream:
                shares[node_id] = dram_in((await stream.next()).tenants[0]).limit_bytes
        if sum(shares.values()) == 1_000_003:
            break
    assert sum(shares.values()) == 1_000_003
    assert shares["node-1"] < shares["node-2"] < shares["node-3"]


async def test_i4_rates_reach_each_node_as_its_share(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme")
    await control.add_tenant("bravo")
    for node_id, dram_bytes in (("node-1", MIB), ("node-2", 3 * MIB)):
        await control.node.RegisterNode(register_request(node_id, dram_bytes), metadata=as_node)
    async with streaming(control, as_node, "node-1") as one, streaming(control, as_node, "node-2") as two:
        assert (await one.next()).tenants[0].rates == quotas_pb2.RateLimits()
        wanted = quotas_pb2.RateLimits(operations_per_s=1000, bytes_per_s=2, ssd_write_bytes_per_s=1)
        quota = quotas_pb2.Quota(name="tenants/acme/quota", rates=wanted)
        admin = await control.bearer(control.admin_key)
        await control.quotas.UpdateQuota(quotas_pb2.UpdateQuotaRequest(quota=quota), metadata=admin)
        shares = []
        for stream in (one, two):
            policy = await stream.next_with(lambda snapshot: snapshot.tenants[0].rates.operations_per_s)
            assert policy.tenants[1].rates == quotas_pb2.RateLimits()
            shares.append(policy.tenants[0].rates)
    assert [share.operations_per_s for share in shares] == [250, 750]
    assert [share.bytes_per_s for share in shares] == [1, 1]
    assert [share.ssd_write_bytes_per_s for share in shares] == [1, 1]  # no node has an SSD; 0 would be no limit


async def test_i5_a_node_may_not_come_back_too_small_for_what_is_reserved(control: Control, as_node: Metadata) -> None:
    await control.node.RegisterNode(register_request(dram_bytes=64 * MIB), metadata=as_node)
    await control.add_tenant("acme")
    await control.set_quota("acme", limit_bytes=64 * MIB, reserved_bytes=48 * MIB)
    error = await refused(control.node.RegisterNode(register_request(dram_bytes=32 * MIB), metadata=as_node))
    assert (type(error), error.reason) == (errors.FailedPreconditionError, "RESERVATIONS_ABOVE_CAPACITY")
    response = await control.node.RegisterNode(register_request(dram_bytes=48 * MIB), metadata=as_node)
    assert response.fencing_epoch == 2


async def test_a_new_process_of_a_node_fences_the_old_one(control: Control, as_node: Metadata) -> None:
    await control.node.RegisterNode(register_request(), metadata=as_node)
    async with streaming(control, as_node, fencing_epoch=1) as old:
        await old.next()
        await control.node.RegisterNode(register_request(), metadata=as_node)
        with pytest.raises(grpc.RpcError) as caught:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    await old.next()
    error = error_from_rpc(caught.value)
    assert (type(error), error.reason) == (errors.AbortedError, "FENCED")
    report = node_pb2.ReportUsageRequest(node_id="node-1", fencing_epoch=1)
    assert (await refused(control.node.ReportUsage(report, metadata=as_node))).reason == "FENCED"
    report = node_pb2.ReportUsageRequest(node_id="node-9", fencing_epoch=1)
    assert (await refused(control.node.ReportUsage(report, metadata=as_node))).reason == "FENCED"
    async with streaming(control, as_node, fencing_epoch=2) as new:
        assert (await new.next()).version > 0


async def test_answers_are_stored_and_a_refused_version_is_not(control: Control, as_node: Metadata) -> None:
    await control.node.RegisterNode(register_request(), metadata=as_node)

    async def applied() -> int:
        admin = await control.bearer(control.admin_key)
        (node,) = (await control.usage.ListNodes(usage_pb2.ListNodesRequest(), metadata=admin)).nodes
        return int(node.policy_version)

    async with streaming(control, as_node) as stream:
        first = await stream.next()
        await stream.answer(first.version)
        await control.add_tenant("acme")
        second = await stream.next()
        await stream.answer(first.version, error_message="no room for acme")
        await stream.call.done_writing()
        assert await stream.call.read() is grpc.aio.EOF  # everything before the end has been taken in
        assert await applied() == first.version < second.version


async def test_a_stream_belongs_to_one_node(control: Control, as_node: Metadata) -> None:
    await control.node.RegisterNode(register_request(), metadata=as_node)
    async with streaming(control, as_node) as stream:
        await stream.next()
        stream.node_id = "node-2"
        await stream.answer(1)
        assert (await refused(stream.call.read())).reason == "STREAM_OF_ANOTHER_NODE"
    empty = control.node.StreamPolicy(metadata=as_node)
    await empty.done_writing()
    error = await refused(empty.read())
    assert (error.reason, error.hint) == ("NODE_MISSING", "say first which node follows the policy")


async def test_i10_a_node_whose_key_is_deleted_gets_no_further_policy(control: Control, as_node: Metadata) -> None:
    await control.node.RegisterNode(register_request(), metadata=as_node)
    async with streaming(control, as_node) as stream:
        await stream.next()
        await control.delete_api_key("apiKeys/node")
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                await stream.next()
    assert error_from_rpc(caught.value).reason == "CREDENTIAL_REVOKED"


def usage_of(tenant: str, used_bytes: int, **counters: Any) -> node_pb2.TenantUsage:
    tier = node_pb2.TenantTierUsage(tier=quotas_pb2.TIER_DRAM, used_bytes=used_bytes, entries=used_bytes // 1000)
    return node_pb2.TenantUsage(tenant_id=tenant, tiers=[tier], **counters)


async def test_i8_a_report_replaces_what_was_reported_before(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme", limit_bytes=MIB)
    await control.add_tenant("bravo")
    for node_id in ("node-1", "node-2"):
        await control.node.RegisterNode(register_request(node_id), metadata=as_node)

    async def report(node_id: str, *tenants: node_pb2.TenantUsage) -> None:
        request = node_pb2.ReportUsageRequest(node_id=node_id, fencing_epoch=1, applied_version=1, tenants=tenants)
        await control.node.ReportUsage(request, metadata=as_node)

    async def usage(tenant: str) -> usage_pb2.Usage:
        request = usage_pb2.GetUsageRequest(tenant=f"tenants/{tenant}")
        return await control.usage.GetUsage(request, metadata=await control.bearer(control.admin_key))

    await report("node-1", usage_of("acme", 5000, get_hits=10, evictions=3), usage_of("bravo", 7000))
    activity = usage_pb2.SsdActivity(reads=1, demotions=2)
    await report("node-1", usage_of("acme", 4000, get_hits=11, ssd=activity), usage_of("no-such-tenant", 9))
    await report("node-2", usage_of("acme", 1000, get_hits=5, refused_by_reason={"NODE_FULL": 2}, taken_bytes=6))
    acme = await usage("acme")
    dram = next(tier for tier in acme.tiers if tier.tier == quotas_pb2.TIER_DRAM)
    assert (dram.used_bytes, dram.entries, dram.limit_bytes) == (5000, 5, MIB)
    assert (acme.get_hits, acme.evictions, acme.taken_bytes) == (16, 0, 6)
    assert (dict(acme.refused_by_reason), acme.ssd) == ({"NODE_FULL": 2}, activity)
    assert sum(tier.used_bytes for tier in (await usage("bravo")).tiers) == 0


async def test_malformed_reports_are_refused_and_change_nothing(control: Control, as_node: Metadata) -> None:
    await control.add_tenant("acme")
    await control.node.RegisterNode(register_request(), metadata=as_node)
    good = usage_of("acme", 1000)
    bad_tier = node_pb2.TenantUsage(tenant_id="acme", tiers=[node_pb2.TenantTierUsage(tier=9)])  # type: ignore[arg-type]
    twice = node_pb2.TenantUsage(tenant_id="acme", tiers=[*good.tiers, *good.tiers])
    for tenants in (
        [good, good],
        [usage_of("Acme", 1)],
        [usage_of("ac\x00me", 1)],
        [usage_of("acme", -1)],
        [usage_of("acme", 1, get_hits=-1)],
        [bad_tier],
        [usage_of("acme", 1, taken_bytes=-1)],
        [usage_of("acme", 1, evictions_by_cause={"quota": -1})],
        [usage_of("acme", 1, evicted_bytes_by_cause={"a\x00b": 1})],
        [usage_of("acme", 1, refused_by_reason={"": 1})],
        [usage_of("acme", 1, refused_by_reason={"A" * 65: 1})],
        [usage_of("acme", 1, refused_by_reason={f"R{number}": 1 for number in range(65)})],
        [usage_of("acme", 1, ssd=usage_pb2.SsdActivity(reads=-1))],
        [node_pb2.TenantUsage(tenant_id="acme", tiers=[node_pb2.TenantTierUsage(tier=1, lent_bytes=-1)])],  # type: ignore[arg-type]
        [twice],
    ):
        request = node_pb2.ReportUsageRequest(node_id="node-1", fencing_epoch=1, tenants=tenants)
        error = await refused(control.node.ReportUsage(request, metadata=as_node))
        assert type(error) is errors.InvalidArgumentError, tenants
    async with control.database.transaction() as session:
        assert (await session.execute(select(func.count()).select_from(models.NodeUsage))).scalar_one() == 0


async def test_reports_and_deletions_at_the_same_time_do_not_block_each_other(
    control: Control, as_node: Metadata
) -> None:
    admin = await control.bearer(control.admin_key)
    await control.node.RegisterNode(register_request(), metadata=as_node)
    tenants = [f"tenant-{number}" for number in range(8)]
    await asyncio.gather(*(control.add_tenant(tenant) for tenant in tenants))
    report = node_pb2.ReportUsageRequest(
        node_id="node-1", fencing_epoch=1, tenants=[usage_of(tenant, 1000) for tenant in reversed(tenants)]
    )
    await control.node.ReportUsage(report, metadata=as_node)
    await asyncio.gather(
        *(control.node.ReportUsage(report, metadata=as_node) for _ in range(8)),
        *(
            control.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name=f"tenants/{tenant}"), metadata=admin)
            for tenant in tenants
        ),
    )
    async with control.database.transaction() as session:
        assert (await session.execute(select(func.count()).select_from(models.NodeUsage))).scalar_one() == 0


async def test_a_broken_feed_connection_loses_no_change(control: Control, as_node: Metadata) -> None:
    await control.node.RegisterNode(register_request(), metadata=as_node)
    async with streaming(control, as_node) as stream:
        await stream.next()
        async with control.database.transaction() as session:
            broken = await session.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'saltern-control-policy-feed' AND datname = current_database()"
                )
            )
            assert broken.all() == [(True,)]
        await control.add_tenant("acme")
        await stream.next_with(lambda snapshot: len(snapshot.tenants) == 1)


async def test_draining_ends_streams_with_a_reason_to_come_back(control: Control, as_node: Metadata) -> None:
    await control.node.RegisterNode(register_request(), metadata=as_node)
    async with streaming(control, as_node) as stream:
        await stream.next()
        await control.plane.drain()
        error = await refused(stream.call.read())
    assert (type(error), error.reason) == (errors.UnavailableError, "DRAINING")
    assert error.retry_after_ms
