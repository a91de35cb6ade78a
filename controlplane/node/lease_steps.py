"""One step of leases in the caller's transaction: tenants that were changed by name first, then a slice of the others.

::

    changed by name  acme ───────────────> looked at in the very next step
    members, or any  every tenant ──> left ──> a slice with each step ──> leased_version, when none is left

10,000 tenants that have to follow a node that joins take seconds. In slices they hold up nobody: what one step moves is
a change of those tenants by name, so nodes hear of it as deltas, and a quota that somebody changes meanwhile goes in
between. ``policy_state.leased_version`` is raised when the last slice is done: a control plane that dies on the way
leaves a database in which the next one begins again, and finds those that have followed at rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeVar

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core import leases
from controlplane.core.leases import Holding, Members
from controlplane.core.quota_split import split_reserved
from controlplane.db import bump_policy_versions, models, versions_of
from controlplane.node.lease_rows import (
    LeaseBook,
    QuotaKey,
    lock_tenants,
    read_book,
    read_members,
    write_holdings,
)
from controlplane.node.namespace_leases import (
    NamespaceKey,
    step_namespaces,
    tenants_with_unmet_limits,
    write_namespace_holdings,
)
from saltern.names import NodeId, TenantId
from tenants.quota import Tier

KeyT = TypeVar("KeyT")

#: Tenants that were changed by nobody are looked at so many at a time, some 30 ms of the event loop on 8 nodes.
SLICE_TENANTS: Final = 200
#: Changes that are remembered by tenant: each tenant of a large cluster may take one whenever a node joins.
_CHANGES_KEPT: Final = 50_000


@dataclass(frozen=True, slots=True)
class Round:
    """How far leases have followed, as one control plane knows it; what counts for the others is in the database.

    Attributes:
        followed_version: changes of tenants by name are followed up to here.
        left: tenants that have still to be looked at.
        is_owed: by a change of many, which is followed when nobody is left; not only because something may have
            been given back, which may be so again and again.
        is_of_any: that change may be one of any tenant's quota, so none of those left may be taken to have followed.
    """

    followed_version: int = 0
    left: tuple[TenantId, ...] = ()
    is_owed: bool = False
    is_of_any: bool = False

    def followed_from(self, version: int, leased_version: int) -> int:
        """The version up to which changes of tenants by name are followed.

        What this control plane remembers does not count in a database that was restored to an earlier state.
        """
        return max(self.followed_version, leased_version) if self.followed_version <= version else leased_version


async def step(session: AsyncSession, before: Round, now: datetime, *, retry: bool, only_changed: bool) -> Round:
    """Do one step; needs the lock of the leases. What it returns counts once the transaction is committed.

    Args:
        retry: where nobody is left, begin with those whose leases are not where they should be.
        only_changed: leave those that were not changed by name for later, unless they are few.
    """
    state = models.PolicyState
    version, leased_version = (await session.execute(select(state.version, state.leased_version))).one()
    news = await _news(session, before.followed_from(version, leased_version), version)
    changed, left = news.changed, before.left
    is_owed, is_of_any = before.is_owed or news.is_of_many, before.is_of_any or news.is_of_any
    if news.is_of_many:
        left = tuple(map(TenantId, await session.scalars(select(models.Tenant.id))))
    elif retry and not left:
        left = tuple(await unmet_tenants(session))
    if not only_changed or len(left) <= SLICE_TENANTS:
        changed, left = changed.union(left[:SLICE_TENANTS]), left[SLICE_TENANTS:]
    if changed:
        version = await _move(session, changed, version, now)
    if not (is_owed and left):
        await _leased_up_to(session, version)
        is_owed = is_of_any = False
    return Round(version, left, is_owed, is_of_any)


async def unmet_tenants(session: AsyncSession) -> set[TenantId]:
    """Tenants of which a quota, or a namespace's limit, is not where it should be."""
    lease = models.QuotaLease
    unmet = await session.scalars(select(lease.tenant_id).where(lease.granted_bytes != lease.target_bytes).distinct())
    return {*map(TenantId, unmet), *await tenants_with_unmet_limits(session)}


