"""Keeps the leases of quotas in step with quotas, nodes and demand: the shell around :mod:`controlplane.core.leases`.

Every control plane on a database runs one; an advisory lock lets one at a time do a step, and all there is to know is
in the database, so it does not matter which one does, nor when one dies. A step is one transaction: what a policy
grants is believed in the books before any node can hear of it (I4).

::

    change of a quota, a node ──┐
    a node has settled ─────────┼──> settle: shrink, grow ──> policy version ──> streams
    every second: due ──────────┘         ^
    now and then: demand ── new targets ──┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from time import monotonic
from typing import Final, TypeVar

import structlog
from sqlalchemy import delete, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock, utc_now
from controlplane.core import lease_terms, leases
from controlplane.core.lease_demand import Demand, rebalance
from controlplane.core.lease_terms import LEASE_DURATION_DEFAULT_S, Due, Standing
from controlplane.core.leases import NOTHING, Holding, Members
from controlplane.core.quota_split import split_reserved
from controlplane.db import (
    Database,
    ServiceScope,
    ServiceTask,
    bump_policy_version,
    bump_policy_versions,
    models,
    versions_of,
)
from controlplane.db.locks import lock_leases, try_lock_leases
from controlplane.node.demand import DemandMeter
from controlplane.node.lease_rows import (
    LeaseBook,
    QuotaKey,
    is_draining,
    lock_tenants,
    read_book,
    read_members,
    store_terms,
    terms_of,
    to_ms,
    write_holdings,
)
from controlplane.node.namespace_leases import (
    NamespaceKey,
    reclaim_namespaces,
    step_namespaces,
    tenants_with_unmet_limits,
    write_namespace_holdings,
)
from controlplane.node.registry import LOST_AFTER
from saltern.names import NodeId, TenantId
from tenants.quota import Tier

KeyT = TypeVar("KeyT")

TICK_S: Final = 1.0
#: How often it is looked whether quotas should lie elsewhere.
DEMAND_INTERVAL_S: Final = 15.0
#: A node may have settled a policy by another control plane, which wakes nobody here.
RETRY_INTERVAL_S: Final = 5.0
#: After a start, and after the database was away, nodes need a moment to come back; until then nothing is taken from
#: who has been silent: the first one to come back would inherit from all others, and they would have to evict.
RECLAIM_GRACE_S: Final = 30.0
#: A database that was not reached for so long was away: nodes could not report either.
AWAY_S: Final = LOST_AFTER.total_seconds()
#: Changes that are remembered by tenant.
_CHANGES_KEPT: Final = 10_000
#: Read and computed in one go.
_TENANTS_AT_ONCE: Final = 500
_SCOPE: Final = ServiceScope(ServiceTask.LEASES)

_log = structlog.get_logger(__name__)


class LeaseKeeper:
    """One per process. :meth:`settle` may be called by anybody at any time; :meth:`run` does the rest.

    Args:
        lease_duration: how long a node may grow without an answer; what of it has been promised is kept.
        reclaim_grace_s: nothing is taken back for so long after the start, or after the database was away.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock = utc_now,
        *,
        lease_duration: timedelta = timedelta(seconds=LEASE_DURATION_DEFAULT_S),
        reclaim_grace_s: float = RECLAIM_GRACE_S,
    ) -> None:
        self.lease_duration: Final = lease_duration
        self._database = database
        self._clock = clock
        self._reclaim_grace_s = reclaim_grace_s
        self._looked_s = monotonic()
        self._reclaim_from_s = self._looked_s + reclaim_grace_s
        self._demand = DemandMeter()
        self._woken = asyncio.Event()
        self._settling = asyncio.Lock()

    def wake(self) -> None:
        """A node has settled a policy: there may be something to give."""
        self._woken.set()

    async def run(self) -> None:
        """Do what is due every second, and at once when woken, until cancelled; goes on after any failure."""
        demand_due_s, retry_due_s = monotonic() + DEMAND_INTERVAL_S, 0.0
        while True:
            has_room = self._woken.is_set() or monotonic() >= retry_due_s
            self._woken.clear()
            try:
                await self.tick()
                if monotonic() >= demand_due_s:
                    demand_due_s = monotonic() + DEMAND_INTERVAL_S
                    await self.follow_demand()
                await self.settle(retry=has_room)
                if has_room:
                    retry_due_s = monotonic() + RETRY_INTERVAL_S
            except (SQLAlchemyError, OSError) as error:
                _log.warning("leases not followed", error_type=type(error).__name__)
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._woken.wait()

    async def settle(self, *, retry: bool = False) -> None:
        """Let leases follow every change up to now, before a policy is composed of them.

        Args:
            retry: also look at quotas that are not where they should be: a node may have given something back.
        """
        async with self._settling:  # the others find it done; in the database they would hold a connection meanwhile
            await self._settle(retry)

    async def _settle(self, retry: bool) -> None:
        async with self._database.transaction(_SCOPE) as session:
            state = (await session.scalars(select(models.PolicyState))).one()
            lease = models.QuotaLease
            unmet = retry and (
                await session.scalar(
                    select(select(lease.tenant_id).where(lease.granted_bytes != lease.target_bytes).exists())
                )
                or await tenants_with_unmet_limits(session)
            )
            if state.leased_version >= state.version and not unmet:
                return
        async with self._database.transaction(_SCOPE) as session:
            await lock_leases(session)
            await self._step(session)

    async def _step(self, session: AsyncSession) -> None:
        """One step of every tenant that something has happened to. Needs the lock of the leases."""
        version, leased_version = (
            await session.execute(select(models.PolicyState.version, models.PolicyState.leased_version))
        ).one()
        tenants = await _touched(session, leased_version, version)
        changed: dict[QuotaKey, dict[NodeId, Holding]] = {}
        limits: dict[NamespaceKey, dict[NodeId, Holding]] = {}
        if tenants is None or tenants:
            await lock_tenants(session, tenants)
            members = await read_members(session)
            names = sorted(await session.scalars(select(models.Tenant.id)) if tenants is None else tenants)
            # Of 10,000 tenants on 8 nodes it takes seconds, in which calls and streams go on; and the transaction must
            # not be idle for long.
            for at in range(0, len(names), _TENANTS_AT_ONCE):
                some = [TenantId(name) for name in names[at : at + _TENANTS_AT_ONCE]]
                book = await read_book(session, some)
                moved = await asyncio.to_thread(_follow, book, members, version + 1)
                limits |= await step_namespaces(session, some, members, book, moved=moved, version=version + 1)
                changed |= moved
        if changed or limits:
            movers = {key[0] for key in changed} | {key[0] for key in limits}
            planned = version + versions_of(movers)
            changed, limits = _carried_by(changed, version + 1, planned), _carried_by(limits, version + 1, planned)
            # Before the version is raised: that holds up everybody else's changes until the commit.
            await write_holdings(session, changed)
            await write_namespace_holdings(session, limits)
            carried = await bump_policy_versions(session, self._clock(), movers)
            if carried == planned:
                version = carried
            else:  # others have raised the version since it was read; what they changed is the next step's
                await write_holdings(session, _carried_by(changed, planned, carried))
                await write_namespace_holdings(session, _carried_by(limits, planned, carried))
        await _leased_up_to(session, version)

    async def tick(self) -> None:
        """Admit processes whose wait is over, and take back what was leased to nodes that are lost."""
        async with self._database.transaction(_SCOPE) as session:
            may_step = await try_lock_leases(session)
            self._note_look()
            if not may_step:
                return  # another control plane is at it
            now = self._clock()
            rows = list(await session.scalars(select(models.Node).order_by(models.Node.id)))
            work = lease_terms.due({NodeId(row.id): _standing(row, now - LOST_AFTER) for row in rows}, to_ms(now))
            may_reclaim = monotonic() >= self._reclaim_from_s
            reclaim = work.reclaim if may_reclaim else ()
            if not (work.admit or reclaim):
                return
            # A report may renew a lease at this very moment: look again with the rows held.
            held = {
                NodeId(row.id): row
                for row in await session.scalars(
                    select(models.Node)
                    .order_by(models.Node.id)
                    .with_for_update(key_share=True)
                    .execution_options(populate_existing=True)
                )
            }
            work = lease_terms.due({node: _standing(row, now - LOST_AFTER) for node, row in held.items()}, to_ms(now))
            await self._do(session, replace(work, reclaim=work.reclaim if may_reclaim else ()), held)

    def _note_look(self) -> None:
        """The database has answered."""
        before_s, self._looked_s = self._looked_s, monotonic()
        if self._looked_s - before_s > AWAY_S:
            self._reclaim_from_s = self._looked_s + self._reclaim_grace_s

    async def _do(self, session: AsyncSession, work: Due, rows: Mapping[NodeId, models.Node]) -> None:
        if work.reclaim:
            await lock_tenants(session, None)
        if not (work.admit or work.reclaim):
            return
        version = await bump_policy_version(session, self._clock())
        for node in work.admit:
            store_terms(rows[node], lease_terms.admitted(terms_of(rows[node]), version))
            _log.info("node has its leases: whoever had them before cannot grow any more", node=node)
        for node in work.reclaim:
            store_terms(rows[node], lease_terms.reclaimed(terms_of(rows[node]), version))
            await session.execute(
                update(models.QuotaLease)
                .where(models.QuotaLease.node_id == node)
                .values(granted_bytes=0, believed_bytes=0, target_bytes=0, version=version)
            )
            await reclaim_namespaces(session, node, version)
            _log.warning("node is lost and its lease has run out: its part of quotas goes to the others", node=node)

    async def follow_demand(self) -> None:
        """Move quotas to where they earn more, by what nodes have reported since the last look."""
        async with self._database.transaction(_SCOPE) as session:
            if not await try_lock_leases(session):
                return
            members = await read_members(session)
            if all(sum(member.takes_leases for member in of_tier.values()) < 2 for of_tier in members.values()):
                return
            demands = await self._demand.look(session)
            if not demands:
                return
            tenants = {tenant for tenant, _ in demands}
            await lock_tenants(session, tenants)
            book = await read_book(session, tenants)
            capacities = _capacities(members)
            moved: dict[QuotaKey, dict[NodeId, Holding]] = {}
            for key, by_node in demands.items():
                if key not in book.quotas:
                    continue  # deleted meanwhile
                takers = {node: member for node, member in members[key[1]].items() if member.takes_leases}
                holdings = {node: book.holdings[key].get(node, NOTHING) for node in takers}
                reserved = split_reserved(book.quotas[key], capacities[key[1]])
                targets = rebalance(
                    {node: holding.target_bytes for node, holding in holdings.items()},
                    {node: by_node.get(node, Demand()) for node in takers},
                    {node: member.capacity_bytes for node, member in takers.items()},
                    {node: reserved[node] for node in takers},
                )
                if targets is not None:
                    moved[key] = {node: replace(holdings[node], target_bytes=targets[node]) for node in takers}
            await write_holdings(session, moved)
            if moved:
                _log.info("quotas follow demand", quotas=len(moved))


