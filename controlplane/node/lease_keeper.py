"""Keeps the leases of quotas in step with quotas, nodes and demand: when a step is due, and what time makes due.

What a step does is :mod:`controlplane.node.lease_steps`, around the rules of :mod:`controlplane.core.leases`.

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
from typing import Final

import structlog
from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock, utc_now
from controlplane.core import lease_terms
from controlplane.core.lease_demand import Demand, rebalance
from controlplane.core.lease_terms import LEASE_DURATION_DEFAULT_S, Due, Standing
from controlplane.core.leases import NOTHING, Holding
from controlplane.core.quota_split import split_reserved
from controlplane.db import Database, ServiceScope, ServiceTask, bump_policy_version, models
from controlplane.db.locks import lock_leases, try_lock_leases
from controlplane.node.demand import DemandMeter
from controlplane.node.lease_rows import (
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
from controlplane.node.lease_steps import Round, capacities_by_tier, step, unmet_tenants
from controlplane.node.namespace_leases import reclaim_namespaces
from controlplane.node.registry import LOST_AFTER
from saltern.names import NodeId

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
        self._round = Round()

    def wake(self) -> None:
        """A node has settled a policy: there may be something to give."""
        self._woken.set()

    async def run(self) -> None:
        """Do what is due every second, and settle at once when woken, until cancelled; goes on after any failure."""
        tick_due_s, demand_due_s, retry_due_s = 0.0, monotonic() + DEMAND_INTERVAL_S, 0.0
        retry = False
        while True:
            if self._woken.is_set() or monotonic() >= retry_due_s:
                retry, retry_due_s = True, monotonic() + RETRY_INTERVAL_S
            self._woken.clear()
            try:
                if monotonic() >= tick_due_s:
                    tick_due_s = monotonic() + TICK_S
                    await self.tick()
                if monotonic() >= demand_due_s:
                    demand_due_s = monotonic() + DEMAND_INTERVAL_S
                    await self.follow_demand()
                begins = not self._round.left
                goes_on = await self._settle(retry=retry)
                retry &= not begins  # of a round that had begun already nobody knows whom it has passed
            except (SQLAlchemyError, OSError) as error:
                _log.warning("leases not followed", error_type=type(error).__name__)
                await asyncio.sleep(TICK_S)
                continue
            if goes_on or retry:
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, tick_due_s - monotonic())):
                    await self._woken.wait()

    async def settle(self, *, retry: bool = False) -> None:
        """Let leases follow every change up to now.

        Args:
            retry: also look at quotas that are not where they should be: a node may have given something back.
        """
        while await self._settle(retry=retry) and (retry or self._round.is_owed):
            pass

    async def settle_changed(self) -> None:
        """Let the leases of tenants follow that were changed by name, whoever else has still to follow.

        So a quota that is changed does not wait for 10,000 others that follow a node that joins. Where it may be any
        that was changed, all of them follow.
        """
        await self._settle(only_changed=True)
        if self._round.is_of_any:
            await self.settle()

    async def _settle(self, *, retry: bool = False, only_changed: bool = False) -> bool:
        """Do one step, if there is anything to do; return whether somebody is left."""
        # Held for one step: whoever asks meanwhile comes in between two, or finds it done. In the database they would
        # hold a connection while they wait.
        async with self._settling:
            async with self._database.transaction(_SCOPE) as session:
                state = (await session.scalars(select(models.PolicyState))).one()
                is_behind = state.version > self._round.followed_from(state.version, state.leased_version)
                has_left = bool(self._round.left) and not only_changed
                if not (is_behind or has_left or (retry and await unmet_tenants(session))):
                    return False
            async with self._database.transaction(_SCOPE) as session:
                await lock_leases(session)
                after = await step(session, self._round, self._clock(), retry=retry, only_changed=only_changed)
            self._round = after
            return bool(after.left)

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
        # A node that is admitted had nothing, and hears it all anew; what is taken back is to go to the others.
        concern = models.Concern.MEMBERS if work.reclaim else models.Concern.NOBODY
        version = await bump_policy_version(session, self._clock(), concern=concern)
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
            capacities = capacities_by_tier(members)
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


def _standing(row: models.Node, lost_before: datetime) -> Standing:
    return Standing(terms_of(row), is_lost=row.last_report_time <= lost_before, is_draining=is_draining(row))