@dataclass(frozen=True, slots=True)
class _News:
    """What has changed.

    Attributes:
        changed: tenants that were changed by name.
        is_of_many: leases of any tenant may have to move.
        is_of_any: and the change may be of any tenant itself, or nobody wrote down what: not only the members changed.
    """

    changed: frozenset[TenantId]
    is_of_many: bool
    is_of_any: bool


async def _news(session: AsyncSession, followed_version: int, version: int) -> _News:
    """What has changed after ``followed_version``."""
    change = models.PolicyChange
    rows = (
        await session.execute(select(change.tenant_id, change.concern).where(change.version > followed_version))
    ).all()
    concerns = {concern for tenant, concern in rows if tenant is None}
    is_of_any = len(rows) < version - followed_version or None in concerns
    changed = frozenset(TenantId(tenant) for tenant, _ in rows if tenant is not None)
    return _News(changed, is_of_any or models.Concern.MEMBERS in concerns, is_of_any)


async def _move(session: AsyncSession, tenants: Collection[TenantId], version: int, now: datetime) -> int:
    """One step of the leases of ``tenants``; returns the version up to which they follow now."""
    await lock_tenants(session, tenants)
    members = await read_members(session)
    names = sorted(tenants)
    moved: dict[QuotaKey, dict[NodeId, Holding]] = {}
    limits: dict[NamespaceKey, dict[NodeId, Holding]] = {}
    for at in range(0, len(names), SLICE_TENANTS):
        some = names[at : at + SLICE_TENANTS]
        book = await read_book(session, some)
        # Where they all move it takes long enough to let calls and streams go on.
        quotas = await asyncio.to_thread(_follow, book, members, version + 1)
        limits |= await step_namespaces(session, some, members, book, moved=quotas, version=version + 1)
        moved |= quotas
    movers = _tenants_of(moved) | _tenants_of(limits)
    if not movers:
        return version
    planned = version + versions_of(movers)
    moved, limits = _carried_by(moved, version + 1, planned), _carried_by(limits, version + 1, planned)
    # Before the version is raised: that holds up everybody else's changes until the commit.
    await write_holdings(session, moved)
    await write_namespace_holdings(session, limits)
    carried = await bump_policy_versions(session, now, movers)
    if carried == planned:
        return carried
    # Others have raised the version since it was read; what they changed is the next step's.
    await write_holdings(session, _carried_by(moved, planned, carried))
    await write_namespace_holdings(session, _carried_by(limits, planned, carried))
    return version


def capacities_by_tier(members: Mapping[Tier, Members]) -> dict[Tier, dict[NodeId, int]]:
    """The capacity in bytes of every member."""
    return {
        tier: {node: member.capacity_bytes for node, member in of_tier.items()} for tier, of_tier in members.items()
    }


def _follow(book: LeaseBook, members: Mapping[Tier, Members], version: int) -> dict[QuotaKey, dict[NodeId, Holding]]:
    """The holdings of each quota that change in one step, in the policy ``version``."""
    capacities = capacities_by_tier(members)
    moved: dict[QuotaKey, dict[NodeId, Holding]] = {}
    for key, quota in book.quotas.items():
        reserved = split_reserved(quota, capacities[key[1]]) if quota.reserved_bytes else {}
        new = leases.lease(quota.limit_bytes, book.holdings[key], members[key[1]], version, reserved)
        if new:
            moved[key] = new
    return moved


def _tenants_of(keys: Iterable[QuotaKey | NamespaceKey]) -> set[TenantId]:
    return {key[0] for key in keys}


def _carried_by(
    changed: Mapping[KeyT, Mapping[NodeId, Holding]], planned: int, carried: int
) -> dict[KeyT, dict[NodeId, Holding]]:
    """What was planned for one version, in the version that carries it."""
    return {
        key: {
            node: replace(holding, version=carried) if holding.version == planned else holding
            for node, holding in by_node.items()
        }
        for key, by_node in changed.items()
    }


async def _leased_up_to(session: AsyncSession, version: int) -> None:
    await session.execute(
        update(models.PolicyState).where(models.PolicyState.leased_version < version).values(leased_version=version)
    )
    await session.execute(delete(models.PolicyChange).where(models.PolicyChange.version < version - _CHANGES_KEPT))