async def _touched(session: AsyncSession, leased_version: int, version: int) -> set[TenantId] | None:
    """Tenants whose leases may have to move: they changed after ``leased_version``, or are not where they should be.

    Returns:
        None for all: something changed that is no tenant's alone, or nobody wrote down what.
    """
    change, lease = models.PolicyChange, models.QuotaLease
    changed = list(await session.scalars(select(change.tenant_id).where(change.version > leased_version)))
    if len(changed) < version - leased_version or None in changed:
        return None
    unmet = await session.scalars(select(lease.tenant_id).where(lease.granted_bytes != lease.target_bytes).distinct())
    unmet_limits = await tenants_with_unmet_limits(session)
    return {TenantId(tenant) for tenant in {*changed, *unmet, *unmet_limits} if tenant is not None}


def _follow(book: LeaseBook, members: Mapping[Tier, Members], version: int) -> dict[QuotaKey, dict[NodeId, Holding]]:
    """The holdings of each quota that change in one step, in the policy ``version``."""
    capacities = _capacities(members)
    changed: dict[QuotaKey, dict[NodeId, Holding]] = {}
    for key, quota in book.quotas.items():
        reserved = split_reserved(quota, capacities[key[1]]) if quota.reserved_bytes else {}
        new = leases.lease(quota.limit_bytes, book.holdings[key], members[key[1]], version, reserved)
        if new:
            changed[key] = new
    return changed


def _capacities(members: Mapping[Tier, Members]) -> dict[Tier, dict[NodeId, int]]:
    return {
        tier: {node: member.capacity_bytes for node, member in of_tier.items()} for tier, of_tier in members.items()
    }


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


def _standing(row: models.Node, lost_before: datetime) -> Standing:
    return Standing(terms_of(row), is_lost=row.last_report_time <= lost_before, is_draining=is_draining(row))
