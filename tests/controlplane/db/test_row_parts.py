from __future__ import annotations

import asyncio
import gc
import random
import warnings
from typing import Any

import pytest
from sqlalchemy import literal_column, select
from sqlalchemy.exc import ProgrammingError

from controlplane.clock import utc_now
from controlplane.db import connect, models
from controlplane.db.row_parts import in_parts
from tenants.quota import Tier
from tests.support.control import migrate
from tests.support.scopes import connect_to_all
from tests.support.tenant_rows import tenant_row


async def test_rows_come_in_parts_and_as_the_columns_values(postgres: Any) -> None:
    quota = models.TierQuota
    with postgres.fresh_database(migrate) as urls:
        database = connect_to_all(urls.app)
        try:
            names = [f"tenant-{number:02}" for number in range(25)]
            now = utc_now()
            async with database.transaction() as session:
                session.add_all(tenant_row(name, now) for name in names)
                await session.flush()
                for name in names:
                    session.add(
                        models.TierQuota(
                            tenant_id=name, tier=Tier.DRAM, reserved_bytes=0, limit_bytes=7, weight=1, update_time=now
                        )
                    )
            statement = select(quota.tenant_id, quota.tier, quota.limit_bytes).order_by(quota.tenant_id)
            async with database.transaction() as session:
                parts = [list(part) async for part in in_parts(session, statement, 10)]
                again = [row async for part in in_parts(session, statement, 25) for row in part]
            assert [len(part) for part in parts] == [10, 10, 5]
            rows = [row for part in parts for row in part]
            assert rows == again == [(name, Tier.DRAM, 7) for name in names]
            assert all(row.tier is Tier.DRAM for row in rows)
        finally:
            await database.close()


async def test_two_at_a_time_in_one_transaction_are_refused(postgres: Any) -> None:
    numbers = select(literal_column("generate_series(1, 30)").label("number"))
    with postgres.fresh_database() as urls:
        database = connect(urls.app)
        try:
            with pytest.raises(ProgrammingError, match="already exists"):
                async with database.transaction() as session:
                    async for _ in in_parts(session, numbers, 10):
                        async for _ in in_parts(session, numbers, 10):
                            pass
        finally:
            await database.close()


async def test_cancelled_anywhere_it_leaves_nothing_open(postgres: Any) -> None:
    numbers = select(literal_column("generate_series(1, 3000)").label("number"))
    chance = random.Random(11)
    ends = set()

    async def read(database: Any) -> None:
        async with database.transaction() as session:
            async for _ in in_parts(session, numbers, 100):
                pass

    with postgres.fresh_database() as urls:
        database = connect(urls.app, pool_connections=1)
        try:
            await database.ping()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                for _ in range(100):
                    task = asyncio.create_task(read(database))
                    await asyncio.wait([task], timeout=chance.uniform(0, 0.03))
                    task.cancel()
                    await asyncio.wait([task])
                    ends.add(task.cancelled())
                gc.collect()
            assert True in ends
            assert [str(warning.message) for warning in warned] == []
            assert database.connections_in_use == 0
            await read(database)  # and the pool is as good as new
        finally:
            await database.close()
