"""Who has the event loop next: sessions that can go on take turns, tenant by tenant, in fair shares of its work.

::

    epoll (one shot) --ready--> FairQueue --round--> Turn.take(), charged to its tenant --> READ, WRITE or TURN again

Sessions wait in an epoll of their own, of which the event loop sees one descriptor: a thousand ready sessions cost it
one callback, and none of them is looked at before those that are due. The event loop itself, and with it new
connections, gRPC and what comes back from SSD, gets a look after every round.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final, Protocol

from dataplane.core.fair_queue import FairQueue, Flow
from dataplane.core.work import HEAD_START_WORK, TURN_WORK
from tenants.quota import WEIGHT_DEFAULT

#: One round: about 0.5 ms of work, and one turn more.
ROUND_WORK: Final = 1024 * 1024
#: After so many turns of one flow in a row, some 50 ms of work, its turns are long: beside it a tenant that asks 20
#: times a second or more does not wait for a long one.
QUIET_TURNS: Final = 256
#: After a turn of so much work, 0.1 ms, somebody may have become ready who is more entitled than whoever waits.
_LOOK_WORK: Final = 256 * 1024
_READ_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT
_WRITE_ONCE: Final = select.EPOLLOUT | select.EPOLLONESHOT


class Turn(Protocol):
    """Something that goes on when its turn comes."""

    def take(self, turn_bytes: int, *, is_alone: bool) -> int:
        """Go on until there is something to wait for or ``turn_bytes`` of work are done; return how much was.

        Args:
            is_alone: whether nobody else had a turn since this one's last, or waits for one.
        """
        ...


class Scheduler:
    """Runs turns on the event loop.

    Args:
        turn_bytes: how long a turn may be, in work, while nobody else waits or did a moment ago.
        short_turn_bytes: otherwise.
    """

    def __init__(self, *, turn_bytes: int, short_turn_bytes: int) -> None:
        self._queue = FairQueue[Turn](HEAD_START_WORK // WEIGHT_DEFAULT)
        self._turn_bytes = turn_bytes
        self._short_turn_bytes = short_turn_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._epoll: select.epoll | None = None
        self._on_ready: dict[int, Callable[[], None]] = {}
        self._is_pending = False  # a round is on the event loop's list
        self._last: Turn | None = None
        self._last_flow: Flow[Turn] | None = None
        self._turns_in_a_row = 0
        #: How many were taken; only ever grows.
        self.turns = 0

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return len(self._queue)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "started"
        return self._loop

    def start(self) -> None:
        """Begin to run turns; call it on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._loop.add_reader(self._epoll.fileno(), self.run_round)

    def close(self) -> None:
        """Run nothing any more; idempotent."""
        if self._epoll is not None and self._loop is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def await_readable(self, fileno: int, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called once, in a round, when there is something to read; it may call :meth:`ready`."""
        self._await(fileno, _READ_ONCE, on_ready)

    def await_writable(self, fileno: int, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called once, in a round, when there is room to write."""
        self._await(fileno, _WRITE_ONCE, on_ready)

    def forget(self, fileno: int, turn: Turn) -> None:
        """Stop watching a descriptor whose ``turn`` is over for good; call it before it is closed. Idempotent."""
        if self._last is turn:
            self._last = None
        if self._on_ready.pop(fileno, None) is not None and self._epoll is not None:
            self._epoll.unregister(fileno)

    def ready(self, flow: Flow[Turn], turn: Turn) -> None:
        """Have ``turn`` taken when it is due; it must not wait already."""
        self._queue.push(flow, turn)
        self._schedule()

    async def turn(self, flow: Flow[Turn]) -> int:
        """Wait for a turn of a coroutine; return how much work it may do, which :meth:`charge` is then told."""
        call = _Call(self.loop.create_future())
        self.ready(flow, call)
        return await call.begun

    def charge(self, flow: Flow[Turn], work: int) -> None:
        """Account for work that a coroutine did."""
        self._queue.charge(flow, work)

    def _await(self, fileno: int, events: int, on_ready: Callable[[], None]) -> None:
        assert self._epoll is not None, "started"
        if fileno in self._on_ready:
            self._epoll.modify(fileno, events)
        else:
            self._epoll.register(fileno, events)
        self._on_ready[fileno] = on_ready

    def run_round(self) -> None:
        """Take up what has become ready, then run turns, the most entitled first, for about ROUND_WORK."""
        if self._epoll is None:
            return
        was_pending, self._is_pending = self._is_pending, True  # what becomes ready in this round needs no other one
        queue = self._queue
        self._take_up()
        left = ROUND_WORK
        while left > 0 and len(queue):
            flow, turn = queue.pop()
            is_alone = turn is self._last and not len(queue)
            self._last = turn
            self.turns += 1
            work = TURN_WORK + turn.take(self._length(flow), is_alone=is_alone)
            queue.charge(flow, work)
            left -= work
            if work >= _LOOK_WORK and left > 0:
                self._take_up()
        self._is_pending = was_pending
        if len(queue):
            self._schedule()

    def _take_up(self) -> None:
        """Let those who have become ready wait for their turns."""
        if self._epoll is None:  # the turn before has closed everything
            return
        on_ready = self._on_ready
        for fileno, _ in self._epoll.poll(0):
            on_ready[fileno]()

    def _length(self, flow: Flow[Turn]) -> int:
        """How long a turn of ``flow`` may be: long if nobody else waits, or is likely to come in the middle of it."""
        if flow is not self._last_flow:
            self._last_flow, self._turns_in_a_row = flow, 0
        self._turns_in_a_row += 1
        if self._turns_in_a_row <= QUIET_TURNS or self._queue.others_wait(flow):
            return self._short_turn_bytes
        return self._turn_bytes

    def _schedule(self) -> None:
        if not self._is_pending:
            self._is_pending = True
            self.loop.call_soon(self._run_pending)

    def _run_pending(self) -> None:
        self._is_pending = False
        self.run_round()


class _Call:
    """The turn of a coroutine, which goes on right after the round."""

    __slots__ = ("begun",)

    def __init__(self, begun: asyncio.Future[int]) -> None:
        self.begun = begun

    def take(self, turn_bytes: int, *, is_alone: bool) -> int:
        if not self.begun.done():  # the call was not cancelled meanwhile
            self.begun.set_result(turn_bytes)
        return 0
