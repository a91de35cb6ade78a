"""One column on real nodes: arrivals and prefill in virtual time, every call for real, several of them in flight.

::

    ARRIVED --> [engine's queue] --> lookup and read, for real --> prefill --> DONE: store, for real; next of the queue

The loop is that of the simulated replay; what it cannot foresee is when a read ends. A read that began at second t ends
not before t, and its prefill not before the shortest that it could be, so everything earlier than that may happen
meanwhile: engines that prefill long prompts leave room for the reads of the others, and that many calls are in flight.
A read that might find blocks which are being stored waits for those, since in virtual time they are there already.

A request, a call and its bytes are counted together, when the call is taken; what may end a column early
(:meth:`Driver.stop`) is looked at only where nothing is half counted. So a column that is cut short is exact, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar, cast

from saltern.errors import SalternError
from saltern.replay.arrivals import Arrivals
from saltern.replay.collector import Collector, Served
from saltern.replay.measured.calls import PromptCalls, Read, Wrote
from saltern.replay.measures import Measures
from saltern.replay.prefill import TimeModel
from saltern.replay.setup import ReplaySetup
from saltern.replay.workers import Worker, Workers
from saltern.traces.request import TraceRequest
from saltern.transport.memory import RegisteredBuffer

_T = TypeVar("_T")
#: What fails: given the time, does it, and says what is to happen when.
Failure = Callable[[float], "tuple[float, Callable[[], None]] | None"]
#: Requests between two reports of progress.
_PROGRESS_EVERY: Final = 64
#: How long a driver that was stopped waits for calls in flight; healthy nodes answer in a small part of it.
_TAKING_S: Final = 10.0


class _Stopped(Exception):  # noqa: N818 - no error: how the loop is left
    """Raised where nothing is half counted, once a driver was stopped."""


class _Kind(IntEnum):
    DUE = 0  #: something that was to happen at this time
    DONE = 1  #: a prefill has ended
    ARRIVED = 2  #: at its own time: the trace is read on
    FOLLOWED = 3  #: after its session's answer


@dataclass(slots=True, eq=False)
class _Work:
    """One request on its engine.

    Attributes:
        bound_s: no prefill of it ends earlier.
    """

    worker: Worker
    request: TraceRequest
    arrived_s: float
    start_s: float
    local_blocks: int
    bound_s: float
    read: Read | None = None


class _Storing(NamedTuple):
    """Blocks on their way to nodes since ``at_s``."""

    at_s: float
    tenant: str
    block_ids: Sequence[int]


_Event = tuple[float, int, int, "_Work | TraceRequest | Callable[[], None]"]


class Driver:
    """Serves the requests of one column.

    Args:
        calls: of each tenant; None for no cache at all.
        rooms: memory to read into, one for each call in flight.
        speed: seconds of traffic in one of ours; None: as fast as calls are answered.
        why_failed: asked after blocks were left without an answer: why that ends the column, if it does.

    Attributes:
        error: what ended it early, unless it was whoever called :meth:`stop`.
        measures: filled while it runs.
        block_accesses: as in the simulated replay.
        read_s, written_s: that calls took, summed.
    """

    def __init__(
        self,
        setup: ReplaySetup,
        block_tokens: int,
        *,
        calls: Mapping[str, PromptCalls] | None,
        rooms: Sequence[RegisteredBuffer],
        collector: Collector,
        speed: float | None = None,
        progress: Callable[[int], None] = lambda _: None,
        why_failed: Callable[[], SalternError | None] = lambda: None,
    ) -> None:
        self._calls, self._collector, self._progress, self._why_failed = calls, collector, progress, why_failed
        self._block_tokens = block_tokens
        self._failures: list[tuple[int, Failure]] = []
        self._speed = speed
        self._times = TimeModel(setup.model, setup.hardware)
        self._workers = Workers(setup, block_tokens, times=self._times, start=self._start)
        self._has_local = setup.engine_cache_tokens > 0
        self._events: list[_Event] = []
        self._serial = self._arrived = self._served = 0
        self._arrivals: Arrivals | None = None
        self._in_flight = max(1, len(rooms))
        self._rooms: SimpleQueue[RegisteredBuffer] = SimpleQueue()
        for room in rooms:
            self._rooms.put(room)
        #: One call after the other needs no thread.
        self._pool = ThreadPoolExecutor(len(rooms), "saltern-replay") if len(rooms) > 1 else None
        self._reading: dict[Future[Read], _Work] = {}
        self._storing: dict[Future[Wrote], _Storing] = {}
        #: Calls that are over and not taken yet, each once; None only wakes.
        self._over: SimpleQueue[Future[Any] | None] = SimpleQueue()
        self._on_the_way: dict[tuple[str, int], Future[Wrote]] = {}
        self._began_s = 0.0
        self._is_stopped = False
        self.error: SalternError | None = None
        self.now_s = 0.0
        self.measures = Measures()
        self.block_accesses = 0
        self.read_s = self.written_s = 0.0

    @property
    def shed(self) -> int:
        """Requests that found a queue full."""
        return self._workers.shed

    def fail(self, failures: Sequence[tuple[int, Failure]]) -> None:
        """Let failures happen, each when so many requests have arrived; no call is in flight then."""
        self._failures = list(failures)

    def stop(self, why: SalternError | None = None) -> None:
        """Let :meth:`run` begin nothing more, take the calls that end soon, and return; also for signal handlers."""
        self.error = self.error or why
        self._is_stopped = True
        self._over.put(None)  # may come at any time, in the middle of another put or get too

    def run(self, arrivals: Arrivals) -> bool:
        """Serve requests to the last, or until :meth:`stop`; returns whether it was the last.

        Calls that have not ended ten seconds after that are counted in ``measures.unfinished_calls``, and stay in
        flight until clients are closed; otherwise none is in flight when this returns or raises.
        """
        self._arrivals = arrivals
        self._began_s = time.perf_counter()
        try:
            self._push_first()
            while self._events or self._reading:
                self._go_on()
                if not self._events or self._events[0][0] >= self._horizon_s():
                    self._wait_for_calls()
                else:
                    self._happen(*heappop(self._events))
            self._quiesce()
        except _Stopped:
            self._take_what_ends()
            return False
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=not self.measures.unfinished_calls)
            self.measures.wall_s = time.perf_counter() - self._began_s
        return True

    def _go_on(self) -> None:
        if self._is_stopped:
            raise _Stopped

    def _happen(self, at_s: float, kind: int, _: int, what: _Work | TraceRequest | Callable[[], None]) -> None:
        self._keep_pace(at_s)
        self.now_s = at_s
        match what:
            case TraceRequest():
                if kind == _Kind.ARRIVED:
                    self._push_first()
                self._arrive(what)
            case _Work():
                self._store(what)
                self._workers.free(what.worker)
            case _:
                self._quiesce()
                self._unclocked(what)

    def _push(self, at_s: float, kind: _Kind, what: _Work | TraceRequest | Callable[[], None]) -> None:
        self._serial += 1
        heappush(self._events, (at_s, kind, self._serial, what))

    def _push_first(self) -> None:
        assert self._arrivals is not None
        first = self._arrivals.first()
        if first is not None:
            self._push(first[0], _Kind.ARRIVED, first[1])

    # ---- a request's way

    def _arrive(self, request: TraceRequest) -> None:
        self._arrived += 1
        while self._failures and self._arrived > self._failures[0][0]:
            self._quiesce()
            later = self._unclocked(partial(self._failures.pop(0)[1], self.now_s))
            if later is not None:
                self._push(later[0], _Kind.DUE, later[1])
        if not self._workers.arrive(request, self.now_s):
            self._answer(request, self.now_s)

    def _start(self, worker: Worker, request: TraceRequest, arrived_s: float) -> None:
        """The engine turns to a request: look up and read."""
        ids = request.block_ids
        local = worker.local.prefix(request.tenant, ids) if self._has_local else 0
        bound_s = self.now_s + self._times.prefill_s(request.input_tokens, request.input_tokens)
        work = _Work(worker, request, arrived_s, self.now_s, local, bound_s)
        if self._calls is None or not ids:
            self._settle(work)
            return
        self._reading[self._submit(self._read, work, self._stores_of(request))] = work

    def _read(self, work: _Work, stores: set[Future[Wrote]]) -> Read:
        assert self._calls is not None
        for store in stores:
            store.exception()  # only that it is over; who submitted it asks what came of it
        room = self._rooms.get()
        try:
            return self._calls[work.request.tenant].read(work.request.block_ids, work.local_blocks, room)
        finally:
            self._rooms.put(room)

    def _stores_of(self, request: TraceRequest) -> set[Future[Wrote]]:
        """Puts in flight of blocks that this prompt has, too."""
        if not self._on_the_way:
            return set()
        found = (self._on_the_way.get((request.tenant, block)) for block in request.block_ids)
        return {store for store in found if store is not None}

    def _settle(self, work: _Work) -> None:
        """A read has ended: now it is known when its prefill does."""
        request, read, block_tokens = work.request, work.read, self._block_tokens
        tokens, local = request.input_tokens, work.local_blocks
        cached = local if read is None else max(local, read.prefix)
        read_s = 0.0 if read is None else read.read_s
        prefill_s = self._times.prefill_s(tokens, cached * block_tokens)
        done_s = work.start_s + read_s + prefill_s
        if read is not None:
            self.block_accesses += len(request.block_ids)
            self._note_read(read, work.start_s + read_s)
        if self._has_local:
            work.worker.local.use(request.tenant, request.block_ids)
        self._push(done_s, _Kind.DONE, work)
        local_tokens = min(tokens, local * block_tokens)
        served = Served(
            tenant=request.tenant,
            arrival_s=work.arrived_s,
            prompt_tokens=tokens,
            output_tokens=request.output_tokens,
            hit_tokens=min(tokens, cached * block_tokens) - local_tokens,
            engine_hit_tokens=local_tokens,
            queue_s=work.start_s - work.arrived_s,
            transfer_s=read_s,
            prefill_s=prefill_s,
            decode_s=self._times.decode_s(request.output_tokens),
        )
        self._collector.served(served)
        self._answer(request, done_s + served.decode_s)
        self._served += 1
        if self._served % _PROGRESS_EVERY == 0:
            self._progress(self._served)

    def _note_read(self, read: Read, at_s: float) -> None:
        self.read_s += read.read_s
        self.measures.read_calls += 1
        self._note_failed(read.failed_blocks)
        self.measures.wrong_blocks += read.wrong_blocks
        self._collector.moved(at_s, read_bytes=read.read_blocks * self.measures.block_bytes)

    def _note_failed(self, blocks: int) -> None:
        self.measures.failed_blocks += blocks
        if blocks and (error := self._why_failed()) is not None:
            self.stop(error)

    def _store(self, work: _Work) -> None:
        """A prefill has ended: send nodes what they lack. The engine does not wait for it."""
        read, request = work.read, work.request
        work.read = None  # and with it the chain: both may be large
        if read is None or (read.prefix >= len(request.block_ids) and not read.extra):
            return
        assert self._calls is not None
        storing = self._submit(self._calls[request.tenant].write, request.block_ids, read)
        self._storing[storing] = _Storing(self.now_s, request.tenant, request.block_ids[read.prefix :])
        if self._pool is None:
            self._take_stored(storing)
            return
        for block in request.block_ids[read.prefix :]:
            self._on_the_way[request.tenant, block] = storing

    def _take_stored(self, storing: Future[Wrote]) -> None:
        at_s, tenant, block_ids = self._storing.pop(storing)
        for block in block_ids:
            if self._on_the_way.get((tenant, block)) is storing:
                del self._on_the_way[tenant, block]
        wrote = storing.result()
        self.written_s += wrote.write_s
        self.measures.write_calls += 1
        self._note_failed(wrote.failed_blocks)
        self._collector.moved(at_s + wrote.write_s, written_bytes=wrote.stored_blocks * self.measures.block_bytes)

    def _answer(self, request: TraceRequest, at_s: float) -> None:
        assert self._arrivals is not None
        following = self._arrivals.after(request, at_s)
        if following is not None:
            self._push(following[0], _Kind.FOLLOWED, following[1])

    # ---- calls in flight, and time

    def _horizon_s(self) -> float:
        """Nothing that a read in flight leads to happens earlier."""
        return min((work.bound_s for work in self._reading.values()), default=float("inf"))

    def _submit(self, call: Callable[..., _T], *arguments: object) -> Future[_T]:
        """Begin a call, as soon as there is a place for it; without threads it is over when this returns."""
        if self._pool is None:
            done: Future[_T] = Future()
            done.set_result(call(*arguments))
            self._over.put(done)
            return done
        while len(self._reading) + len(self._storing) >= self._in_flight:
            self._wait_for_calls()
        begun = self._pool.submit(call, *arguments)
        begun.add_done_callback(self._over.put)
        return begun

    def _wait_for_calls(self, timeout_s: float | None = None) -> None:
        """Wait for a call in flight, and take what is over.

        Raises:
            _Stopped: that was asked for.
        """
        self._take_over(timeout_s)
        self._go_on()

    def _take_over(self, timeout_s: float | None) -> None:
        """Take every call that is over; where none is, wait for one that long at most."""
        try:
            self._take(self._over.get(timeout=timeout_s))
            while True:
                self._take(self._over.get_nowait())
        except Empty:
            return

    def _take_what_ends(self) -> None:
        """Count what nodes have counted: the calls that end in time."""
        deadline_s = time.perf_counter() + _TAKING_S
        while (self._reading or self._storing) and (left_s := deadline_s - time.perf_counter()) > 0:
            self._take_over(left_s)
        self.measures.unfinished_calls = len(self._reading) + len(self._storing)

    def _take(self, call: Future[Any] | None) -> None:
        if call is None:
            return
        work = self._reading.pop(call, None)
        if work is not None:
            work.read = cast("Read", call.result())
            self._settle(work)
        elif call in self._storing:  # else it was over as it began, and was taken then
            self._take_stored(call)

    def _quiesce(self) -> None:
        """Wait until no call is in flight."""
        while self._reading or self._storing:
            self._wait_for_calls()

    def _keep_pace(self, at_s: float) -> None:
        """Wait until it is ``at_s`` on our own clock, where time is to run at a speed."""
        if self._speed is None:
            return
        due_s = self._began_s + at_s / self._speed
        while (left_s := due_s - time.perf_counter()) > 0:
            self._wait_for_calls(left_s)

    def _unclocked(self, happen: Callable[[], _T]) -> _T:
        """Let something happen for which traffic stands still.

        Raises:
            _Stopped: it has failed: the column ends here.
        """
        began_s = time.perf_counter()
        try:
            return happen()
        except SalternError as error:
            self.stop(error)
            raise _Stopped from error
        finally:
            self._began_s += time.perf_counter() - began_s
