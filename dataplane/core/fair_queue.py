"""Whose turn is next: start-time fair queueing between flows, round-robin inside one (Goyal, Vin, Cheng, 1996).

Every flow has a *start tag*, the virtual time at which its next turn begins. The smallest one is served; what the turn
cost, divided by the flow's weight, moves the tag on. What a turn costs need not be known before it ends, which suits
scripts that run until they have to wait.

A flow that comes back from idleness starts a *head start* before the present virtual time, if it has left as much of
its share unused, and saves up no more than that: whoever asks for little is answered before those who ask for all they
can get, instead of taking turns with them (as sparse flows are in FQ-CoDel, RFC 8290).

While two flows have something to do all the time, what they are given, divided by their weights, never differs by more
than one turn of each, divided by its weight, and the head start. A flow with one item and one with a thousand are
alike.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")
#: Tags are integers; this many units of virtual time are one unit of work at weight 1.
_SCALE: Final = 1 << 10


class Flow(Generic[ItemT]):
    """One who takes turns, such as a tenant, with what it wants turns for.

    Attributes:
        weight: relative claim, at least 1; may be changed at any time and counts from the next charge on.
        work: all that it was charged, in whatever unit the caller counts; only ever grows.
        turns: how often it was served.
    """

    __slots__ = ("_in_heap", "_ready", "_start", "turns", "weight", "work")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.work = 0
        self.turns = 0
        self._start = 0
        self._in_heap = False
        self._ready: deque[ItemT] = deque()

    @property
    def waiting(self) -> int:
        """Items that wait for a turn."""
        return len(self._ready)


class FairQueue(Generic[ItemT]):
    """Ready items of any number of flows. Each operation costs O(log(flows that are ready)), whatever their items.

    Args:
        head_start: virtual time that a flow may have saved up: work at weight 1.
    """

    __slots__ = ("_head_start", "_heap", "_now", "_pushes", "_waiting")

    def __init__(self, head_start: int = 0) -> None:
        self._head_start = head_start * _SCALE
        #: (start tag, order of arrival, flow) of every flow with items; a tag may have grown since.
        self._heap: list[tuple[int, int, Flow[ItemT]]] = []
        self._pushes = 0
        self._waiting = 0
        #: Virtual time: the latest start tag of a turn that was given.
        self._now = 0

    def __len__(self) -> int:
        return self._waiting

    def others_wait(self, flow: Flow[ItemT]) -> bool:
        """Whether any flow but this one waits."""
        return self._waiting > len(flow._ready)

    def push(self, flow: Flow[ItemT], item: ItemT) -> None:
        """Have ``item`` wait behind the others of its flow. An item waits once: the caller sees to that."""
        if not flow._ready and flow._start < self._now - self._head_start:
            flow._start = self._now - self._head_start
        flow._ready.append(item)
        self._waiting += 1
        if not flow._in_heap:
            flow._in_heap = True
            self._pushes = order = self._pushes + 1
            heappush(self._heap, (flow._start, order, flow))

    def pop(self) -> tuple[Flow[ItemT], ItemT]:
        """Take out the item whose turn it is; tell with :meth:`charge` what the turn cost.

        Raises:
            IndexError: nothing waits.
        """
        heap = self._heap
        if len(heap) > 1:
            # A tag that has grown since, because its flow was charged, is put where it belongs.
            while (top := heap[0])[0] != top[2]._start:
                self._pushes = order = self._pushes + 1
                heapreplace(heap, (top[2]._start, order, top[2]))
        flow = heap[0][2]
        item = flow._ready.popleft()
        self._waiting -= 1
        self._now = max(self._now, flow._start)
        flow.turns += 1
        if not flow._ready:
            heappop(heap)
            flow._in_heap = False
        return flow, item

    def charge(self, flow: Flow[ItemT], work: int) -> None:
        """Account for ``work``, at least 0, done for a flow, in its turn or outside of any."""
        flow.work += work
        earliest = self._now - self._head_start
        start = flow._start if flow._start > earliest else earliest
        flow._start = start + work * _SCALE // flow.weight
