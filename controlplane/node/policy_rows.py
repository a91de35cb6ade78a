"""The rows that policies are composed of, read in one consistent view: of every tenant, or of those that changed.

Every administrative change raises ``policy_state.version`` in its own transaction. Version and content are read in one
REPEATABLE READ transaction, so what is composed of them holds exactly the changes up to its version: a node that has
applied version v serves nothing that v or an earlier version took away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.auth.signing_keys import load_key_set
from controlplane.db import Database, ServiceScope, ServiceTask, models
from controlplane.node.lease_rows import QuotaKey
from controlplane.node.namespace_leases import NamespaceKey
from saltern.names import NamespaceId, NodeId, TenantId
from tenants.quota import Tier
from tenants.tokens import KeySet

#: A change of more tenants than this goes out as a snapshot: a delta would save little.
DELTA_TENANTS_MAX: Final = 1_000
_SCOPE: Final = ServiceScope(ServiceTask.POLICY_SNAPSHOT)

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class SharedNamespace:
    """One member of a sharing group that has accepted."""

    group_uid: str
    epoch: int
    tenant: TenantId
    namespace: NamespaceId
    namespace_uid: str


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """The rows of one consistent view; policies of every node can be composed of them.

    Attributes:
        version: of the view.
        base_version: the version that ``changed`` counts from; None where the rows are of every tenant.
        changed: tenants of which the rows are; None for all. One that has no row was deleted.
        granted_bytes: what the newest policy grants, by node.
        namespace_granted_bytes: the same of namespaces' own limits, by namespace, then node; those that are leased.
        shared: every member of each sharing group that one of these tenants is in: peers are told of each other.
    """

    version: int
    base_version: int | None
    changed: frozenset[TenantId] | None
    tenants: list[models.Tenant]
    quotas: list[models.TierQuota]
    rates: list[models.RateLimits]
    namespaces: list[models.Namespace]
    salt_epochs: list[models.SaltEpoch]
    nodes: list[models.Node]
    granted_bytes: Mapping[NodeId, Mapping[QuotaKey, int]]
    namespace_granted_bytes: Mapping[NamespaceKey, Mapping[NodeId, int]]
    revocations: list[models.TokenRevocation]
    shared: list[SharedNamespace]
    key_set: KeySet


async def read_policy_rows(database: Database, base_version: int | None = None) -> PolicyRows:
    """Read what policies depend on, in one REPEATABLE READ transaction.

    Args:
        base_version: read only what changed after it, where that can be told; None for everything.
    """
    async with database.transaction(_SCOPE, isolation_level="REPEATABLE READ") as session:
        version = await read_version(session)
        changed = None if base_version is None else await _changed_since(session, base_version, version)
        rows = _Reader(session, changed)
        return PolicyRows(
            version=version,
            base_version=None if changed is None else base_version,
            changed=changed,
            tenants=await rows.of(models.Tenant, models.Tenant.id),
            quotas=await rows.of(models.TierQuota, models.TierQuota.tenant_id),
            rates=await rows.of(models.RateLimits, models.RateLimits.tenant_id),
            namespaces=await rows.of(models.Namespace, models.Namespace.tenant_id),
            salt_epochs=await rows.of(models.SaltEpoch, models.SaltEpoch.tenant_id),
            nodes=list(await session.scalars(select(models.Node))),
            granted_bytes=await rows.granted_bytes(),
            namespace_granted_bytes=await rows.namespace_granted_bytes(),
            revocations=await rows.of(models.TokenRevocation, models.TokenRevocation.tenant_id),
            shared=await rows.shared(),
            key_set=await load_key_set(session),
        )


async def read_version(session: AsyncSession) -> int:
    """The current policy version."""
    return (await session.execute(select(models.PolicyState.version))).scalar_one()


class _Reader:
    """Selects of one view, narrowed to the tenants that changed."""

    def __init__(self, session: AsyncSession, changed: frozenset[TenantId] | None) -> None:
        self._session = session
        self._names = None if changed is None else sorted(changed)

    async def of(self, kind: type[RowT], tenant_column: Any) -> list[RowT]:
        """The rows of one table of the tenants that changed; ``tenant_column`` says whose a row is."""
        statement = select(kind).order_by(tenant_column)
        if self._names is not None:
            statement = statement.where(tenant_column.in_(self._names))
        return list(await self._session.scalars(statement))

    async def shared(self) -> list[SharedNamespace]:
        group, member = models.SharingGroup, models.SharingGroupMember
        statement = (
            select(group.uid, group.epoch, member.tenant_id, member.namespace_id, member.namespace_uid)
            .join(member, member.group_uid == group.uid)
            .where(member.accept_time.is_not(None))
            .order_by(group.uid, member.accept_time, member.tenant_id, member.namespace_id)
        )
        if self._names is not None:
            concerned = select(member.group_uid).where(member.tenant_id.in_(self._names)).distinct()
            statement = statement.where(group.uid.in_(concerned))
        return [
            SharedNamespace(str(uid), epoch, TenantId(tenant), NamespaceId(namespace), str(namespace_uid))
            for uid, epoch, tenant, namespace, namespace_uid in await self._session.execute(statement)
        ]

    async def granted_bytes(self) -> dict[NodeId, dict[QuotaKey, int]]:
        lease = models.QuotaLease
        statement = select(lease.node_id, lease.tenant_id, lease.tier, lease.granted_bytes)
        if self._names is not None:
            statement = statement.where(lease.tenant_id.in_(self._names))
        granted: dict[NodeId, dict[QuotaKey, int]] = defaultdict(dict)
        for node, tenant, tier, granted_bytes in await self._session.execute(statement):
            granted[NodeId(node)][TenantId(tenant), Tier(tier)] = granted_bytes
        return granted

    async def namespace_granted_bytes(self) -> dict[NamespaceKey, dict[NodeId, int]]:
        lease = models.NamespaceLease
        statement = select(lease.tenant_id, lease.namespace_id, lease.tier, lease.node_id, lease.granted_bytes)
        if self._names is not None:
            statement = statement.where(lease.tenant_id.in_(self._names))
        granted: dict[NamespaceKey, dict[NodeId, int]] = defaultdict(dict)
        for tenant, namespace, tier, node, granted_bytes in await self._session.execute(statement):
            granted[TenantId(tenant), NamespaceId(namespace), Tier(tier)][NodeId(node)] = granted_bytes
        return granted


async def _changed_since(session: AsyncSession, base_version: int, version: int) -> frozenset[TenantId] | None:
    """Tenants that changed after ``base_version``; None where that may be any, or is too many to be worth it.

    Every version leaves one row. Where one is missing it was forgotten, or is of a process that does not write them.
    """
    change = models.PolicyChange
    rows = list(
        await session.scalars(select(change.tenant_id).where(change.version > base_version, change.version <= version))
    )
    if len(rows) != version - base_version or None in rows:
        return None
    changed = frozenset(TenantId(tenant) for tenant in rows if tenant is not None)
    return changed if len(changed) <= DELTA_TENANTS_MAX else None
