"""One column in virtual time: requests come, wait for an engine, read what nodes have, are prefilled, and are stored.

::

    ARRIVED --> [engine's queue] --> lookup, transfer, prefill --> STORED (blocks are on the nodes)
                                                               --> FREE (the engine takes its next request)

A request is looked up when its engine turns to it, as an engine's scheduler does, so requests that wait in the same
queue find each other's blocks. Events of one instant happen in the order of their kinds: what is stored can be found by
whoever starts then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import chain
from typing import Final, cast

from dataplane.core.partition import Partition
from dataplane.replay.fleet import Fleet, Located, Prompt
from dataplane.replay.keys import block_keys
from dataplane.replay.node import CacheNode
from saltern.keys import BlockKey
from saltern.replay.arrivals import Arrivals
from saltern.replay.collector import Collector, Served
from saltern.replay.prefill import TimeModel
from saltern.replay.setup import ReplaySetup, Use
from saltern.replay.workers import Worker, Workers
from saltern.traces.request import TraceRequest

_NS_PER_S: Final = 1_000_000_000
#: Requests between two reports of progress.
_PROGRESS_EVERY: Final = 256


class _Kind(IntEnum):
    STORED = 0
    FREE = 1
    ARRIVED = 2  #: at its own time: the trace is read on
    FOLLOWED = 3  #: after its session's answer


# Told by number in the loop: an enum's member costs a descriptor call at each use in Python 3.11.
_STORED, _FREE, _ARRIVED = map(int, (_Kind.STORED, _Kind.FREE, _Kind.ARRIVED))


@dataclass(slots=True)  # not frozen, which makes making one three times as slow
class _Storing:
    """Blocks that are on their way to a node."""

    node: CacheNode
    partition: Partition
    keys: list[BlockKey]


#: (time, kind, serial, what): the least is next, and the serial is never equal.
_Event = tuple[float, int, int, "_Storing | Worker | TraceRequest"]


class Simulation:
    """Serves the requests of one column.

    Args:
        fleet: the cache nodes; None for none at all.
        partitions: of each tenant of the trace.
        begin_ns: reading of the nodes' clocks at second 0: later than any that they have seen.
        at_request: (number of requests that have arrived, what happens then): the failures.

    Attributes:
        block_accesses: blocks of prompts that were looked for on nodes.
        ssd_hit_tokens: prompt tokens that were read from SSD.
        on_served: told of every request that was answered and how many of its blocks were found.
    """

    def __init__(
        self,
        setup: ReplaySetup,
        block_tokens: int,
        *,
        fleet: Fleet | None,
        partitions: Mapping[str, Partition],
        collector: Collector,
        begin_ns: int = 1,
        failures: Sequence[tuple[int, Callable[[float], None]]] = (),
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._fleet, self._partitions = fleet, partitions
        self._collector, self._progress, self._begin_ns = collector, progress, begin_ns
        self._failures = list(failures)
        self._times = TimeModel(setup.model, setup.hardware)
        self._latency_s = setup.hardware.latency_s
        self._block_tokens = block_tokens
        self._block_bytes = block_tokens * setup.model.kv_bytes_per_token
        self._workers = Workers(setup, block_tokens, times=self._times, start=self._start)
        self._has_local = setup.engine_cache_tokens > 0
        self._is_chain = setup.use is Use.CHAIN
        self._events: list[_Event] = []
        self._serial = self._arrived = self._served = 0
        self._is_stopped = False
        self._arrivals: Arrivals | None = None
        self.block_accesses = 0
        self.ssd_hit_tokens = 0
        self.now_s = 0.0
        self.on_served: Callable[[TraceRequest, int], None] | None = None

    @property
    def now_ns(self) -> int:
        """The nodes' clock; equal times are told apart by the core."""
        return self._begin_ns + int(self.now_s * _NS_PER_S)

    @property
    def shed(self) -> int:
        """Requests that found a queue full."""
        return self._workers.shed

    def stop(self) -> None:
        """Let :meth:`run` begin no further request; also for signal handlers."""
        self._is_stopped = True

    def run(self, arrivals: Arrivals) -> bool:
        """Serve requests to the last, or until :meth:`stop`; returns whether it was the last.

        What is on its way to nodes by then is stored, so that they hold and have evicted what is counted.
        """
        self._arrivals = arrivals
        events = self._events
        first = arrivals.first()  # the next one that is read from the trace waits beside the heap
        while (events or first is not None) and not self._is_stopped:
            if first is not None and (not events or (first[0], _ARRIVED) < events[0]):
                self.now_s, request = first
                first = arrivals.first()
                self._arrive(request)
                continue
            self.now_s, kind, _, what = heappop(events)
            if kind == _STORED:
                self._store(cast("_Storing", what))
            elif kind == _FREE:
                self._workers.free(cast("Worker", what))
            else:
                self._arrive(cast("TraceRequest", what))
        is_whole = not events and first is None
        while events:
            at_s, kind, _, what = heappop(events)
            if kind == _STORED:
                self.now_s = at_s
                self._store(cast("_Storing", what))
        return is_whole

    def _push(self, at_s: float, kind: int, what: _Storing | Worker | TraceRequest) -> None:
        self._serial += 1
        heappush(self._events, (at_s, kind, self._serial, what))

    # ---- a request's way

    def _arrive(self, request: TraceRequest) -> None:
        self._arrived += 1
        while self._failures and self._arrived > self._failures[0][0]:
            self._failures.pop(0)[1](self.now_s)
        if not self._workers.arrive(request, self.now_s):
            self._answer(request, self.now_s)

    def _start(self, worker: Worker, request: TraceRequest, arrived_s: float) -> None:
        """The engine turns to a request: look up, read, prefill."""
        start_s = self.now_s
        tokens, ids = request.input_tokens, request.block_ids
        local = worker.local.prefix(request.tenant, ids) if self._has_local else 0
        found = None
        cached, ready_s, from_ssd = local, start_s, 0
        if self._fleet is not None and ids:
            load = worker.loads[request.tenant]
            prompt = Prompt(self._partitions[request.tenant], ids, block_keys(ids), local, load)
            found = self._fleet.locator.locate(prompt, start_s)
            cached = max(local, found.prefix)
            ready_s, from_ssd = self._read(prompt, found)
            self.block_accesses += len(ids)
        prefill_s = self._times.prefill_s(tokens, cached * self._block_tokens)
        done_s = ready_s + prefill_s
        if found is not None:
            self._send(prompt, found, done_s)
        if self._has_local:
            worker.local.use(request.tenant, ids)
        self._push(done_s, _FREE, worker)

        local_tokens = min(tokens, local * self._block_tokens)
        served = Served(
            tenant=request.tenant,
            arrival_s=arrived_s,
            prompt_tokens=tokens,
            output_tokens=request.output_tokens,
            hit_tokens=min(tokens, cached * self._block_tokens) - local_tokens,
            engine_hit_tokens=local_tokens,
            queue_s=start_s - arrived_s,
            transfer_s=ready_s - start_s,
            prefill_s=prefill_s,
            decode_s=self._times.decode_s(request.output_tokens),
            ssd_hit_tokens=min(tokens, from_ssd * self._block_tokens),
        )
        self.ssd_hit_tokens += served.ssd_hit_tokens
        self._collector.served(served)
        if self.on_served is not None:
            self.on_served(request, cached)
        self._answer(request, done_s + served.decode_s)
        self._served += 1
        if self._served % _PROGRESS_EVERY == 0:
            self._progress(self._served)

    def _read(self, prompt: Prompt, found: Located) -> tuple[float, int]:
        """Read from all nodes at once; returns when the last byte has come, and how many blocks were on SSD."""
        asked_s = ready_s = self.now_s + self._latency_s
        from_ssd = 0
        for node, positions in found.reads:
            if positions:
                size_bytes = len(positions) * self._block_bytes
                sent_s = node.out.carry(size_bytes, asked_s + self._latency_s)
                if not self._is_chain:
                    promoted = node.read(prompt.partition, _keys_at(prompt, positions), self.now_ns)
                    if promoted and node.ssd is not None:
                        # Sent on as it is read, so whichever of device and link is slower ends it.
                        fetched_s = node.ssd.out.carry(promoted * self._block_bytes, asked_s + self._latency_s)
                        sent_s = max(sent_s, fetched_s)
                        from_ssd += promoted
                ready_s = max(ready_s, sent_s)
                self._collector.moved(ready_s, read_bytes=size_bytes)
        return ready_s, from_ssd

    def _send(self, prompt: Prompt, found: Located, done_s: float) -> None:
        """Send nodes what they lack, once it is computed; the engine does not wait for it."""
        for node, positions in found.writes:
            size_bytes = len(positions) * self._block_bytes
            stored_s = node.into.carry(size_bytes, done_s) if positions else done_s
            self._collector.moved(stored_s, written_bytes=size_bytes)
            if not self._is_chain:
                self._push(stored_s, _STORED, _Storing(node, prompt.partition, _keys_at(prompt, positions)))
        if self._is_chain:
            used: dict[CacheNode, list[Sequence[int]]] = {}
            for node, positions in (*found.reads, *found.writes):
                used.setdefault(node, []).append(positions)
            for node, parts in used.items():
                whole = sum(map(len, parts)) == len(prompt.keys)
                keys = prompt.keys if whole else _keys_at(prompt, sorted(chain.from_iterable(parts)))
                self._push(done_s, _STORED, _Storing(node, prompt.partition, keys))

    def _store(self, storing: _Storing) -> None:
        node = storing.node
        if node.away_until_s > self.now_s:
            return
        if self._is_chain:
            node.use_chain(storing.partition, storing.keys, self.now_ns)
        else:
            node.store(storing.partition, storing.keys, self.now_ns)

    def _answer(self, request: TraceRequest, at_s: float) -> None:
        assert self._arrivals is not None
        following = self._arrivals.after(request, at_s)
        if following is not None:
            self._push(following[0], _Kind.FOLLOWED, following[1])


def _keys_at(prompt: Prompt, positions: Sequence[int]) -> list[BlockKey]:
    keys = prompt.keys
    if isinstance(positions, range):
        return keys[positions.start : positions.stop]
    return [keys[at] for at in positions]
