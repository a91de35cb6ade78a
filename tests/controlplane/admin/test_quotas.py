from __future__ import annotations

import asyncio

from sqlalchemy import func, select

from controlplane.db import models
from saltern.admin.v1 import quotas_pb2
from saltern.errors import AbortedError, FailedPreconditionError, InvalidArgumentError, PermissionDeniedError
from tenants.quota import RATE_MAX, Tier
from tests.support.admin import GIB, PLATFORM, Admin, admin_of, quota_request, refused


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


def rates_in(quota: quotas_pb2.Quota) -> tuple[int, int, int]:
    return quota.rates.operations_per_s, quota.rates.bytes_per_s, quota.rates.ssd_write_bytes_per_s


async def test_rates_and_tiers_are_set_apart_or_together(admin: Admin) -> None:
    created = await admin.create_tenant("acme")
    first = await admin.quotas.GetQuota(quotas_pb2.GetQuotaRequest(name="tenants/acme/quota"), metadata=PLATFORM)
    assert first.HasField("rates") and rates_in(first) == (0, 0, 0)
    tiers = (await admin.set_quota("acme", reserved_bytes=GIB, limit_bytes=2 * GIB)).tiers

    limited = await admin.set_rates("acme", 1000, GIB, 7)

    assert rates_in(limited) == (1000, GIB, 7)
    assert limited.tiers == tiers
    assert limited.update_time.ToNanoseconds() > created.update_time.ToNanoseconds()
    assert rates_in(await admin.set_quota("acme", limit_bytes=3 * GIB)) == (1000, GIB, 7)
    both = quota_request("acme", 0, 4 * GIB)
    both.quota.rates.operations_per_s = RATE_MAX
    changed = await admin.quotas.UpdateQuota(both, metadata=PLATFORM)
    assert rates_in(changed) == (RATE_MAX, 0, 0)
    assert changed.tiers[0].limit_bytes == 4 * GIB
    assert rates_in(await admin.set_rates("acme")) == (0, 0, 0)
    async with admin.database.transaction() as session:
        row = await session.get_one(models.RateLimits, "acme")
    assert (row.operations_per_s, row.revision) == (0, 3)


async def test_every_change_of_rates_changes_the_etag_and_guards_by_it(admin: Admin) -> None:
    await admin.create_tenant("acme")
    etags = [
        (await admin.quotas.GetQuota(quotas_pb2.GetQuotaRequest(name="tenants/acme/quota"), metadata=PLATFORM)).etag
    ]
    for operations_per_s in (1, 2, 2):
        etags.append((await admin.set_rates("acme", operations_per_s, etag=etags[-1])).etag)
    assert len(set(etags)) == len(etags)

    for stale in etags[:-1]:
        error = await refused(admin.set_rates("acme", 9, etag=stale))
        assert isinstance(error, AbortedError) and error.reason == "ETAG_MISMATCH"


async def test_rates_out_of_range_are_refused_whole(admin: Admin) -> None:
    await admin.create_tenant("acme")
    for position in range(3):
        for value in (-1, RATE_MAX + 1, 2**63 - 1, -(2**63)):
            rates = [1, 1, 1]
            rates[position] = value
            error = await refused(admin.set_rates("acme", *rates))
            assert isinstance(error, InvalidArgumentError) and error.reason == "QUOTA_OUT_OF_RANGE"
            assert error.hint
    nothing = quotas_pb2.UpdateQuotaRequest(quota=quotas_pb2.Quota(name="tenants/acme/quota"))
    assert isinstance(await refused(admin.quotas.UpdateQuota(nothing, metadata=PLATFORM)), InvalidArgumentError)
    async with admin.database.transaction() as session:
        assert await session.get(models.RateLimits, "acme") is None


async def test_i11_a_change_of_rates_is_one_event_with_both_states_and_one_policy_version(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.set_rates("acme", 10, 20, 30)
    version = await admin.policy_version()

    await admin.set_rates("acme", 11, 20, 30)

    event = (await admin.events("acme"))[-1]
    assert event.method == "saltern.admin.v1.QuotaService/UpdateQuota"
    assert event.resource == "tenants/acme/quota"
    assert event.before is not None and event.after is not None
    unchanged = {"bytes_per_s": "20", "ssd_write_bytes_per_s": "30"}
    assert event.before["rates"] == {"operations_per_s": "10", **unchanged}
    assert event.after["rates"] == {"operations_per_s": "11", **unchanged}
    assert await admin.policy_version() == version + 1
    assert await admin.chain_faults("acme") == []


async def test_a_tenants_own_admin_cannot_lift_its_rates(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.set_rates("acme", 10)

    error = await refused(admin.set_rates("acme", metadata=admin_of("acme")))

    assert isinstance(error, PermissionDeniedError) and error.reason == "ROLE_REQUIRED"
    request = quotas_pb2.GetQuotaRequest(name="tenants/acme/quota")
    assert rates_in(await admin.quotas.GetQuota(request, metadata=admin_of("acme"))) == (10, 0, 0)
    denied = (await admin.events("acme"))[-1]
    assert (denied.outcome, denied.resource) == ("denied", "tenants/acme/quota")


async def test_i12_a_tenant_of_the_same_name_does_not_inherit_rates(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.set_rates("acme", 10)
    await admin.delete_tenant("acme")
    await admin.create_tenant("acme")

    request = quotas_pb2.GetQuotaRequest(name="tenants/acme/quota")
    assert rates_in(await admin.quotas.GetQuota(request, metadata=PLATFORM)) == (0, 0, 0)
