"""Signs where each audit chain stands, once a minute where it has moved, and keeps that outside the database (I11).

What it signs it has verified: from the event that it signed last to the newest one. A chain that does not continue from
there was changed in the database; then nothing of it is signed any more, and the log says so at every look, because a
signature would make the change look true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, datetime, timedelta
from time import time
from typing import Final

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit.checkpoint_keys import CheckpointKey
from controlplane.audit.checkpoint_sinks import CheckpointSink
from controlplane.audit.stretches import find_stretch, read_events
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, ServiceScope, ServiceTask
from controlplane.rpc import to_saltern_error
from saltern.audit.chain import ChainHead, ChainWalk, EventHash, genesis
from saltern.audit.checkpoints import NO_DIGEST, Checkpoint, sign_checkpoint
from saltern.errors import DataLossError

STOP_TIMEOUT_S: Final = 5.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
#: The newest event of every chain: from index entry to index entry, never over the events in between.
_HEADS: Final = text(
    """
    WITH RECURSIVE chains(chain) AS (
        (SELECT chain FROM audit_events ORDER BY chain LIMIT 1)
        UNION ALL
        SELECT (SELECT e.chain FROM audit_events e WHERE e.chain > chains.chain ORDER BY e.chain LIMIT 1)
        FROM chains WHERE chains.chain IS NOT NULL
    )
    SELECT chains.chain, head.sequence, head.hash
    FROM chains CROSS JOIN LATERAL (
        SELECT sequence, hash FROM audit_events e WHERE e.chain = chains.chain ORDER BY sequence DESC LIMIT 1
    ) AS head
    """
)

_log = structlog.get_logger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of every chain of a deployment to one sink.

    After a rotation of the key each chain is signed anew with the new one, also where it has not moved: so the newest
    checkpoint of a chain is never of a key that retired long ago, and whoever has stolen such a key has nothing.

    Attributes:
        broken: chains that do not continue what was signed, with why.
        failure: reason why the last look did not succeed; empty if it did.
        failures: looks that did not. last_success_s: ``time.time`` of the last one that did; 0.0 for none.
    """

    def __init__(
        self,
        database: Database,
        current_key: Callable[[], Awaitable[CheckpointKey]],
        sink: CheckpointSink,
        clock: Clock = utc_now,
    ) -> None:
        self._database = database
        self._current_key = current_key
        self._key_id = ""
        self._sink = sink
        self._clock = clock
        self._signed: dict[str, ChainHead] = {}  # what this process knows to be signed
        self._signed_with_key: set[str] = set()  # chains whose newest checkpoint is of the key that signs now
        self._running: asyncio.Task[None] | None = None
        self.broken: dict[str, str] = {}
        self.failure = ""
        self.failures = 0
        self.last_success_s = 0.0

    def start(self, interval_s: float) -> None:
        """Sign every ``interval_s`` seconds from now on."""
        self._running = asyncio.create_task(self._run(interval_s), name="audit checkpoints")

    async def stop(self) -> None:
        """Sign once more, for as long as ``STOP_TIMEOUT_S``, and end."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.try_sign()

    async def _run(self, interval_s: float) -> None:
        """Through every absence of the database or the disk."""
        while True:
            await self.try_sign()
            await asyncio.sleep(interval_s)

    async def try_sign(self) -> None:
        """As :meth:`sign_moved`; what goes wrong is logged, and the next time makes up for it."""
        try:
            await self.sign_moved()
        except OSError as error:
            self._failed("CHECKPOINT_SINK_UNUSABLE", error.strerror or "")
        except Exception as error:
            self._failed(to_saltern_error(error, method=type(self).__name__).reason, "")
        else:
            self.failure, self.last_success_s = "", time()

    def _failed(self, reason: str, detail: str) -> None:
        self.failure = reason
        self.failures += 1
        _log.error("checkpoints not written", reason=reason, detail=detail)

    async def sign_moved(self) -> list[Checkpoint]:
        """Sign every chain that has moved since its last checkpoint; return what was signed.

        Raises:
            OSError, SalternError: the sink cannot be used.
            sqlalchemy.exc.SQLAlchemyError: the database cannot be reached.
        """
        key = await self._current_key()
        if key.id != self._key_id:
            self._key_id = key.id
            self._signed_with_key.clear()
        async with self._transaction() as session:
            heads = {
                row.chain: ChainHead(row.sequence, EventHash(bytes(row.hash))) for row in await session.execute(_HEADS)
            }
        moved = [
            chain
            for chain, head in heads.items()
            if self._signed.get(chain) != head or chain not in self._signed_with_key
        ]
        for chain in self._signed.keys() - heads.keys():
            self._report(chain, "events that were signed are not there any more")
        signed: list[Checkpoint] = []
        for chain in sorted(moved):
            try:
                checkpoint = await self._sign(chain)
            except DataLossError as error:
                self._report(chain, error.message)
                continue
            self.broken.pop(chain, None)
            if checkpoint is not None:
                signed.append(checkpoint)
        return signed

    async def _sign(self, chain: str) -> Checkpoint | None:
        """Sign one chain, unless somebody else just does; raises DataLossError if it does not continue."""
        # In a thread: a checkpoint is some milliseconds of disk.
        before = await asyncio.to_thread(self._sink.last, chain)
        start = before.head if before is not None else genesis(chain)
        known = self._signed.get(chain)
        if known is not None and known.sequence > start.sequence:
            raise DataLossError(f"the checkpoint of event {known.sequence} was written and is not there any more")
        head = await self._verified_head(chain, start)
        key = await self._current_key()  # after the long part: one that has just retired signs no more
        if head == start and before is not None and before.key_id == key.id:
            self._signed[chain] = head
            self._signed_with_key.add(chain)
            return None
        checkpoint = await asyncio.to_thread(self._write, key, chain, before, head)
        if checkpoint is not None:
            self._signed[chain] = head
            self._signed_with_key.add(chain)
        return checkpoint

    async def _verified_head(self, chain: str, start: ChainHead) -> ChainHead:
        """The newest event; raises DataLossError unless the chain leads there from ``start``, event by event."""
        walk = ChainWalk(chain, start)
        async with self._transaction() as session:
            last = (await find_stretch(session, chain, 1)).last
            # What is signed was committed before, so a chain never ends before it.
            at_start = await read_events(session, chain, start.sequence, start.sequence)
        if start.sequence > 0 and [event.hash for event in at_start] != [start.hash.hex()]:
            raise DataLossError(f"event {start.sequence}, which was signed, is another one or not there any more")
        while walk.at.sequence < last:
            async with self._transaction() as session:
                events = await read_events(session, chain, walk.at.sequence + 1, last)
            if not events:
                raise DataLossError(f"event {walk.at.sequence + 1} is not there any more")
            for event in events:
                faults = walk.step(event.to_chained_record())
                if faults:
                    raise DataLossError(f"event {event.sequence} is {faults[0].value}")
        return walk.at

    def _write(self, key: CheckpointKey, chain: str, before: Checkpoint | None, head: ChainHead) -> Checkpoint | None:
        with self._sink.writing():
            if self._sink.last(chain) != before:
                return None  # another control plane was faster
            time_us = (self._clock() - _EPOCH) // _MICROSECOND
            previous = before.digest if before is not None else NO_DIGEST
            checkpoint = sign_checkpoint(key.private_key, chain, head, time_us=time_us, previous=previous)
            return checkpoint if self._sink.append(checkpoint) else None

    def _report(self, chain: str, why: str) -> None:
        self.broken[chain] = why
        _log.error("audit chain was changed in the database, or its checkpoints were; not signed", chain=chain, why=why)

    def _transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        return self._database.transaction(ServiceScope(ServiceTask.AUDIT_CHECKPOINT))
