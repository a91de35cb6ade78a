"""A deployment with a past, for pages to show: a month of usage, nodes with leases, keys, groups, audit events."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, Final

import psycopg
from sqlalchemy import select

from controlplane.db import models
from saltern.admin.v1 import (
    credentials_pb2,
    quotas_pb2,
    sharing_groups_pb2,
    sharing_groups_pb2_grpc,
    tenants_pb2,
)
from tenants.quota import Tier
from tests.support.control import Control, text_of

GIB: Final = 2**30
NODES: Final = ("node-1", "node-2", "node-3")
#: Name of a tenant, its description, its share of the traffic, its limit and reservation of DRAM.
TENANTS: Final = (
    ("acme", "Acme Robotics, production", 1.0, 96 * GIB, 48 * GIB),
    ("beta", "Beta Health", 0.55, 64 * GIB, 32 * GIB),
    ("gamma", "Gamma Search, nightly batches", 0.2, 32 * GIB, 0),
)


async def fill(control: Control, now: datetime) -> dict[str, str]:
    """Fill a deployment whose administrator is known; returns secrets of keys by ``tenant/key``, and ``platform``."""
    with psycopg.connect(text_of(control.owner_url.set(drivername="postgresql")), autocommit=True) as owner:
        # Hours are closed once and never written again; here a past is made up.
        owner.execute("ALTER TABLE usage_records DISABLE TRIGGER USER")
        try:
            return await _fill(control, now)
        finally:
            owner.execute("ALTER TABLE usage_records ENABLE TRIGGER USER")


async def _fill(control: Control, now: datetime) -> dict[str, str]:
    secrets = {"platform": control.admin_key}
    metadata = await control.bearer(control.admin_key)
    await _add_nodes(control, now)
    for tenant, display_name, share, limit, reserved in TENANTS:
        await control.add_tenant(tenant, "chat", "code")
        body = tenants_pb2.Tenant(name=f"tenants/{tenant}", display_name=display_name)
        await control.tenants.UpdateTenant(tenants_pb2.UpdateTenantRequest(tenant=body), metadata=metadata)
        await _set_quota(control, tenant, limit, reserved, metadata)
        for role in (credentials_pb2.ROLE_TENANT_ADMIN, credentials_pb2.ROLE_TENANT_AUDITOR):
            name = credentials_pb2.Role.Name(role).removeprefix("ROLE_TENANT_").lower()
            secrets[f"{tenant}/{name}"] = await control.add_api_key(role, tenant, name)
        for key in ("prod-writer", "eval-reader"):
            role = credentials_pb2.ROLE_WRITER if key.endswith("writer") else credentials_pb2.ROLE_READER
            expire = now + timedelta(days=4) if key == "eval-reader" else None
            secrets[f"{tenant}/{key}"] = await control.add_api_key(role, tenant, key, expire)
        await _add_usage(control, tenant, share, limit, reserved, now)
    await control.set_salt("acme", grace_period=timedelta(days=7))
    await control.rotate_salt("acme")
    await _share(control, metadata)
    return secrets


async def _share(control: Control, metadata: Any) -> None:
    groups: Any = sharing_groups_pb2_grpc.SharingGroupServiceStub(control.channel)
    for group, owner in (("prompts", "acme"), ("manuals", "beta")):
        created = sharing_groups_pb2.CreateSharingGroupRequest(
            parent=f"tenants/{owner}", sharing_group_id=group, namespace=f"tenants/{owner}/namespaces/chat"
        )
        await groups.CreateSharingGroup(created, metadata=metadata)
        for guest in ("acme", "beta", "gamma"):
            if guest == owner:
                continue
            member = f"tenants/{guest}/namespaces/chat"
            name = f"tenants/{owner}/sharingGroups/{group}"
            await groups.InviteMember(
                sharing_groups_pb2.InviteMemberRequest(name=name, namespace=member), metadata=metadata
            )
            if guest == "beta":
                await groups.AcceptInvitation(
                    sharing_groups_pb2.AcceptInvitationRequest(name=name, namespace=member), metadata=metadata
                )


async def _set_quota(control: Control, tenant: str, limit: int, reserved: int, metadata: Any) -> None:
    tiers = [
        quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=limit, reserved_bytes=reserved),
        quotas_pb2.TierQuota(tier=quotas_pb2.TIER_SSD, limit_bytes=8 * limit),
    ]
    quota = quotas_pb2.Quota(name=f"tenants/{tenant}/quota", tiers=tiers)
    await control.quotas.UpdateQuota(quotas_pb2.UpdateQuotaRequest(quota=quota), metadata=metadata)


async def _add_nodes(control: Control, now: datetime) -> None:
    async with control.database.transaction() as session:
        version = await session.scalar(select(models.PolicyState.version)) or 0
        for number, node in enumerate(NODES):
            session.add(
                models.Node(
                    id=node,
                    wire_endpoint=f"10.0.0.{number + 1}:7701",
                    shm_path="",
                    grpc_endpoint=f"10.0.0.{number + 1}:7702",
                    host_id=node,
                    dram_capacity_bytes=96 * GIB,
                    ssd_capacity_bytes=1024 * GIB,
                    software_version="0.1.0",
                    register_time=now - timedelta(days=40),
                    last_report_time=now + timedelta(minutes=5),
                    applied_version=version,
                    settled_version=version,
                    fencing_epoch=number + 1,
                    lease_expire_time=now + timedelta(minutes=9),
                )
            )


async def _add_usage(control: Control, tenant: str, share: float, limit: int, reserved: int, now: datetime) -> None:
    random = Random(tenant)
    async with control.database.transaction() as session:
        uid = await session.scalar(select(models.Tenant.uid).where(models.Tenant.id == tenant))
        hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        for back in range(1, 32 * 24):
            session.add(_hour(tenant, uid, hour - timedelta(hours=back), share, limit, random))
        for node in NODES:
            causes = {"soft-mark": int(41_000 * share), "own-limit": int(2_300 * share), "neighbour": int(900 * share)}
            session.add(
                models.NodeUsage(
                    node_id=node,
                    tenant_id=tenant,
                    get_hits=int(880_000 * share),
                    get_misses=int(90_000 * share),
                    get_bytes=int(4e12 * share),
                    put_bytes=int(5e11 * share),
                    puts_stored=int(95_000 * share),
                    puts_refused=int(310 * share),
                    evictions=sum(causes.values()),
                    evicted_bytes=sum(causes.values()) * 2**20,
                    report_time=now - timedelta(seconds=2),
                    evictions_by_cause=causes,
                    evicted_bytes_by_cause={cause: count * 2**20 for cause, count in causes.items()},
                    refused_by_reason={"QUOTA_EXCEEDED": int(280 * share), "RATE_LIMITED": int(30 * share)},
                    ssd={
                        "reads": int(12_000 * share),
                        "read_bytes": int(12e9 * share),
                        "demotions": int(38_000 * share),
                    },
                )
            )
            for tier, part in ((Tier.DRAM, 0.94 if tenant == "beta" else 0.71), (Tier.SSD, 0.38)):
                used = int((limit if tier is Tier.DRAM else 8 * limit) * part / len(NODES))
                session.add(
                    models.NodeTierUsage(
                        node_id=node,
                        tenant_id=tenant,
                        tier=tier,
                        used_bytes=used,
                        entries=used // 2**20,
                        borrowed_bytes=max(used - reserved // len(NODES), 0) if tier is Tier.DRAM else 0,
                    )
                )


def _hour(tenant: str, uid: Any, hour: datetime, share: float, limit: int, random: Random) -> models.UsageRecord:
    """Busy by day, quiet by night and at weekends."""
    busy = (0.25 + 0.75 * max(0.0, 1 - abs(hour.hour - 14) / 8)) * (0.5 if hour.weekday() > 4 else 1.0)
    asked = int(60_000 * share * busy * random.uniform(0.85, 1.15))
    hits = int(asked * min(0.97, 0.86 + 0.1 * busy * random.uniform(0.8, 1.1)))
    causes = {
        "soft-mark": int(900 * busy * share * random.uniform(0.7, 1.3)),
        "own-limit": int(70 * busy * random.uniform(0.0, 1.5)) if busy > 0.7 else 0,
        "neighbour": int(40 * busy * random.uniform(0.0, 2.0)) if busy > 0.8 else 0,
    }
    refused = int(14 * random.uniform(0, 1)) if busy > 0.85 else 0
    return models.UsageRecord(
        tenant_id=tenant,
        hour=hour,
        tenant_uid=uid,
        namespace_id="",
        dram_byte_seconds=int(limit * 0.7 * busy) * 3600,
        ssd_byte_seconds=int(limit * 3) * 3600,
        hits=hits,
        misses=asked - hits,
        tokens_saved=hits * 16,
        read_bytes=hits * 2**18,
        stored_bytes=(asked - hits) * 2**18,
        puts_stored=asked - hits,
        puts_refused=refused,
        evictions=sum(causes.values()),
        evicted_bytes=sum(causes.values()) * 2**20,
        ssd_read_bytes=0,
        ssd_written_bytes=0,
        gap_seconds=0,
        late_seconds=0,
        puts_refused_by_reason={"QUOTA_EXCEEDED": refused} if refused else {},
        evictions_by_cause={cause: count for cause, count in causes.items() if count},
    )
