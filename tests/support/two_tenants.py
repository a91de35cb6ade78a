"""Two tenants with a row each in every table of tenants, as a hostile neighbour would like to find them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid5

from sqlalchemy import update

from controlplane.db import Database, PlatformScope, models
from controlplane.db.models.metering import RECORD_COUNTERS, RECORD_INTEGRALS, RECORD_MAPS
from saltern.keys import SaltScope
from tenants.policy import TenantState
from tenants.quota import Tier
from tenants.roles import Role

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OWN, OTHER = "acme", "other"
LOOKUPS = {OWN: "a" * 16, OTHER: "b" * 16}
COUNTERS_ID = "c" * 32
_NAMES = UUID(int=0)


def uid_of(tenant: str, what: str) -> UUID:
    return uuid5(_NAMES, f"{tenant} {what}")


def rows_of(tenant: str) -> list[models.Base]:
    """One row for each table, parents first."""
    return [
        models.Tenant(
            id=tenant,
            uid=uid_of(tenant, "tenant"),
            display_name=f"secret of {tenant}",
            state=TenantState.ACTIVE,
            min_issue_time=NOW,
            first_audit_sequence=1,
            create_time=NOW,
            update_time=NOW,
        ),
        models.Namespace(
            tenant_id=tenant,
            id="chat",
            uid=uid_of(tenant, "namespace"),
            model_fingerprint=f"model of {tenant}",
            block_tokens=16,
            block_bytes=4096,
            create_time=NOW,
        ),
        models.TierQuota(
            tenant_id=tenant, tier=Tier.DRAM, reserved_bytes=1, limit_bytes=2, weight=100, update_time=NOW
        ),
        models.RateLimits(
            tenant_id=tenant, operations_per_s=1, bytes_per_s=1, ssd_write_bytes_per_s=1, update_time=NOW
        ),
        models.SaltPolicy(tenant_id=tenant, scope=SaltScope.TENANT, epoch=1, update_time=NOW),
        models.SaltEpoch(tenant_id=tenant, epoch=1, wrapped_root_secret=tenant.encode(), create_time=NOW),
        models.SharingGroup(
            uid=uid_of(tenant, "group"),
            tenant_id=tenant,
            id="research",
            model_fingerprint=f"model of {tenant}",
            block_tokens=16,
            block_bytes=4096,
            epoch=1,
            wrapped_root_secret=tenant.encode(),
            create_time=NOW,
        ),
        models.SharingGroupMember(
            group_uid=uid_of(tenant, "group"),
            tenant_id=tenant,
            namespace_id="chat",
            namespace_uid=uid_of(tenant, "namespace"),
            invite_time=NOW,
            accept_time=NOW,
        ),
        models.ApiKey(
            uid=uid_of(tenant, "key"),
            tenant_id=tenant,
            id="ci",
            lookup=LOOKUPS[tenant],
            secret_sha256=bytes(32),
            role=Role.WRITER,
            display_name="",
            created_by="",
            create_time=NOW,
        ),
        models.TokenRevocation(
            uid=uid_of(tenant, "revocation"),
            tenant_id=tenant,
            token_id_prefix=LOOKUPS[tenant],
            issued_before_s=1,
            revoke_time=NOW,
            expire_time=NOW + timedelta(hours=1),
        ),
        models.NodeUsage(
            node_id="node-1",
            tenant_id=tenant,
            report_time=NOW,
            **dict.fromkeys(models.USAGE_COUNTERS, 1),
        ),
        models.NodeTierUsage(node_id="node-1", tenant_id=tenant, tier=Tier.DRAM, used_bytes=1, entries=1),
        models.NamespaceLease(
            tenant_id=tenant,
            namespace_id="chat",
            tier=Tier.DRAM,
            node_id="node-1",
            granted_bytes=1,
            believed_bytes=1,
            target_bytes=1,
            version=1,
        ),
        models.Meter(
            counters_id=COUNTERS_ID,
            tenant_id=tenant,
            tenant_uid=uid_of(tenant, "tenant"),
            namespace_uid="",
            namespace_id="",
            since=NOW,
            dram_bytes=1,
            ssd_bytes=1,
            counters={"hits": 1},
        ),
        models.OpenUsage(
            hour=NOW,
            tenant_id=tenant,
            tenant_uid=uid_of(tenant, "tenant"),
            namespace_id="",
            counters_id=COUNTERS_ID,
            totals={"hits": 1},
        ),
        models.UsageRecord(
            tenant_id=tenant,
            hour=NOW,
            tenant_uid=uid_of(tenant, "tenant"),
            namespace_id="",
            **dict.fromkeys((*RECORD_INTEGRALS, *RECORD_COUNTERS), 1),
            **{name: {} for name in RECORD_MAPS},
        ),
        models.AuditEvent(
            chain=tenant,
            sequence=1,
            event_time=NOW,
            actor=f"tenants/{tenant}/apiKeys/ci",
            method="S/M",
            resource=f"tenants/{tenant}",
            outcome=models.AuditOutcome.SUCCESS,
            reason="",
            request_id="",
            previous_hash=bytes(32),
            hash=bytes(32),
        ),
        models.RequestLog(
            actor=f"tenants/{tenant}/apiKeys/ci",
            method="S/M",
            request_id=uid_of(tenant, "request"),
            request_sha256=bytes(32),
            response=f"answer to {tenant}".encode(),
            create_time=NOW,
        ),
    ]


#: The tables that ``add_two_tenants`` fills.
FILLED = frozenset(row.__tablename__ for row in rows_of(OWN))


async def add_two_tenants(database: Database) -> None:
    """Fill the tables for ``OWN`` and ``OTHER``, and add the platform's own rows beside them."""
    async with database.transaction(PlatformScope()) as session:
        session.add(
            models.Node(
                id="node-1",
                wire_endpoint="",
                shm_path="",
                grpc_endpoint="",
                host_id="",
                dram_capacity_bytes=1,
                software_version="",
                register_time=NOW,
                last_report_time=NOW,
            )
        )
        session.add(
            models.ApiKey(
                id="admin",
                lookup="c" * 16,
                secret_sha256=bytes(32),
                role=Role.PLATFORM_ADMIN,
                display_name="",
                created_by="",
                create_time=NOW,
            )
        )
        session.add(
            models.MeteredProcess(
                counters_id=COUNTERS_ID,
                node_id="node-1",
                sequence=1,
                report_time=NOW,
                write_id=uid_of("platform", "write"),
            )
        )
        # Records of an hour are inserted when it closes.
        closed_until = NOW + timedelta(hours=1)
        await session.execute(
            update(models.MeteringState).values(
                closed_from=models.MeteringState.closed_until, closed_until=closed_until
            )
        )
        for tenant in (OWN, OTHER):
            for row in rows_of(tenant):
                session.add(row)
                await session.flush()
