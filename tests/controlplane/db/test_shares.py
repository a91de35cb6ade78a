from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from controlplane.db import PlatformScope, Scope, ServiceScope, ServiceTask, TenantScope, connect
from controlplane.db.shares import ConnectionShares
from saltern.errors import ResourceExhaustedError
from saltern.names import TenantId

ACME, BETA = TenantScope(TenantId("acme")), TenantScope(TenantId("beta"))


class Crowd:
    """Transactions that stay until they are let go."""

    def __init__(self, shares: ConnectionShares) -> None:
        self._shares = shares
        self._go = asyncio.Event()
        self.inside: list[int] = []

    async def stay(self, scope: Scope | None, number: int) -> None:
        async with self._shares.of(scope):
            self.inside.append(number)
            await self._go.wait()

    def let_go(self) -> None:
        self._go.set()


async def turns() -> None:
    """Let everybody who can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_i10_a_tenant_has_its_share_and_all_others_have_the_rest() -> None:
    shares = ConnectionShares(10, 60)
    crowd = Crowd(shares)
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(crowd.stay(ACME, number))
        for number, scope in enumerate([BETA, PlatformScope(), ServiceScope(ServiceTask.LEASES), None], 100):
            group.create_task(crowd.stay(scope, number))
        await turns()
        assert crowd.inside == [0, 1, 2, 3, 100, 101, 102, 103]
        crowd.let_go()
    assert crowd.inside[8:] == list(range(4, 20)), "in the order in which they came"


async def test_whoever_leaves_the_line_leaves_no_gap_in_it() -> None:
    shares = ConnectionShares(1, 60)
    crowd = Crowd(shares)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(crowd.stay(ACME, number)) for number in range(4)]
        await turns()
        tasks[1].cancel()  # in the line
        tasks[0].cancel()  # in its transaction
        await turns()
        assert crowd.inside == [0, 2]
        crowd.let_go()
    assert crowd.inside == [0, 2, 3]
    assert not shares._lines, "of whom nobody is there, nothing is kept"


async def test_a_share_that_nobody_leaves_is_a_refusal_of_its_tenant_alone() -> None:
    shares = ConnectionShares(10, 0.01)
    async with AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(shares.of(ACME))
        with pytest.raises(ResourceExhaustedError) as refused:
            await held.enter_async_context(shares.of(ACME))
        assert refused.value.reason == "TOO_MANY_CALLS"
        await held.enter_async_context(shares.of(BETA))
    async with shares.of(ACME):
        assert len(shares._lines) == 1
    assert not shares._lines


async def test_i10_transactions_of_one_tenant_leave_connections_to_others(postgres: Any) -> None:
    with postgres.fresh_database() as urls:
        database = connect(urls.app, pool_connections=5)
        go = asyncio.Event()
        begun = asyncio.Semaphore(0)

        async def hold() -> None:
            async with database.transaction(ACME) as session:
                await session.connection()
                begun.release()
                await go.wait()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(12):
                    group.create_task(hold())
                for _ in range(2):
                    await begun.acquire()
                for scope in (BETA, PlatformScope()):
                    async with database.transaction(scope) as session:
                        await session.connection()
                        assert database.connections_in_use == 3
                go.set()
        finally:
            await database.close()
