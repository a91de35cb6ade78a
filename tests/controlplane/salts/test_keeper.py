"""Rotation and purge by the clock, on a real database; the clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import structlog
from google.protobuf.duration_pb2 import Duration
from sqlalchemy import func, select, text

from controlplane.db import Database, connect, models
from controlplane.db.row_security import ServiceScope, ServiceTask
from controlplane.salts import keeper as keeper_module
from controlplane.salts.keeper import ACTOR, SaltKeeper
from controlplane.secrets import LocalKeyEncryptionKey
from saltern.admin.v1.salt_policies_pb2 import (
    GetSaltPolicyRequest,
    RotateSaltRequest,
    SaltPolicy,
    UpdateSaltPolicyRequest,
)
from tests.support.admin import PLATFORM, Admin, FakeClock, admin_services
from tests.support.control import migrate

KEY = LocalKeyEncryptionKey(bytes(32))
DAY = timedelta(days=1)


@pytest.fixture
async def urls(postgres: Any) -> AsyncIterator[Any]:
    with postgres.fresh_database(migrate) as urls:
        yield urls


@pytest.fixture
async def admin(urls: Any) -> AsyncIterator[Admin]:
    async with admin_services(urls) as services:
        yield services


@asynccontextmanager
async def database_of(urls: Any) -> AsyncIterator[Database]:
    """As a control plane has it: the application role, under row-level security."""
    database = connect(urls.app, pool_connections=2)
    try:
        yield database
    finally:
        await database.close()


async def policy_of(admin: Admin, tenant: str) -> SaltPolicy:
    request = GetSaltPolicyRequest(name=f"tenants/{tenant}/saltPolicy")
    return await admin.salt_policies.GetSaltPolicy(request, metadata=PLATFORM)


async def schedule(admin: Admin, tenant: str, *, period: timedelta, grace: timedelta) -> SaltPolicy:
    policy = SaltPolicy(
        name=f"tenants/{tenant}/saltPolicy",
        rotation_period=Duration(seconds=int(period.total_seconds())),
        grace_period=Duration(seconds=int(grace.total_seconds())),
    )
    return await admin.salt_policies.UpdateSaltPolicy(UpdateSaltPolicyRequest(salt_policy=policy), metadata=PLATFORM)


def epochs_of(policy: SaltPolicy) -> list[int]:
    return [epoch.epoch for epoch in policy.epochs]


async def test_i12_a_schedule_rotates_and_then_purges_each_act_in_the_tenants_own_chain(
    admin: Admin, urls: Any
) -> None:
    await admin.create_tenant("acme")
    await admin.create_tenant("other")
    await schedule(admin, "acme", period=7 * DAY, grace=DAY)
    clock = FakeClock(admin.clock.now)
    async with database_of(urls) as database:
        keeper = SaltKeeper(database, KEY, clock)
        assert await keeper.step() == 0
        version = await admin.policy_version()

        clock.now += 7 * DAY
        assert await keeper.step() == 1
        rotated = await policy_of(admin, "acme")
        assert epochs_of(rotated) == [1, 2]
        assert rotated.next_rotation_time.ToDatetime() == rotated.epochs[1].create_time.ToDatetime() + 7 * DAY
        assert await admin.policy_version() == version + 1
        assert await keeper.step() == 0

        clock.now += DAY
        assert await keeper.step() == 1
        purged = await policy_of(admin, "acme")
        assert epochs_of(purged) == [2]
        assert purged.etag != rotated.etag
        assert purged.next_rotation_time == rotated.next_rotation_time
        assert await admin.policy_version() == version + 2
        assert await keeper.step() == 0

    acts = [(event.actor, event.method.partition("/")[2]) for event in (await admin.events("acme"))[-2:]]
    assert acts == [(ACTOR, "RotateSalt"), (ACTOR, "PurgeSaltEpochs")]
    assert await admin.chain_faults("acme") == []
    assert epochs_of(await policy_of(admin, "other")) == [1]
    assert len(await admin.events("other")) == 1


async def test_i12_the_purged_root_is_in_no_row_any_more(admin: Admin, urls: Any) -> None:
    await admin.create_tenant("acme")
    async with admin.database.transaction() as session:
        wrapped = (await session.get_one(models.SaltEpoch, ("acme", 1))).wrapped_root_secret
    await admin.salt_policies.RotateSalt(
        RotateSaltRequest(name="tenants/acme/saltPolicy", grace_period=Duration(seconds=60)), metadata=PLATFORM
    )
    clock = FakeClock(admin.clock.now + timedelta(seconds=61))
    async with database_of(urls) as database:
        assert await SaltKeeper(database, KEY, clock).step() == 1

    async with admin.database.transaction() as session:
        assert await session.scalar(select(func.count()).where(models.SaltEpoch.wrapped_root_secret == wrapped)) == 0
        assert await session.get(models.SaltEpoch, ("acme", 1)) is None


async def test_however_long_nobody_looked_one_rotation_is_enough(admin: Admin, urls: Any) -> None:
    await admin.create_tenant("acme")
    await schedule(admin, "acme", period=timedelta(hours=1), grace=timedelta(0))
    clock = FakeClock(admin.clock.now + 300 * DAY)
    async with database_of(urls) as database:
        keeper = SaltKeeper(database, KEY, clock)
        assert [await keeper.step() for _ in range(2)] == [1, 0]
    assert epochs_of(await policy_of(admin, "acme")) == [2]


async def test_of_two_control_planes_one_rotates(admin: Admin, urls: Any) -> None:
    await admin.create_tenant("acme")
    await schedule(admin, "acme", period=DAY, grace=DAY)
    clock = FakeClock(admin.clock.now + DAY)
    async with database_of(urls) as one, database_of(urls) as other:
        await asyncio.gather(*(SaltKeeper(database, KEY, clock).step() for database in (one, other)))
        async with one.transaction() as session:
            assert await session.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")) == 0
    assert epochs_of(await policy_of(admin, "acme")) == [1, 2]


async def test_while_another_leads_nothing_is_done(admin: Admin, urls: Any) -> None:
    await admin.create_tenant("acme")
    await schedule(admin, "acme", period=DAY, grace=DAY)
    clock = FakeClock(admin.clock.now + DAY)
    async with database_of(urls) as one, database_of(urls) as other:
        scope = ServiceScope(ServiceTask.SALT_ROTATION)
        async with one.transaction(scope) as session:
            assert await keeper_module.try_lock_salts(session)
            assert await SaltKeeper(other, KEY, clock).step() == 0
        assert await SaltKeeper(other, KEY, clock).step() == 1


async def test_one_tenants_fault_is_not_the_others_and_no_secret_is_logged(admin: Admin, urls: Any) -> None:
    """The second tenant's audit row cannot be written: it does not rotate (I11), and the third does."""
    for tenant in ("a", "b", "c"):
        await admin.create_tenant(tenant)
        await schedule(admin, tenant, period=DAY, grace=DAY)
    async with admin.database.transaction() as session:
        head = await session.scalar(select(func.max(models.AuditEvent.sequence)).where(models.AuditEvent.chain == "b"))
        assert head is not None
    clock = FakeClock(admin.clock.now + DAY)
    owner = connect(urls.owner, pool_connections=1)
    try:
        async with owner.transaction() as session:
            await session.execute(
                text("ALTER TABLE audit_events ADD CONSTRAINT full_up CHECK (chain <> 'b') NOT VALID")
            )
    finally:
        await owner.close()
    async with database_of(urls) as database:
        with structlog.testing.capture_logs() as logs:
            assert await SaltKeeper(database, KEY, clock).step() == 2
    assert [epochs_of(await policy_of(admin, tenant)) for tenant in ("a", "b", "c")] == [[1, 2], [1], [1, 2]]
    assert [entry["tenant"] for entry in logs if entry["log_level"] == "warning"] == ["b"]
    assert {frozenset(entry) for entry in logs if entry["log_level"] == "info"} == {
        frozenset({"event", "step", "tenant", "epoch", "log_level"})
    }
