"""When requests come: by their own times, or when their session has had its answer and thought."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from saltern.errors import InvalidArgumentError, SalternError
from saltern.replay.setup import ToolDelays
from saltern.traces.request import Arrival, Trace, TraceRequest

#: Blocks of prompts that are held where sessions wait for answers: 8 bytes each.
HELD_BLOCKS_MAX: Final = 100_000_000


class Arrivals:
    """The requests of a trace as they become due.

    Open loop: each at its own time, read as it is needed. Closed loop: a request with a think time is due that long
    after its session's previous answer, earlier or later than it was recorded; all of the trace is held for it.

    Attributes:
        error: why no more requests could be read; those before it are served all the same.
    """

    def __init__(self, trace: Trace, delays: ToolDelays) -> None:
        self.error: SalternError | None = None
        self._delays = delays
        self._following: dict[tuple[str, str], deque[TraceRequest]] = {}
        self._unprompted: Iterator[TraceRequest] = iter(trace)
        if trace.arrival is Arrival.CLOSED_LOOP:
            self._unprompted = iter(self._hold(trace))

    def _hold(self, trace: Trace) -> list[TraceRequest]:
        unprompted = []
        begun: set[tuple[str, str]] = set()
        held_blocks = 0
        while (request := self._read()) is not None:
            held_blocks += len(request.block_ids)
            if held_blocks > HELD_BLOCKS_MAX:
                self.error = InvalidArgumentError(
                    f"trace {trace.name!r} has more than {HELD_BLOCKS_MAX} blocks in sessions that wait for answers",
                    reason="TRACE_TOO_LARGE",
                    hint="clip the trace (--requests N), or re-block it to larger blocks",
                )
                break
            conversation = request.tenant, request.session
            if request.think_s is None or conversation not in begun:
                unprompted.append(request)
            else:
                self._following.setdefault(conversation, deque()).append(request)
            if request.session:
                begun.add(conversation)
        return unprompted

    def _read(self) -> TraceRequest | None:
        try:
            return next(self._unprompted, None)
        except SalternError as error:
            self.error = error
            return None

    def first(self) -> tuple[float, TraceRequest] | None:
        """The next request that waits for nobody, with its time; None after the last."""
        request = self._read()
        return None if request is None else (request.arrival_s, request)

    def after(self, answered: TraceRequest, at_s: float) -> tuple[float, TraceRequest] | None:
        """The request that waited for this one's answer, with its time."""
        if not self._following:
            return None
        waiting = self._following.get((answered.tenant, answered.session))
        if not waiting:
            return None
        request = waiting.popleft()
        return at_s + self._delays.applied(request.think_s or 0.0), request
