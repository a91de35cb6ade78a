"""Leases of many tenants follow in slices, and whoever is changed by name meanwhile goes in between (I4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import case, delete, func, select, update

from controlplane.clock import utc_now
from controlplane.db import Database, ServiceScope, ServiceTask, bump_policy_version, connect, models
from controlplane.node import demand, lease_steps
from controlplane.node.books import TenantBooks, TierBooks, write_books
from controlplane.node.lease_keeper import LeaseKeeper
from saltern.names import NodeId, TenantId
from tenants.quota import Tier
from tests.support.control import migrate
from tests.support.tenant_rows import tenant_row

QUOTA_BYTES = 1000
TENANTS = [f"t-{number}" for number in range(5)]


class Books:
    """A database of tenants and nodes with no control plane on it but the keepers of the test."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def transaction(self) -> Any:
        return self.database.transaction(ServiceScope(ServiceTask.LEASES))

    async def add_tenants(self) -> None:
        now = utc_now()
        async with self.transaction() as session:
            for tenant in TENANTS:
                session.add(tenant_row(tenant, now))
                await session.flush()
                quota = {"reserved_bytes": 0, "limit_bytes": QUOTA_BYTES, "weight": 100, "update_time": now}
                session.add(models.TierQuota(tenant_id=tenant, tier=Tier.DRAM, **quota))
            await bump_policy_version(session, now)

    async def join(self, node: str) -> None:
        now = utc_now()
        async with self.transaction() as session:
            session.add(
                models.Node(
                    id=node, wire_endpoint="127.0.0.1:1", shm_path="", grpc_endpoint="", host_id="",
                    dram_capacity_bytes=2**20, software_version="", register_time=now, last_report_time=now,
                    settled_version=0, lease_version=0, lease_expire_time=now + timedelta(hours=1),
                )
            )  # fmt: skip
            await bump_policy_version(session, now, concern=models.Concern.MEMBERS)

    async def set_quota(self, tenant: str, limit_bytes: int) -> None:
        quota = models.TierQuota
        async with self.transaction() as session:
            await session.execute(update(quota).where(quota.tenant_id == tenant).values(limit_bytes=limit_bytes))
            await bump_policy_version(session, utc_now(), TenantId(tenant))

    async def use(self, node: str, tenant: str, *, hit_bytes: int, evictions: int) -> None:
        counters = dict.fromkeys(models.USAGE_COUNTERS, 0) | {"get_bytes": hit_bytes}
        maps = {"evictions_by_cause": {"own-limit": evictions}}
        said = TenantBooks(TenantId(tenant), {Tier.DRAM: TierBooks(100, 1, 0, 0)}, counters, maps, None)
        async with self.transaction() as session:
            await write_books(session, NodeId(node), [said], utc_now(), gone=())

    async def settle_nodes(self) -> None:
        async with self.transaction() as session:
            await session.execute(update(models.Node).values(settled_version=(await self.state(session)).version))

    async def state(self, session: Any) -> models.PolicyState:
        state: models.PolicyState = (await session.scalars(select(models.PolicyState))).one()
        return state

    async def is_behind(self) -> bool:
        async with self.transaction() as session:
            state = await self.state(session)
            return state.leased_version < state.version

    async def granted(self, node: str) -> dict[str, int]:
        """By tenant; and what all nodes together may believe fits each quota (I4)."""
        lease, quota = models.QuotaLease, models.TierQuota
        async with self.transaction() as session:
            limits = dict((await session.execute(select(quota.tenant_id, quota.limit_bytes))).all())
            node_row = models.Node
            has_settled = node_row.settled_version >= lease.version
            believed_bytes = case((has_settled, lease.granted_bytes), else_=lease.believed_bytes)
            believed = select(lease.tenant_id, func.sum(believed_bytes)).join(node_row, node_row.id == lease.node_id)
            for tenant, sum_bytes in await session.execute(believed.group_by(lease.tenant_id)):
                assert sum_bytes <= max(limits[tenant], QUOTA_BYTES)
            rows = await session.execute(
                select(lease.tenant_id, lease.granted_bytes).where(lease.node_id == node).order_by(lease.tenant_id)
            )
            return dict(rows.all())


@pytest.fixture
async def books(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Books]:
    monkeypatch.setattr(lease_steps, "SLICE_TENANTS", 2)
    with postgres.fresh_database(migrate) as fresh:
        database = connect(fresh.app)
        try:
            books = Books(database)
            await books.add_tenants()
            await books.join("node-1")
            await LeaseKeeper(database).settle()
            await books.settle_nodes()
            assert await books.granted("node-1") == dict.fromkeys(TENANTS, QUOTA_BYTES)
            yield books
        finally:
            await database.close()


