from __future__ import annotations

import asyncio

from sqlalchemy import func, select

from controlplane.db import models
from saltern.admin.v1 import quotas_pb2
from saltern.errors import AbortedError, FailedPreconditionError, InvalidArgumentError
from tenants.quota import Tier
from tests.support.admin import GIB, PLATFORM, Admin, quota_request, refused


async def test_a_quota_is_set_for_the_listed_tier_only(admin: Admin) -> None:
    await admin.create_tenant("acme")
    before = await admin.quotas.GetQuota(quotas_pb2.GetQuotaRequest(name="tenants/acme/quota"), metadata=PLATFORM)

    quota = await admin.set_quota("acme", reserved_bytes=GIB, limit_bytes=2 * GIB, weight=200)

    assert [(t.tier, t.reserved_bytes, t.limit_bytes, t.weight) for t in quota.tiers] == [
        (quotas_pb2.TIER_DRAM, GIB, 2 * GIB, 200),
        (quotas_pb2.TIER_SSD, 0, 0, 100),
    ]
    assert quota.etag != before.etag
    assert quota == await admin.quotas.GetQuota(
        quotas_pb2.GetQuotaRequest(name="tenants/acme/quota"), metadata=PLATFORM
    )


async def test_i5_reservations_above_the_capacity_of_the_nodes_are_refused(admin: Admin) -> None:
    await admin.create_tenant("a")
    await admin.create_tenant("b")
    await admin.register_node("n1", 3 * GIB)
    await admin.register_node("n2", 2 * GIB)
    await admin.set_quota("a", reserved_bytes=3 * GIB, limit_bytes=8 * GIB)
    await admin.set_quota("b", reserved_bytes=2 * GIB, limit_bytes=8 * GIB)  # to the byte

    error = await refused(admin.set_quota("b", reserved_bytes=2 * GIB + 1, limit_bytes=8 * GIB))

    assert isinstance(error, FailedPreconditionError) and error.reason == "RESERVATIONS_ABOVE_CAPACITY"
    assert error.metadata["capacity_bytes"] == str(5 * GIB)
    assert error.metadata["reserved_bytes"] == str(5 * GIB + 1)
    async with admin.database.transaction() as session:
        row = await session.get_one(models.TierQuota, ("b", Tier.DRAM))
    assert row.reserved_bytes == 2 * GIB


async def test_i5_holds_when_reservations_are_made_at_a_time(admin: Admin) -> None:
    """Each of eight fits alone, any two fit, three do not: without the lock most of them would pass the check."""
    await admin.register_node("n1", 10 * GIB)
    tenants = [f"t{number}" for number in range(8)]
    for tenant in tenants:
        await admin.create_tenant(tenant)

    outcomes = await asyncio.gather(
        *(admin.set_quota(tenant, reserved_bytes=4 * GIB, limit_bytes=4 * GIB) for tenant in tenants),
        return_exceptions=True,
    )

    assert sum(isinstance(outcome, quotas_pb2.Quota) for outcome in outcomes) == 2
    async with admin.database.transaction() as session:
        assert await session.scalar(select(func.sum(models.TierQuota.reserved_bytes))) == 8 * GIB


async def test_i5_a_tier_that_no_node_has_cannot_be_reserved(admin: Admin) -> None:
    await admin.create_tenant("a")
    await admin.register_node("n1", GIB)

    error = await refused(admin.set_quota("a", reserved_bytes=1, limit_bytes=1, tier=quotas_pb2.TIER_SSD))

    assert error.reason == "RESERVATIONS_ABOVE_CAPACITY"


async def test_a_reservation_can_be_lowered_when_capacity_is_gone(admin: Admin) -> None:
    await admin.create_tenant("a")
    await admin.set_quota("a", reserved_bytes=4 * GIB, limit_bytes=4 * GIB)  # before the first node registers
    await admin.register_node("n1", GIB)

    quota = await admin.set_quota("a", reserved_bytes=2 * GIB, limit_bytes=4 * GIB)

    assert quota.tiers[0].reserved_bytes == 2 * GIB


async def test_i4_a_limit_below_use_is_refused_unless_allowed(admin: Admin) -> None:
    await admin.create_tenant("a")
    await admin.set_quota("a", limit_bytes=4 * GIB)
    for node in ("n1", "n2"):
        await admin.register_node(node, 4 * GIB)
        async with admin.database.transaction() as session:
            session.add(models.NodeTierUsage(node_id=node, tenant_id="a", tier=Tier.DRAM, used_bytes=GIB, entries=1))

    error = await refused(admin.set_quota("a", limit_bytes=2 * GIB - 1))

    assert isinstance(error, FailedPreconditionError) and error.reason == "LIMIT_BELOW_USE"
    assert error.metadata["used_bytes"] == str(2 * GIB)
    assert (await admin.set_quota("a", limit_bytes=2 * GIB)).tiers[0].limit_bytes == 2 * GIB
    assert (await admin.set_quota("a", limit_bytes=1, allow_below_use=True)).tiers[0].limit_bytes == 1


async def test_a_stale_etag_is_aborted(admin: Admin) -> None:
    await admin.create_tenant("a")
    first = await admin.set_quota("a", limit_bytes=1)
    await admin.set_quota("a", limit_bytes=2, etag=first.etag)

    error = await refused(admin.set_quota("a", limit_bytes=3, etag=first.etag))

    assert isinstance(error, AbortedError) and error.reason == "ETAG_MISMATCH"


OUT_OF_RANGE: list[dict[str, int]] = [
    {"reserved_bytes": 2, "limit_bytes": 1},
    {"reserved_bytes": -1, "limit_bytes": 1},
    {"limit_bytes": -1},
    {"limit_bytes": 2**53 + 1},
    {"limit_bytes": 2**63 - 1},
    {"reserved_bytes": -(2**63), "limit_bytes": 0},
    {"weight": -1},
    {"weight": 1001},
    {"weight": 2**31 - 1},
    {"tier": 0},
    {"tier": 3},
    {"tier": -1},
]


async def test_values_out_of_range_are_refused(admin: Admin) -> None:
    await admin.create_tenant("a")

    for values in OUT_OF_RANGE:
        error = await refused(admin.set_quota("a", **values))  # type: ignore[arg-type]

        assert isinstance(error, InvalidArgumentError), values
        assert error.hint


async def test_each_tier_is_listed_once(admin: Admin) -> None:
    await admin.create_tenant("a")
    for count in (0, 2, 3, 1000):
        request = quota_request("a", 0, 1)
        tier = request.quota.tiers.pop()
        request.quota.tiers.extend([tier] * count)

        error = await refused(admin.quotas.UpdateQuota(request, metadata=PLATFORM))

        assert isinstance(error, InvalidArgumentError)
