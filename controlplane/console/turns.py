"""How many requests of browsers are worked on at a time: the console shares a process with what nodes need.

An event loop gives everybody who is ready the same turn. So a few hundred connections of strangers, each with a page
that is asked for again and again, would have a node's report wait behind all of them, and take the last connection to
the database. Here they wait for each other instead, in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Worked on at a time; of the database's connections they hold no more.
TURNS: Final = 4

ResultT = TypeVar("ResultT")


class Turns:
    """``app`` with at most :data:`TURNS` requests in it that wait for nobody outside.

    Who waits for the rest of a form, or for a browser that reads slowly, holds no turn meanwhile.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._free = asyncio.Semaphore(TURNS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_turn = True
        await self._free.acquire()

        async def without_turn(outside: Awaitable[ResultT]) -> ResultT:
            nonlocal has_turn
            if has_turn:
                has_turn = False
                self._free.release()
            result = await outside
            if not has_turn:
                await self._free.acquire()
                if has_turn:  # another task of this request was quicker
                    self._free.release()
                has_turn = True
            return result

        async def receive_next() -> Message:
            return await without_turn(receive())

        async def send_next(message: Message) -> None:
            await without_turn(send(message))

        try:
            await asyncio.sleep(0)  # also a page that waits for nothing keeps its turn until others have had theirs
            await self._app(scope, receive_next, send_next)
        finally:
            if has_turn:
                self._free.release()
