"""Strangers at the console's port take neither the process nor the database from those who need them."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from controlplane.console.turns import TURNS, Turns
from saltern.admin.v1 import tenants_pb2
from tests.controlplane.console.conftest import Console
from tests.support.browser import browser

MANY = 10 * TURNS


class Pages:
    """An application whose requests stay in it until they are let go, and the world outside of it."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.ended = 0
        self.let_go = asyncio.Event()
        self.outside = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["waits"]:
            await receive()
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.let_go.wait()
        finally:
            self.inside -= 1
        await send({})
        self.ended += 1

    async def receive(self) -> dict[str, Any]:
        await self.outside.wait()
        return {}

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)

    def requests(self, turns: Turns, *, waits: bool) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(turns({"waits": waits}, self.receive, self.send)) for _ in range(MANY)]


async def until_idle() -> None:
    for _ in range(5 * MANY):
        await asyncio.sleep(0)


async def test_i10_a_few_requests_are_worked_on_at_a_time_and_who_waits_for_a_browser_is_none_of_them() -> None:
    pages = Pages()
    turns = Turns(pages)
    slow = pages.requests(turns, waits=True)
    await until_idle()
    quick = pages.requests(turns, waits=False)
    await until_idle()
    assert pages.inside == TURNS, "who waits for the rest of a form holds nobody up"
    pages.let_go.set()
    await asyncio.gather(*quick)
    pages.outside.set()
    await asyncio.gather(*slow)
    assert (pages.most, pages.ended) == (TURNS, 2 * MANY)


@pytest.mark.parametrize("waits", [True, False])
async def test_a_request_that_is_given_up_gives_its_turn_back(waits: bool) -> None:
    pages = Pages()
    turns = Turns(pages)
    given_up = pages.requests(turns, waits=waits)
    await until_idle()
    pages.outside.set()
    for number, task in enumerate(given_up):
        task.cancel()
        if number % 3 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*given_up, return_exceptions=True)
    pages.most = 0
    after = pages.requests(turns, waits=False)
    await until_idle()
    assert pages.inside == pages.most == TURNS
    pages.let_go.set()
    await asyncio.gather(*after)


async def test_i10_pages_that_wait_for_nothing_let_others_have_the_loop_too() -> None:
    answered = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal answered
        answered += 1

    async def never(*_: Any) -> dict[str, Any]:
        raise AssertionError

    turns = Turns(app)
    requests = [asyncio.create_task(turns({}, never, never)) for _ in range(MANY)]
    while answered < MANY:
        before = answered
        await asyncio.sleep(0)
        assert answered - before <= TURNS
    await asyncio.gather(*requests)


async def test_two_tasks_of_one_request_have_one_turn() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.gather(receive(), send({}), receive(), send({}))

    async def soon(*_: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {}

    turns = Turns(app)
    await asyncio.gather(*(turns({}, soon, soon) for _ in range(MANY)))
    assert turns._free._value == TURNS


async def test_i10_strangers_at_the_console_leave_the_database_to_others(console: Console) -> None:
    control = console.control
    metadata = await control.bearer(console.keys["beta/admin"])
    owner = create_async_engine(control.owner_url)
    async with browser(console.url) as visitor, owner.connect() as held:
        # Looking for their sessions takes them long.
        await held.execute(text("LOCK TABLE console_sessions IN ACCESS EXCLUSIVE MODE"))
        cookies = [{"cookie": f"saltern-console={secrets.token_urlsafe(32)}"} for _ in range(MANY)]
        strangers = [asyncio.create_task(visitor.http.get("/tenants/acme", headers=cookie)) for cookie in cookies]
        waiting = text("SELECT count(*) FROM pg_locks WHERE relation = 'console_sessions'::regclass AND NOT granted")
        while (await held.scalar(waiting)) < TURNS:
            await asyncio.sleep(0.01)
        for _ in range(10):
            await control.tenants.GetTenant(tenants_pb2.GetTenantRequest(name="tenants/beta"), metadata=metadata)
        assert (await held.scalar(waiting)) == TURNS
        await held.rollback()
        answers = await asyncio.gather(*strangers)
    await owner.dispose()
    assert {answer.status_code for answer in answers} == {303}
