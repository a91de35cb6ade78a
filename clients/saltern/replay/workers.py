"""The engines that prefill: one prompt at a time each, a queue, and blocks of recent prompts in memory of their own."""

from __future__ import annotations

import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from saltern.placement import ReadLoad
from saltern.replay.prefill import TimeModel
from saltern.replay.setup import ReplaySetup, Routing
from saltern.traces.request import TraceRequest


class LocalBlocks:
    """An engine's own prefix cache: LRU over blocks, tails first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._held: OrderedDict[tuple[str, int], None] = OrderedDict()

    def prefix(self, tenant: str, block_ids: Sequence[int]) -> int:
        """Blocks of a prompt that are there, from the first one on."""
        if not self._held:
            return 0
        return next(
            (number for number, block in enumerate(block_ids) if (tenant, block) not in self._held), len(block_ids)
        )

    def use(self, tenant: str, block_ids: Sequence[int]) -> None:
        """A prompt was computed: its blocks are the most recent, the head before the tail."""
        held = self._held
        for block in reversed(block_ids):
            held[tenant, block] = None
            held.move_to_end((tenant, block))
        while len(held) > self._capacity_blocks:
            held.popitem(last=False)


@dataclass(slots=True, eq=False)
class Worker:
    """One engine.

    Attributes:
        backlog_s: prefill that waits or runs, as it was estimated on arrival.
        loads: what its client of each tenant has read from each node.
    """

    number: int
    local: LocalBlocks
    waiting: deque[tuple[TraceRequest, float, float]] = field(default_factory=deque)  # request, arrival, estimate
    is_busy: bool = False
    backlog_s: float = 0.0
    loads: defaultdict[str, ReadLoad] = field(default_factory=lambda: defaultdict(ReadLoad))


class Workers:
    """All engines: which of them a request goes to, and when it is its turn there.

    Args:
        start: an engine turns to a request, which arrived at a second.

    Attributes:
        shed: requests that found a queue full.
    """

    def __init__(
        self,
        setup: ReplaySetup,
        block_tokens: int,
        *,
        times: TimeModel,
        start: Callable[[Worker, TraceRequest, float], None],
    ) -> None:
        local_blocks = setup.engine_cache_tokens // block_tokens if block_tokens else 0
        self.all: Final = [Worker(number, LocalBlocks(local_blocks)) for number in range(setup.engines)]
        self._routing, self._queue_max = setup.routing, setup.queue_max
        self._block_tokens, self._times, self._start = block_tokens, times, start
        self._turn = 0
        self.shed = 0

    def arrive(self, request: TraceRequest, now_s: float) -> bool:
        """Start a request, or let it wait; False if it is turned away."""
        worker, estimate_s = self.route(request)
        if not worker.is_busy:
            worker.is_busy = True
            self._start(worker, request, now_s)
        elif len(worker.waiting) < self._queue_max:
            worker.backlog_s += estimate_s
            worker.waiting.append((request, now_s, estimate_s))
        else:
            self.shed += 1
            return False
        return True

    def free(self, worker: Worker) -> None:
        """An engine has prefilled: it turns to the next request that waits for it, if there is one."""
        if worker.waiting:
            request, arrived_s, estimate_s = worker.waiting.popleft()
            worker.backlog_s -= estimate_s
            self._start(worker, request, arrived_s)
        else:
            worker.is_busy = False

    def route(self, request: TraceRequest) -> tuple[Worker, float]:
        """The engine for a request, and its estimate of the prefill there."""
        match self._routing:
            case Routing.ROUND_ROBIN:
                worker = self.all[self._turn]
                self._turn = (self._turn + 1) % len(self.all)
            case Routing.SESSION:
                first = request.block_ids[0] if request.block_ids else 0
                name = f"{request.tenant}\n{request.session or first}"
                worker = self.all[zlib.crc32(name.encode()) % len(self.all)]
            case Routing.PREFIX:
                return min(
                    ((worker, self._estimate_s(worker, request)) for worker in self.all),
                    key=lambda choice: choice[0].backlog_s + choice[1],
                )
        return worker, 0.0

    def _estimate_s(self, worker: Worker, request: TraceRequest) -> float:
        cached = worker.local.prefix(request.tenant, request.block_ids) * self._block_tokens
        return self._times.prefill_s(request.input_tokens, cached)
