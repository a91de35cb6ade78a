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
from datetime import datetime, timedelta
from typing import Final

from controlplane.clock import Clock
from controlplane.db import Database, models
from controlplane.node import registry
from controlplane.node.lease_keeper import LeaseKeeper
from controlplane.node.policy_encode import TenantEncoder, encode_delta, encode_policy
from controlplane.node.policy_feed import PolicyFeed
from controlplane.node.policy_rows import read_policy_rows
from controlplane.node.snapshot import PolicyComposer
from saltern.names import NodeId
from saltern.node.v1 import node_pb2

#: Reads of so many base versions are kept for streams that are a little later.
_READS_MAX: Final = 8


class View:
    """What was read in one go, to be composed and encoded for every node that is at the same version."""

    def __init__(self, composer: PolicyComposer) -> None:
        self.rows = composer.rows
        self._composer = composer
        self._encoder = TenantEncoder()

    def snapshot(self, node: NodeId, create_time: datetime, lease_duration: timedelta) -> node_pb2.PolicySnapshot:
        """The whole policy of ``node``; the rows are of every tenant."""
        policy = self._composer.policy(node)
        return encode_policy(policy, self.rows.key_set, create_time, lease_duration, encoder=self._encoder)

    def delta(self, node: NodeId, create_time: datetime, lease_duration: timedelta) -> node_pb2.PolicyDelta:
        """What changed for ``node``; the rows are of what changed."""
        assert self.rows.base_version is not None and self.rows.changed is not None
        return encode_delta(
            self._composer.policy(node),
            self.rows.base_version,
            self.rows.changed,
            key_set=self.rows.key_set,
            create_time=create_time,
            lease_duration=lease_duration,
            encoder=self._encoder,
        )


class PolicyReader:
    """Reads what changed, once for all streams of this process that are at the same version."""

    def __init__(self, database: Database, keeper: LeaseKeeper) -> None:
        self._database = database
        self._keeper = keeper
        self._reads: dict[int | None, asyncio.Task[View]] = {}

    async def read(self, base_version: int | None, version_min: int) -> View:
        """Rows of ``version_min`` or later, of what changed after ``base_version``; None for everything."""
        while True:
            reading = self._reads.get(base_version)
            if reading is None or _is_stale(reading, version_min):
                reading = self._begin(base_version)
            # One stream that ends must not take the read from the others.
            view = await asyncio.shield(reading)
            if view.rows.version >= version_min:
                return view

    def _begin(self, base_version: int | None) -> asyncio.Task[View]:
        reading = asyncio.create_task(self._read(base_version), name="policy rows")
        self._reads[base_version] = reading
        if base_version is None:  # every tenant's rows: nothing to keep longer than somebody waits for it
            reading.add_done_callback(lambda done: self._forget(None, done))
        if len(self._reads) > _READS_MAX:
            oldest = next(iter(self._reads))
            if self._reads[oldest].done():
                del self._reads[oldest]
        return reading

    def _forget(self, base_version: int | None, done: asyncio.Task[View]) -> None:
        if self._reads.get(base_version) is done:
            del self._reads[base_version]

    async def _read(self, base_version: int | None) -> View:
        if base_version is None:
            await self._keeper.settle()
        else:
            await self._keeper.settle_changed()
        rows = await read_policy_rows(self._database, base_version)
        if rows.changed is not None:
            return View(PolicyComposer(rows))
        # 10,000 tenants take a while: other calls go on meanwhile.
        return View(await asyncio.to_thread(PolicyComposer, rows))


def _is_stale(reading: asyncio.Task[View], version_min: int) -> bool:
    if not reading.done():
        return False
    return reading.cancelled() or reading.exception() is not None or reading.result().rows.version < version_min


@dataclass(slots=True)
class NodeStream:
    """How far one node is.

    Attributes:
        accepts_deltas: what the node said when it opened the stream; without it every push is a snapshot, and none
            waits for an answer.
        opened_version: of when it opened: what is older may know nothing of the node's registration.
        sent_version: of the last push; 0 where the next one is due whether there is a change or not.
        base_version: what a delta may go on from; None for a snapshot.
        answered: set while no push waits for its answer.
    """

    node: NodeId
    fencing_epoch: int
    accepts_deltas: bool
    opened_version: int = 0
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
        version_min = max(stream.sent_version + 1, stream.opened_version)
        view = await self._reader.read(stream.base_version, version_min)
        row = self._row_of(stream, view)
        if stream.base_version is not None and row.lease_version > stream.base_version:
            # The node's lease began anew: what it has of every tenant may be another, and the rows do not say so.
            stream.base_version = None
            view = await self._reader.read(None, view.rows.version)
            self._row_of(stream, view)
        rows, now, lease_duration = view.rows, self._clock(), self._keeper.lease_duration
        if stream.base_version is not None and rows.base_version == stream.base_version:
            response = node_pb2.StreamPolicyResponse(delta=view.delta(stream.node, now, lease_duration))
        else:
            stream.base_version = None
            snapshot = await asyncio.to_thread(view.snapshot, stream.node, now, lease_duration)
            response = node_pb2.StreamPolicyResponse(snapshot=snapshot)
        stream.sent(rows.version)
        return response

    def _row_of(self, stream: NodeStream, view: View) -> models.Node:
        row = next((row for row in view.rows.nodes if row.id == stream.node), None)
        return registry.require_epoch(row, stream.node, stream.fencing_epoch)


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
