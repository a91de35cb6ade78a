"""Where posted work ends: one completion queue with its own channel, for an event loop."""

from __future__ import annotations

import itertools
import select
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from saltern.errors import ResourceExhaustedError
from saltern.rdma.bindings.interface import Handle, RawCompletion
from saltern.rdma.device import Device
from saltern.rdma.faults import verbs
from saltern.rdma.resource_tree import Resource
from saltern.rdma.values import Completion, CompletionStatus

if TYPE_CHECKING:
    from saltern.rdma.queue_pair import QueuePair

COLLECT_LIMIT: Final = 64
#: Entries polled at once: a list of that many objects is made each time.
_POLL_LIMIT: Final = 64


@dataclass(frozen=True, slots=True)
class _Posted:
    queue_pair: QueuePair
    token: Hashable
    requests: int
    is_receive: bool


class Completions(Resource):
    """Completions of the queue pairs that were made with it, each posted chain and each receive exactly once.

    Its descriptor becomes readable when there is something to collect. Then::

        while len(batch := completions.collect(limit)) == limit: ...

    that is: call ``collect`` until it returns fewer than asked for; what is left over makes no new event. Queue pairs
    reserve room here when they are made, so that it cannot overflow: even a flush of everything has its place.

    Args:
        capacity: work requests and receives of all its queue pairs together.

    Raises:
        ResourceExhaustedError: RDMA_QUEUE_TOO_LARGE, RDMA_RESOURCES.
    """

    kind: ClassVar[str] = "completion queue"
    close_rank: ClassVar[int] = 2

    def __init__(self, device: Device, *, capacity: int) -> None:
        super().__init__(device.binding, device)
        if not 0 < capacity <= device.limits.max_completions:
            raise ResourceExhaustedError(
                f"a completion queue of {capacity} entries: {device.name} takes 1 to {device.limits.max_completions}",
                reason="RDMA_QUEUE_TOO_LARGE",
                hint="use fewer requests per queue pair, or several completion queues",
            )
        self.device = device
        self.capacity = capacity
        self._reserved = 0
        self._numbers = itertools.count(1)
        self._posted: dict[int, _Posted] = {}
        self._backlog: deque[Completion] = deque()
        with verbs(f"making a completion channel of {device.name}"):
            self._channel, self._descriptor = self._binding.create_channel(device.handle)
        try:
            with verbs(f"making a completion queue of {capacity} entries"):
                self._open(self._binding.create_completions(device.handle, self._channel, capacity))
            with verbs("asking for completion events"):
                self._binding.arm(self.handle)
        except BaseException:
            if self._handle is None:
                self._binding.close_channel(self._channel)
            else:
                self.close()
            raise

    def fileno(self) -> int:
        """Descriptor of the channel, non-blocking, for ``select`` or ``add_reader``; this object keeps owning it."""
        self.handle  # noqa: B018 - raises where it is closed
        return self._descriptor

    def collect(self, limit: int = COLLECT_LIMIT) -> list[Completion]:
        """At most ``limit`` completions, in the order in which they ended; never blocks. See the class for the loop.

        A failed chain comes once, with the status of the request that failed first, and its queue pair is broken from
        then on: the chains behind it follow as FLUSHED.
        """
        handle = self.handle
        with verbs("collecting RDMA completions"):
            # Event, arm, poll: in this order nothing that ends in between is overlooked.
            while self._binding.take_event(self._channel, handle):
                pass
            self._binding.arm(handle)
            found: list[Completion] = []
            while len(found) < limit:
                if self._backlog:
                    found.append(self._backlog.popleft())
                elif not self._poll(min(_POLL_LIMIT, limit - len(found))):
                    break
        return found

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there may be something to collect (True) or the time is over (False). Releases the GIL."""
        if self._backlog:
            return True
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else max(0, timeout_s) * 1000))

    @property
    def outstanding(self) -> int:
        """Chains and receives that were posted and have not been collected."""
        return len(self._posted) + len(self._backlog)

    def _poll(self, limit: int) -> bool:
        """Move what the device has into the backlog; False where that was nothing."""
        entries = self._binding.poll(self.handle, limit)
        for entry in entries:
            # All requests of a chain have its number. Where several complete, because it failed, the first one counts.
            posted = self._posted.pop(entry.request_id, None)
            if posted is None:
                continue
            ended = _completion(entry, posted)
            posted.queue_pair._settle(posted.requests, is_receive=posted.is_receive, ok=ended.ok)
            self._backlog.append(ended)
        return bool(entries)

    def _reserve(self, requests: int) -> None:
        if self._reserved + requests > self.capacity:
            raise ResourceExhaustedError(
                f"{requests} more requests do not fit a completion queue with room for {self.capacity}, "
                f"{self._reserved} of them taken",
                reason="RDMA_QUEUE_FULL",
                hint="make the completion queue larger, or another one",
            )
        self._reserved += requests

    def _post(self, queue_pair: QueuePair, token: Hashable, requests: int, *, is_receive: bool = False) -> int:
        number = next(self._numbers)
        self._posted[number] = _Posted(queue_pair, token, requests, is_receive)
        return number

    def _withdraw(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._posted.pop(number, None)

    def _part(self, queue_pair: QueuePair, requests: int) -> None:
        """A queue pair was destroyed: what it still had posted has ended, whether or not the device says so."""
        if not self._closed:
            # Before its room is given to another one, its entries must be out of the queue.
            while self._poll(_POLL_LIMIT):
                pass
        gone = [number for number, posted in self._posted.items() if posted.queue_pair is queue_pair]
        for number in gone:
            posted = self._posted.pop(number)
            self._backlog.append(
                Completion(posted.token, queue_pair.qpn, CompletionStatus.FLUSHED, is_receive=posted.is_receive)
            )
        self._reserved -= requests

    def _destroy(self, handle: Handle) -> None:
        try:
            self._binding.destroy_completions(handle)
        finally:
            self._binding.close_channel(self._channel)


def _completion(entry: RawCompletion, posted: _Posted) -> Completion:
    try:
        status = CompletionStatus(entry.status)
    except ValueError:
        status = CompletionStatus.GENERAL
    return Completion(
        token=posted.token,
        qpn=entry.qpn,
        status=status,
        is_receive=posted.is_receive,
        # Of a failed entry only number, status and queue pair mean anything.
        immediate=entry.immediate if posted.is_receive and entry.status == 0 else None,
        byte_count=entry.byte_count if posted.is_receive and entry.status == 0 else 0,
        vendor_error=entry.vendor_error,
    )
