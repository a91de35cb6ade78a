"""The rows that policies are composed of, read in one consistent view: of every tenant, or of those that changed.

Every administrative change raises ``policy_state.version`` in its own transaction. Version and content are read in one
REPEATABLE READ transaction, so what is composed of them holds exactly the changes up to its version: a node that has
applied version v serves nothing that v or an earlier version took away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

from sqlalchemy import ARRAY, Text, any_, bindparam, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.auth.signing_keys import load_key_set
from controlplane.db import Database, ServiceScope, ServiceTask, models
from controlplane.db.row_parts import in_parts
from controlplane.node.lease_rows import QuotaKey
from controlplane.node.namespace_leases import NamespaceKey
from saltern.names import NamespaceId, NodeId, TenantId
from tenants.policy import TenantState
from tenants.quota import Tier
from tenants.tokens import KeySet

#: A change of more tenants than this goes out as a snapshot: a delta would save little.
DELTA_TENANTS_MAX: Final = 1_000
#: Of every tenant's rows, fetched and made values in one go: some 10 ms of the event loop.
_ROWS_AT_ONCE: Final = 1_000
_SCOPE: Final = ServiceScope(ServiceTask.POLICY_SNAPSHOT)

RowT = TypeVar("RowT", bound=NamedTuple)


class TenantRow(NamedTuple):
    """Columns of ``models.Tenant`` that nodes are told of. Objects of the mapper would take three times as long."""

    id: TenantId
    uid: UUID
    state: TenantState
    min_issue_time: datetime


class QuotaRow(NamedTuple):
    """Columns of ``models.TierQuota``."""

    tenant_id: TenantId
    tier: Tier
    reserved_bytes: int
    limit_bytes: int
    weight: int


class RatesRow(NamedTuple):
    """Columns of ``models.RateLimits``."""

    tenant_id: TenantId
    operations_per_s: int
    bytes_per_s: int
    ssd_write_bytes_per_s: int


class NamespaceRow(NamedTuple):
    """Columns of ``models.Namespace``."""

    tenant_id: TenantId
    id: NamespaceId
    uid: UUID
    block_bytes: int
    block_tokens: int
    dram_limit_bytes: int | None
    ssd_limit_bytes: int | None

    @property
    def tier_limits(self) -> dict[Tier, int]:
        """Its limits in bytes; a tier that is not named has none."""
        limits = {Tier.DRAM: self.dram_limit_bytes, Tier.SSD: self.ssd_limit_bytes}
        return {tier: limit_bytes for tier, limit_bytes in limits.items() if limit_bytes is not None}


class SaltEpochRow(NamedTuple):
    """Columns of ``models.SaltEpoch``, none of which is a secret."""

    tenant_id: TenantId
    epoch: int


class RevocationRow(NamedTuple):
    """Columns of ``models.TokenRevocation``."""

    tenant_id: TenantId | None
    token_id_prefix: str
    issued_before_s: int


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
    tenants: list[TenantRow]
    quotas: list[QuotaRow]
    rates: list[RatesRow]
    namespaces: list[NamespaceRow]
    salt_epochs: list[SaltEpochRow]
    nodes: list[models.Node]
    granted_bytes: Mapping[NodeId, Mapping[QuotaKey, int]]
    namespace_granted_bytes: Mapping[NamespaceKey, Mapping[NodeId, int]]
    revocations: list[RevocationRow]
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
            tenants=await rows.of(TenantRow, models.Tenant, models.Tenant.id),
            quotas=await rows.of(QuotaRow, models.TierQuota, models.TierQuota.tenant_id),
            rates=await rows.of(RatesRow, models.RateLimits, models.RateLimits.tenant_id),
            namespaces=await rows.of(NamespaceRow, models.Namespace, models.Namespace.tenant_id),
            salt_epochs=await rows.of(SaltEpochRow, models.SaltEpoch, models.SaltEpoch.tenant_id),
            nodes=list(await session.scalars(select(models.Node))),
            granted_bytes=await rows.granted_bytes(),
            namespace_granted_bytes=await rows.namespace_granted_bytes(),
            revocations=await rows.of(RevocationRow, models.TokenRevocation, models.TokenRevocation.tenant_id),
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

    async def of(self, kind: type[RowT], model: type[Any], tenant_column: Any) -> list[RowT]:
        """Columns of one table, of the tenants that changed; ``tenant_column`` says whose a row is."""
        statement = select(*(getattr(model, name) for name in kind._fields)).order_by(tenant_column)
        return [kind._make(row) async for part in self._parts(statement, tenant_column) for row in part]

    async def _parts(self, statement: Any, tenant_column: Any) -> AsyncIterator[Sequence[Any]]:
        """The rows of the tenants that changed; or of all in parts, between which others have the event loop."""
        if self._names is not None:
            yield (await self._session.execute(self._narrowed(statement, tenant_column))).all()
            return
        async for part in in_parts(self._session, statement, _ROWS_AT_ONCE):
            yield part

    def _narrowed(self, statement: Any, tenant_column: Any) -> Any:
        if self._names is None:
            return statement
        # One array, not a parameter for each name: the statement is the same for any number of them.
        return statement.where(tenant_column == any_(bindparam("names", self._names, ARRAY(Text))))

    async def shared(self) -> list[SharedNamespace]:
        group, member = models.SharingGroup, models.SharingGroupMember
        statement = (
            select(group.uid, group.epoch, member.tenant_id, member.namespace_id, member.namespace_uid)
            .join(member, member.group_uid == group.uid)
            .where(member.accept_time.is_not(None))
            .order_by(group.uid, member.accept_time, member.tenant_id, member.namespace_id)
        )
        if self._names is not None:
            concerned = self._narrowed(select(member.group_uid), member.tenant_id).distinct()
            statement = statement.where(group.uid.in_(concerned))
        return [
            SharedNamespace(str(uid), epoch, TenantId(tenant), NamespaceId(namespace), str(namespace_uid))
            for uid, epoch, tenant, namespace, namespace_uid in await self._session.execute(statement)
        ]

    async def granted_bytes(self) -> dict[NodeId, dict[QuotaKey, int]]:
        lease = models.QuotaLease
        statement = select(lease.node_id, lease.tenant_id, lease.tier, lease.granted_bytes)
        granted: dict[NodeId, dict[QuotaKey, int]] = defaultdict(dict)
        async for part in self._parts(statement, lease.tenant_id):
            for node, tenant, tier, granted_bytes in part:
                granted[node][tenant, tier] = granted_bytes
        return granted

    async def namespace_granted_bytes(self) -> dict[NamespaceKey, dict[NodeId, int]]:
        lease = models.NamespaceLease
        statement = select(lease.tenant_id, lease.namespace_id, lease.tier, lease.node_id, lease.granted_bytes)
        granted: dict[NamespaceKey, dict[NodeId, int]] = defaultdict(dict)
        for tenant, namespace, tier, node, granted_bytes in await self._session.execute(
            self._narrowed(statement, lease.tenant_id)
        ):
            granted[TenantId(tenant), NamespaceId(namespace), Tier(tier)][NodeId(node)] = granted_bytes
        return granted


async def _changed_since(session: AsyncSession, base_version: int, version: int) -> frozenset[TenantId] | None:
    """Tenants that changed after ``base_version``; None where that may be any, or is too many to be worth it.

    Every version leaves one row. Where one is missing it was forgotten, or is of a process that does not write them.
    """
    change = models.PolicyChange
    rows = list(
        await session.execute(
            select(change.tenant_id, change.concern).where(change.version > base_version, change.version <= version)
        )
    )
    if len(rows) != version - base_version or (None, None) in rows:
        return None
    changed = {TenantId(tenant) for tenant, _ in rows if tenant is not None}
    if len(changed) <= DELTA_TENANTS_MAX and any(concern == models.Concern.MEMBERS for _, concern in rows):
        changed |= await _split_by_capacity(session)
    return frozenset(changed) if len(changed) <= DELTA_TENANTS_MAX else None


async def _split_by_capacity(session: AsyncSession) -> set[TenantId]:
    """Tenants whose parts of policies change with the nodes that there are, before their leases have followed; of more
    than ``DELTA_TENANTS_MAX`` one more than those."""
    quota, rates = models.TierQuota, models.RateLimits
    reserve = select(quota.tenant_id).where(quota.reserved_bytes > 0)
    limit = select(rates.tenant_id).where(
        (rates.operations_per_s > 0) | (rates.bytes_per_s > 0) | (rates.ssd_write_bytes_per_s > 0)
    )
    rows = await session.scalars(reserve.union(limit).limit(DELTA_TENANTS_MAX + 1))
    return {TenantId(tenant) for tenant in rows}
