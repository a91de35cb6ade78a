"""A control plane that is killed with -9 in the middle of a rotation: all of it happened or nothing, and it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from sqlalchemy import func, select, text

from controlplane.audit import to_chained_record
from controlplane.db import models
from saltern.admin.v1.salt_policies_pb2 import RotateSaltRequest
from saltern.admin.v1.salt_policies_pb2_grpc import SaltPolicyServiceStub
from saltern.admin_client import AdminClient, ApiKey
from saltern.audit.chain import verify
from saltern.errors import UnavailableError
from tests.controlplane.test_server import serving, urls
from tests.support.control import control_plane, migrate, text_of
from tests.support.scopes import EveryTenant, connect_to_all

DEADLINE_S = 60
AUDIT_CHAIN, SALTS = 1, 6
PERIOD = timedelta(hours=1)
#: Statements at which the rotation is held and its process killed: the first after the new root is in the
#: transaction, and the last before the commit.
HELD = {
    "before it is audited": "SELECT pg_advisory_xact_lock(1, hashtext('acme'))",
    "before the policy version": "SELECT version FROM policy_state FOR UPDATE",
}


@asynccontextmanager
async def prepared(postgres: Any, folder: Path) -> AsyncIterator[tuple[Any, EveryTenant, str]]:
    """A database with the tenant acme, all of its rows, and the administrator's key."""
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, folder) as control:
            admin_key = await control.redeem()
            await control.add_tenant("acme", "chat")
        everything = connect_to_all(text_of(database.app), pool_connections=4)
        try:
            yield database, everything, admin_key
        finally:
            await everything.close()


async def make_due(database: EveryTenant) -> None:
    async with database.transaction() as session:
        await session.execute(
            text(
                "UPDATE salt_policies SET rotation_period_s = :period_s, next_rotation_time = now()"
                " WHERE tenant_id = 'acme'"
            ),
            {"period_s": PERIOD.total_seconds()},
        )


@asynccontextmanager
async def held_at(database: EveryTenant, statement: str) -> AsyncIterator[None]:
    """Hold what ``statement`` locks, for as long as the block takes on a busy machine."""
    async with database.transaction() as hold:
        await hold.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        await hold.execute(text(statement))
        yield


async def until_it_waits(database: EveryTenant, held: int) -> None:
    """Until a transaction that has the advisory lock ``held`` (``controlplane.db.locks``) waits for another."""
    statement = text(
        "SELECT count(*) FROM pg_locks AS awaited JOIN pg_locks AS held USING (pid)"
        f" WHERE NOT awaited.granted AND held.granted AND held.locktype = 'advisory' AND held.classid = {held}"
    )
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with database.transaction() as session:
                if await session.scalar(statement):
                    return
            await asyncio.sleep(0.02)


async def epochs(database: EveryTenant) -> list[int]:
    async with database.transaction() as session:
        statement = select(models.SaltEpoch.epoch).where(models.SaltEpoch.tenant_id == "acme")
        return sorted(await session.scalars(statement))


async def rotations(database: EveryTenant) -> int:
    """How many are in the chain, which has to hold together."""
    async with database.transaction() as session:
        chain = select(models.AuditEvent).where(models.AuditEvent.chain == "acme")
        events = list(await session.scalars(chain.order_by(models.AuditEvent.sequence)))
    assert verify("acme", map(to_chained_record, events)) == []
    return sum(event.method.endswith("/RotateSalt") and event.outcome == "success" for event in events)


async def until_rotated(database: EveryTenant) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await epochs(database) == [1]:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("held", HELD)
async def test_i11_i12_a_scheduled_rotation_that_was_cut_off_happens_once_and_whole(
    postgres: Any, tmp_path: Path, held: str
) -> None:
    async with prepared(postgres, tmp_path) as (urls_of, database, _):
        with serving(tmp_path, **urls(urls_of)) as served:
            await asyncio.to_thread(served.wait_ready)
            async with held_at(database, HELD[held]):
                await make_due(database)
                await until_it_waits(database, SALTS)
                served.process.kill()
                await asyncio.to_thread(served.end)
        served.ready_file.unlink()
        assert (await epochs(database), await rotations(database)) == ([1], 0)

        with serving(tmp_path, **urls(urls_of)) as served:
            await asyncio.to_thread(served.wait_ready)
            await until_rotated(database)
            served.process.terminate()
            await asyncio.to_thread(served.end)
        assert (await epochs(database), await rotations(database)) == ([1, 2], 1)
        async with database.transaction() as session:
            version = await session.scalar(select(models.PolicyState.version))
            last = await session.scalar(
                select(func.max(models.AuditEvent.policy_version)).where(models.AuditEvent.chain == "acme")
            )
            policy = await session.get_one(models.SaltPolicy, "acme")
            begun = await session.scalar(select(func.max(models.SaltEpoch.create_time)))
        assert version == last, "nodes hear of the rotation"
        assert policy.next_rotation_time == begun + PERIOD, "once: it is not due again with the next look"


async def test_i12_a_rotation_that_was_asked_for_and_cut_off_is_repeated_by_its_request_id(
    postgres: Any, tmp_path: Path
) -> None:
    request = RotateSaltRequest(name="tenants/acme/saltPolicy", request_id=str(uuid4()))
    request.grace_period.FromSeconds(0)

    def rotate(endpoint: str, key: str) -> Any:
        with AdminClient(endpoint, ApiKey(key), deadline_ms=30_000) as admin:
            return admin.call(SaltPolicyServiceStub(admin.channel).RotateSalt, request)

    async with prepared(postgres, tmp_path) as (urls_of, database, admin_key):
        with serving(tmp_path, **urls(urls_of)) as served:
            endpoint = await asyncio.to_thread(served.wait_ready)
            async with held_at(database, HELD["before the policy version"]):
                asked = asyncio.create_task(asyncio.to_thread(rotate, endpoint, admin_key))
                await until_it_waits(database, AUDIT_CHAIN)
                served.process.kill()
                await asyncio.to_thread(served.end)
                with pytest.raises((UnavailableError, grpc.RpcError)):
                    await asked
        served.ready_file.unlink()
        assert (await epochs(database), await rotations(database)) == ([1], 0)

        with serving(tmp_path, **urls(urls_of)) as served:
            endpoint = await asyncio.to_thread(served.wait_ready)
            first = await asyncio.to_thread(rotate, endpoint, admin_key)
            assert first == await asyncio.to_thread(rotate, endpoint, admin_key)
            served.process.terminate()
            await asyncio.to_thread(served.end)
        assert [epoch.epoch for epoch in first.epochs] == [2]
        assert (await epochs(database), await rotations(database)) == ([2], 1)
