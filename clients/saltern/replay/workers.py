"""The engines that prefill: one prompt at a time each, a queue, and blocks of recent prompts in memory of their own."""

from __future__ import annotations

import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from saltern.placement import ReadLoad
from saltern.replay.prefill import TimeModel
from saltern.replay.setup import Routing
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
    """All engines, and which of them a request goes to."""

    def __init__(self, count: int, routing: Routing, *, local_blocks: int, block_tokens: int, times: TimeModel) -> None:
        self.all: Final = [Worker(number, LocalBlocks(local_blocks)) for number in range(count)]
        self._routing, self._block_tokens, self._times = routing, block_tokens, times
        self._turn = 0

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