async def test_a_change_by_name_is_followed_before_those_who_are_left(books: Books) -> None:
    keeper = LeaseKeeper(books.database)
    await books.join("node-2")
    await keeper.settle_changed()
    assert set((await books.granted("node-1")).values()) == {QUOTA_BYTES}, "more than a slice: they wait"
    assert await keeper._settle()
    assert sorted((await books.granted("node-1")).values()) == [500, 500, 1000, 1000, 1000]
    last = TENANTS[-1]
    await books.set_quota(last, 100)
    await keeper.settle_changed()
    granted = await books.granted("node-1")
    assert granted[last] == 50
    assert sorted(granted.values()) == [50, 500, 500, 1000, 1000], "of the others none was looked at"
    assert await books.is_behind(), "whoever comes after this process begins again"
    await keeper.settle()
    assert sorted((await books.granted("node-1")).values()) == [50, 500, 500, 500, 500]
    assert not await books.is_behind()


async def test_who_is_changed_beside_a_node_that_joins_does_not_wait_either(books: Books) -> None:
    await books.join("node-2")
    await books.set_quota("t-4", 100)
    await LeaseKeeper(books.database).settle_changed()
    assert sorted((await books.granted("node-1")).values()) == [50, 1000, 1000, 1000, 1000]


async def test_i4_where_any_may_have_been_changed_all_are_followed(books: Books) -> None:
    """As a control plane of the version before writes it down, or one that forgot."""
    quota = models.TierQuota
    async with books.transaction() as session:
        await session.execute(update(quota).values(limit_bytes=100))
        await bump_policy_version(session, utc_now())
    await LeaseKeeper(books.database).settle_changed()
    assert await books.granted("node-1") == dict.fromkeys(TENANTS, 100)


async def test_i4_what_one_node_gains_was_given_back_first_in_slices_too(books: Books) -> None:
    keeper = LeaseKeeper(books.database)
    await books.join("node-2")
    await keeper.settle()
    assert set((await books.granted("node-2")).values()) == {0}
    await keeper.settle(retry=True)
    assert set((await books.granted("node-2")).values()) == {0}, "node-1 has said nothing yet"
    await books.settle_nodes()
    await keeper.settle(retry=True)
    assert await books.granted("node-2") == dict.fromkeys(TENANTS, QUOTA_BYTES // 2)


async def test_a_keeper_goes_on_where_one_died_between_two_slices(books: Books) -> None:
    await books.join("node-2")
    assert await LeaseKeeper(books.database)._settle()
    await LeaseKeeper(books.database).settle()
    assert await books.granted("node-1") == dict.fromkeys(TENANTS, QUOTA_BYTES // 2)
    assert not await books.is_behind()


async def test_what_concerns_no_tenant_moves_no_lease(books: Books) -> None:
    before = await books.granted("node-1")
    async with books.transaction() as session:
        version = await bump_policy_version(session, utc_now(), concern=models.Concern.NOBODY)
    keeper = LeaseKeeper(books.database)
    await keeper.settle()
    assert await books.granted("node-1") == before
    async with books.transaction() as session:
        state = await books.state(session)
    assert (state.version, state.leased_version) == (version, version)


async def test_leases_follow_in_a_database_that_was_restored_to_an_earlier_state(books: Books) -> None:
    keeper = LeaseKeeper(books.database)
    for limit_bytes in (900, 800, 700):
        await books.set_quota("t-0", limit_bytes)
        await keeper.settle()
    async with books.transaction() as session:
        await session.execute(update(models.PolicyState).values(version=4, leased_version=4))
        await session.execute(delete(models.PolicyChange).where(models.PolicyChange.version > 4))
    await books.set_quota("t-1", 10)
    await keeper.settle()
    assert (await books.granted("node-1"))["t-1"] == 10


async def test_a_quota_follows_demand_and_those_that_nobody_presses_stay(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nodes report is read in parts, so that nobody waits for 10,000 tenants."""
    monkeypatch.setattr(demand, "_ROWS_AT_ONCE", 3)
    keeper = LeaseKeeper(books.database)
    await books.join("node-2")
    await keeper.settle()
    await books.settle_nodes()
    await keeper.settle(retry=True)
    await books.settle_nodes()
    for tenant in TENANTS:
        for node in ("node-1", "node-2"):
            await books.use(node, tenant, hit_bytes=0, evictions=0)
    await keeper.follow_demand()
    await books.use("node-2", "t-3", hit_bytes=10_000, evictions=10)
    await keeper.follow_demand()
    await keeper.settle(retry=True)
    await books.settle_nodes()
    await keeper.settle(retry=True)
    granted = await books.granted("node-2")
    assert granted.pop("t-3") > QUOTA_BYTES // 2
    assert set(granted.values()) == {QUOTA_BYTES // 2}
