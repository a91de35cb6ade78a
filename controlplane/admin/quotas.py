"""QuotaService: what each tenant is promised, may hold and how fast, and that the promises fit the nodes (I4, I5)."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.etags import check_etag
from controlplane.admin.fields import refused
from controlplane.admin.resources import TIER_FROM_PROTO, to_quota
from controlplane.admin.service import AdminServicer, Change, load_tenant, method
from controlplane.caller import authorise
from controlplane.db.locks import lock_quotas
from controlplane.db.models import Node, NodeTierUsage
from controlplane.db.models import RateLimits as RateLimitsRow
from controlplane.db.models import TierQuota as TierQuotaRow
from controlplane.rpc import Context
from saltern.admin.v1 import quotas_pb2, quotas_pb2_grpc
from saltern.errors import FailedPreconditionError
from saltern.names import TenantId, parse_quota_name
from tenants.quota import WEIGHT_DEFAULT, RateLimits, Tier, TierQuota, check_reservations
from tenants.roles import Permission

_CAPACITY = {Tier.DRAM: Node.dram_capacity_bytes, Tier.SSD: Node.ssd_capacity_bytes}


class QuotaService(AdminServicer, quotas_pb2_grpc.QuotaServiceServicer):
    service = "saltern.admin.v1.QuotaService"

    @method
    async def GetQuota(self, request: quotas_pb2.GetQuotaRequest, context: Context) -> quotas_pb2.Quota:
        tenant = parse_quota_name(request.name)
        caller = authorise(Permission.QUOTAS_READ, tenant)
        async with self._database.transaction() as session:
            row = await load_tenant(session, tenant, caller)
            return to_quota(row, await _load_tiers(session, tenant), await session.get(RateLimitsRow, tenant))

    @method
    async def UpdateQuota(self, request: quotas_pb2.UpdateQuotaRequest, context: Context) -> quotas_pb2.Quota:
        tenant = parse_quota_name(request.quota.name)
        caller = authorise(Permission.QUOTAS_MANAGE, tenant)
        wanted_rates = _parse_rates(request.quota)
        wanted = _parse_tiers(request.quota.tiers, may_be_empty=wanted_rates is not None)

        async def act(session: AsyncSession, now: datetime) -> Change[quotas_pb2.Quota]:
            owner = await load_tenant(session, tenant, caller, change=True)
            # Two changes at a time could each fit and together pass the capacity (I5).
            await lock_quotas(session)
            rows = await _load_tiers(session, tenant)
            rates = await session.get(RateLimitsRow, tenant)
            before = to_quota(owner, rows, rates)
            check_etag(request.quota.etag, before.etag, before.name)
            for row in rows:
                if (quota := wanted.get(row.tier)) is None:
                    continue
                if quota.reserved_bytes > row.reserved_bytes:
                    await _check_capacity(session, tenant, row.tier, quota.reserved_bytes)
                if quota.limit_bytes < row.limit_bytes and not request.allow_below_use:
                    await _check_use(session, tenant, row.tier, quota.limit_bytes)
                row.reserved_bytes, row.limit_bytes, row.weight = quota.reserved_bytes, quota.limit_bytes, quota.weight
                row.update_time = now
                row.revision += 1
            if wanted_rates is not None:
                rates = _set_rates(session, tenant, rates, wanted_rates, now)
            after = to_quota(owner, rows, rates)
            return Change(tenant=tenant, resource=after.name, response=after, before=before, after=after)

        return await self._change("UpdateQuota", request, quotas_pb2.Quota, act)


def _parse_rates(quota: quotas_pb2.Quota) -> RateLimits | None:
    """The rates to set, or None where the request has none; raises InvalidArgumentError: QUOTA_OUT_OF_RANGE."""
    if not quota.HasField("rates"):
        return None
    rates = quota.rates
    return RateLimits(
        operations_per_s=rates.operations_per_s,
        bytes_per_s=rates.bytes_per_s,
        ssd_write_bytes_per_s=rates.ssd_write_bytes_per_s,
    )


def _set_rates(
    session: AsyncSession, tenant: TenantId, row: RateLimitsRow | None, rates: RateLimits, now: datetime
) -> RateLimitsRow:
    if row is None:
        row = RateLimitsRow(tenant_id=tenant, revision=0)
        session.add(row)
    row.operations_per_s = rates.operations_per_s
    row.bytes_per_s = rates.bytes_per_s
    row.ssd_write_bytes_per_s = rates.ssd_write_bytes_per_s
    row.update_time = now
    row.revision += 1
    return row


def _parse_tiers(tiers: Sequence[quotas_pb2.TierQuota], *, may_be_empty: bool) -> Mapping[Tier, TierQuota]:
    if not (0 if may_be_empty else 1) <= len(tiers) <= len(Tier):
        raise refused("quota.tiers", f"lists {len(tiers)} tiers", "list each tier to change once, or give rates")
    parsed: dict[Tier, TierQuota] = {}
    for wanted in tiers:
        tier = TIER_FROM_PROTO.get(wanted.tier)
        if tier is None:
            raise refused("quota.tiers.tier", f"{wanted.tier} is no tier", "give TIER_DRAM or TIER_SSD")
        if tier in parsed:
            raise refused("quota.tiers", f"lists the tier {tier.value} twice", "list each tier once")
        parsed[tier] = TierQuota(
            reserved_bytes=wanted.reserved_bytes,
            limit_bytes=wanted.limit_bytes,
            weight=wanted.weight or WEIGHT_DEFAULT,
        )
    return parsed


async def _load_tiers(session: AsyncSession, tenant: TenantId) -> Sequence[TierQuotaRow]:
    """Every tier of the tenant; a tenant has one row for each from its creation on."""
    statement = select(TierQuotaRow).where(TierQuotaRow.tenant_id == tenant).order_by(TierQuotaRow.tier)
    rows = (await session.scalars(statement)).all()
    assert [row.tier for row in rows] == sorted(Tier), f"{tenant} lacks the quota of a tier"
    return rows


async def _check_capacity(session: AsyncSession, tenant: TenantId, tier: Tier, reserved_bytes: int) -> None:
    """I5: with this reservation the sum over all tenants must fit what the nodes have, lost ones by their last report.

    Before the first node registers there is no capacity to compare with, and an operator sets up tenants first: then
    every reservation is taken. A reservation that does not grow is taken too, or the loss of a node would keep an
    operator from lowering one step by step.
    """
    nodes = select(func.count(), func.coalesce(func.sum(_CAPACITY[tier]), 0)).select_from(Node)
    node_count, capacity_bytes = (await session.execute(nodes)).one()
    if node_count == 0:
        return
    others = select(TierQuotaRow.reserved_bytes).where(TierQuotaRow.tenant_id != tenant, TierQuotaRow.tier == tier)
    check_reservations([reserved_bytes, *await session.scalars(others)], int(capacity_bytes), tier)


async def _check_use(session: AsyncSession, tenant: TenantId, tier: Tier, limit_bytes: int) -> None:
    use = select(func.coalesce(func.sum(NodeTierUsage.used_bytes), 0)).where(
        NodeTierUsage.tenant_id == tenant, NodeTierUsage.tier == tier
    )
    used_bytes = int((await session.execute(use)).scalar_one())
    if used_bytes > limit_bytes:
        raise FailedPreconditionError(
            f"the {tier.value} limit of {limit_bytes} bytes is below the {used_bytes} bytes that {tenant} holds",
            reason="LIMIT_BELOW_USE",
            hint="choose a higher limit, or set allow_below_use: nodes then evict the tenant's entries down to it",
            metadata={
                "tenant": tenant,
                "tier": tier.value,
                "used_bytes": str(used_bytes),
                "limit_bytes": str(limit_bytes),
            },
        )
