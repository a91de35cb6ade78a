from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.db import models
from controlplane.db.models import USAGE_COUNTERS
from saltern.admin.v1 import quotas_pb2, usage_pb2
from tenants.quota import Tier
from tests.support.admin import GIB, PLATFORM, Admin, admin_of


async def report(
    admin: Admin,
    node: str,
    tenant: str,
    used_bytes: int,
    count: int,
    report_time: datetime,
    maps: dict[str, Any] | None = None,
) -> None:
    async with admin.database.transaction() as session:
        session.add(
            models.NodeTierUsage(
                node_id=node,
                tenant_id=tenant,
                tier=Tier.DRAM,
                used_bytes=used_bytes,
                entries=count,
                lent_bytes=count,
                borrowed_bytes=count,
            )
        )
        session.add(
            models.NodeUsage(
                node_id=node,
                tenant_id=tenant,
                report_time=report_time,
                **dict.fromkeys(USAGE_COUNTERS, count),
                **maps or {},
            )
        )


async def usage_of(admin: Admin, tenant: str) -> usage_pb2.Usage:
    request = usage_pb2.GetUsageRequest(tenant=f"tenants/{tenant}")
    usage: usage_pb2.Usage = await admin.usage.GetUsage(request, metadata=admin_of(tenant))
    return usage


async def test_i8_usage_is_the_sum_over_nodes_of_this_tenant_alone(admin: Admin) -> None:
    for tenant in ("acme", "other"):
        await admin.create_tenant(tenant)
    await admin.set_quota("acme", reserved_bytes=GIB, limit_bytes=4 * GIB)
    early, late = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    for node in ("n1", "n2"):
        await admin.register_node(node, 8 * GIB)
    await report(admin, "n1", "acme", GIB, 3, late)
    await report(admin, "n2", "acme", 2 * GIB, 4, early)
    await report(admin, "n1", "other", 7, 7, early)

    usage = await usage_of(admin, "acme")

    dram, ssd = usage.tiers
    assert (dram.tier, dram.used_bytes, dram.entries) == (quotas_pb2.TIER_DRAM, 3 * GIB, 7)
    assert (dram.reserved_bytes, dram.limit_bytes) == (GIB, 4 * GIB)
    assert (ssd.tier, ssd.used_bytes, ssd.limit_bytes) == (quotas_pb2.TIER_SSD, 0, 0)
    assert (dram.lent_bytes, dram.borrowed_bytes) == (7, 7)
    assert {name: getattr(usage, name) for name in USAGE_COUNTERS} == dict.fromkeys(USAGE_COUNTERS, 7)
    assert not usage.evictions_by_cause and not usage.refused_by_reason and not usage.HasField("ssd")
    assert usage.report_time.ToDatetime(UTC) == early


async def test_counters_by_name_are_summed_name_by_name(admin: Admin) -> None:
    await admin.create_tenant("acme")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for node in ("n1", "n2", "n3"):
        await admin.register_node(node, GIB)
    first: dict[str, Any] = {
        "evictions_by_cause": {"neighbour": 1, "own-limit": 2},
        "evicted_bytes_by_cause": {"neighbour": 10, "own-limit": 20},
        "refused_by_reason": {"QUOTA_EXCEEDED": 2**63 - 1},
        "ssd": {"reads": 3, "demotions": 4, "of_a_later_version": 5},
    }
    await report(admin, "n1", "acme", 0, 0, now, first)
    await report(admin, "n2", "acme", 0, 0, now, {**first, "evictions_by_cause": {"quota": 7, "neighbour": 1}})
    await report(admin, "n3", "acme", 0, 0, now)  # without an SSD tier

    usage = await usage_of(admin, "acme")

    assert dict(usage.evictions_by_cause) == {"neighbour": 2, "own-limit": 2, "quota": 7}
    assert dict(usage.evicted_bytes_by_cause) == {"neighbour": 20, "own-limit": 40}
    assert dict(usage.refused_by_reason) == {"QUOTA_EXCEEDED": 2**63 - 1}
    assert usage.ssd == usage_pb2.SsdActivity(reads=6, demotions=8)


async def test_a_tenant_without_a_report_has_no_usage_and_no_report_time(admin: Admin) -> None:
    await admin.create_tenant("acme")

    usage = await usage_of(admin, "acme")

    assert [tier.used_bytes for tier in usage.tiers] == [0, 0]
    assert not usage.HasField("report_time")


async def test_sums_past_64_bits_stay_at_the_largest_number(admin: Admin) -> None:
    await admin.create_tenant("acme")
    for node in ("n1", "n2"):
        await admin.register_node(node, GIB)
        await report(admin, node, "acme", 2**63 - 1, 2**63 - 1, datetime(2026, 1, 1, tzinfo=UTC))

    usage = await usage_of(admin, "acme")

    assert usage.tiers[0].used_bytes == 2**63 - 1
    assert usage.get_hits == 2**63 - 1


async def test_nodes_that_stopped_reporting_are_lost(admin: Admin) -> None:
    now = admin.clock.now
    await admin.register_node("n1", GIB, last_report_time=now)
    await admin.register_node("n2", GIB, last_report_time=now - timedelta(seconds=16))

    answer = await admin.usage.ListNodes(usage_pb2.ListNodesRequest(), metadata=PLATFORM)

    assert [(node.name, node.state) for node in answer.nodes] == [
        ("nodes/n1", usage_pb2.Node.STATE_LIVE),
        ("nodes/n2", usage_pb2.Node.STATE_LOST),
    ]
    assert answer.nodes[0].dram_capacity_bytes == GIB
    first = await admin.usage.ListNodes(usage_pb2.ListNodesRequest(page_size=1), metadata=PLATFORM)
    second = await admin.usage.ListNodes(
        usage_pb2.ListNodesRequest(page_size=1, page_token=first.next_page_token), metadata=PLATFORM
    )
    assert [node.name for node in (*first.nodes, *second.nodes)] == ["nodes/n1", "nodes/n2"]
