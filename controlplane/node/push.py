"""What goes out on the policy stream of one node: a snapshot first, then what changed since the node's last answer.

::

    opened ──> snapshot ──> wait for the answer ──> wait for a change ──> delta ──> wait for the answer ──> ...
                  ^                                                         │
                  └── refused, or what changed cannot be told ──────────────┘

One push is on its way at a time, so changes that come while a node is busy, slow or frozen go out together when it has
answered, and a delta always goes on from a version that the node has said it goes by. Streams that are at one version
share what is read and composed from it: a change costs one look at the database, however many nodes there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from controlplane.clock import Clock
from controlplane.db import Database
from controlplane.node import registry
from controlplane.node.lease_keeper import LeaseKeeper
from controlplane.node.policy_encode import encode_delta, encode_policy
from controlplane.node.policy_feed import PolicyFeed
from controlplane.node.policy_rows import PolicyRows, read_policy_rows
from controlplane.node.snapshot import compose_policy
from saltern.names import NodeId
from saltern.node.v1 import node_pb2

#: Reads of so many base versions are kept for streams that are a little later.
_READS_MAX: Final = 8


class PolicyReader:
    """Reads what changed, once for all streams of this process that are at the same version."""

    def __init__(self, database: Database, keeper: LeaseKeeper) -> None:
        self._database = database
        self._keeper = keeper
        self._reads: dict[int | None, asyncio.Task[PolicyRows]] = {}

    async def read(self, base_version: int | None, version_min: int) -> PolicyRows:
        """Rows of ``version_min`` or later, of what changed after ``base_version``; None for everything."""
        while True:
            reading = self._reads.get(base_version)
            if reading is None or _is_stale(reading, version_min):
                reading = self._begin(base_version)
            # One stream that ends must not take the read from the others.
            rows = await asyncio.shield(reading)
            if rows.version >= version_min:
                return rows

    def _begin(self, base_version: int | None) -> asyncio.Task[PolicyRows]:
        reading = asyncio.create_task(self._read(base_version), name="policy rows")
        self._reads[base_version] = reading
        if base_version is None:  # every tenant's rows: nothing to keep longer than somebody waits for it
            reading.add_done_callback(lambda done: self._forget(None, done))
        if len(self._reads) > _READS_MAX:
            oldest = next(iter(self._reads))
            if self._reads[oldest].done():
                del self._reads[oldest]
        return reading

    def _forget(self, base_version: int | None, done: asyncio.Task[PolicyRows]) -> None:
        if self._reads.get(base_version) is done:
            del self._reads[base_version]

    async def _read(self, base_version: int | None) -> PolicyRows:
        await self._keeper.settle()
        return await read_policy_rows(self._database, base_version)


def _is_stale(reading: asyncio.Task[PolicyRows], version_min: int) -> bool:
    if not reading.done():
        return False
    return reading.cancelled() or reading.exception() is not None or reading.result().version < version_min


@dataclass(slots=True)
class NodeStream:
    """How far one node is.

    Attributes:
        accepts_deltas: what the node said when it opened the stream; without it every push is a snapshot, and none
            waits for an answer.
        sent_version: of the last push; 0 where the next one is due whether there is a change or not.
        base_version: what a delta may go on from; None for a snapshot.
        answered: set while no push waits for its answer.
    """

    node: NodeId
    fencing_epoch: int
    accepts_deltas: bool
    sent_version: int = 0
    base_version: int | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.answered.set()

    def sent(self, version: int) -> None:
        self.sent_version = version
        if self.accepts_deltas:
            self.answered.clear()

    def take_answer(self, applied_version: int, *, is_refusal: bool) -> None:
        """The node has answered a push: it goes by ``applied_version``."""
        if is_refusal or applied_version != self.sent_version:
            if self.base_version is not None:
                self.sent_version = 0  # a snapshot at once; if that is refused too, with the next change
            self.base_version = None
        elif self.accepts_deltas:
            self.base_version = applied_version
        self.answered.set()


class PolicyPusher:
    """Composes what the streams of this process send."""

    def __init__(self, reader: PolicyReader, feed: PolicyFeed, keeper: LeaseKeeper, clock: Clock) -> None:
        self._reader = reader
        self._feed = feed
        self._keeper = keeper
        self._clock = clock

    async def pushes(
        self, stream: NodeStream, answers: asyncio.Task[None]
    ) -> AsyncIterator[node_pb2.StreamPolicyResponse]:
        """What to send, until the node closes its side.

        Args:
            answers: takes the node's answers to ``stream``; ends when the node closes its side.

        Raises:
            AbortedError: FENCED. UnavailableError: this process drains. What ``answers`` raises.
        """
        drained = asyncio.create_task(self._feed.drained(), name=f"policy stream of {stream.node}")
        try:
            while True:
                if not await _first(stream.answered.wait, answers, drained):
                    return
                if not await _first(lambda: self._feed.wait_past(stream.sent_version), answers, drained):
                    return
                push = await self._next(stream)
                if push is not None:
                    yield push
        finally:
            drained.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({drained})

    async def _next(self, stream: NodeStream) -> node_pb2.StreamPolicyResponse | None:
        rows = await self._reader.read(stream.base_version, stream.sent_version + 1)
        row = next((row for row in rows.nodes if row.id == stream.node), None)
        registry.require_epoch(row, stream.node, stream.fencing_epoch)
        if stream.base_version is not None and rows.base_version == stream.base_version:
            response = node_pb2.StreamPolicyResponse(delta=self._delta(rows, stream.node))
        else:
            stream.base_version = None
            # 10,000 tenants take a while: other calls go on meanwhile.
            response = node_pb2.StreamPolicyResponse(
                snapshot=await asyncio.to_thread(self._snapshot, rows, stream.node)
            )
        stream.sent(rows.version)
        return response

    def _snapshot(self, rows: PolicyRows, node: NodeId) -> node_pb2.PolicySnapshot:
        return encode_policy(compose_policy(rows, node), rows.key_set, self._clock(), self._keeper.lease_duration)

    def _delta(self, rows: PolicyRows, node: NodeId) -> node_pb2.PolicyDelta:
        assert rows.base_version is not None and rows.changed is not None
        return encode_delta(
            compose_policy(rows, node),
            rows.base_version,
            rows.changed,
            key_set=rows.key_set,
            create_time=self._clock(),
            lease_duration=self._keeper.lease_duration,
        )


async def _first(
    wait: Callable[[], Awaitable[object]], answers: asyncio.Task[None], drained: asyncio.Task[None]
) -> bool:
    """Wait; False if the node has closed its side meanwhile. Raises what ended its answers, or the drain."""
    waiting = asyncio.ensure_future(wait())
    try:
        await asyncio.wait({waiting, answers, drained}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    for ended in (answers, drained):
        if ended.done():
            ended.result()
            return False
    waiting.result()
    return True
