"""Storing: blocks are copied out when their step ends and sent from a bounded queue; what does not fit is dropped.

The engine never waits for the cache: its blocks are free to be overwritten as soon as they are copied (no delayed
free), and with no room to copy to they are not stored. A chain that lost a block is not continued, since nothing
behind a gap could be found.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from saltern.errors import SalternError
from saltern.keys import BlockHash
from saltern.results import AlreadyStored, PutResult, Stored
from saltern.vllm.chains import WorkerChain
from saltern.vllm.clients_in_use import ClientsInUse
from saltern.vllm.metadata import SaveJob
from saltern.vllm.pages import Copied, Move, Pages
from saltern.vllm.staging import StagingArea
from saltern.vllm.stats import Tally

logger = logging.getLogger(__name__)

#: How long ``close`` lets the queue run dry.
_DRAIN_S: Final = 5.0


class _Entry(NamedTuple):
    """One entry in the staging area: where it is there, and where in its chain."""

    slot: int
    position: int
    size_bytes: int


class _Batch(NamedTuple):
    """Entries of one chain on their way."""

    chain: WorkerChain
    chain_hashes: list[BlockHash]
    entries: list[_Entry]
    copied: Copied


class Saves:
    """Stores blocks of chains, in a thread of its own.

    Args:
        shard: the part of each block that this rank has.
        deadline_ms: of each batch.
    """

    def __init__(
        self,
        clients: ClientsInUse,
        pages: Pages,
        staging: StagingArea,
        tally: Tally,
        *,
        shard: int,
        deadline_ms: float,
    ) -> None:
        self._clients = clients
        self._pages = pages
        self._staging = staging
        self._tally = tally
        self._shard = shard
        self._deadline_ms = deadline_ms
        # Bounded by the staging area: a batch holds a slot at least.
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._in_flight = 0
        self._thread = threading.Thread(target=self._send_all, name="saltern-save", daemon=True)
        self._thread.start()

    def save(self, job: SaveJob, chain: WorkerChain) -> None:
        """Copy a job's blocks out and queue them; returns when the engine may overwrite them. Head first."""
        if not chain.is_found(self._position(chain, job, 0)):
            self._drop(chain, job, 0)
            return
        groups = len(job.block_ids)
        slots = self._staging.take(len(job.blocks) * groups)
        whole = len(slots) // groups
        if whole < len(job.blocks):
            self._drop(chain, job, whole)
            self._staging.give_back(slots[whole * groups :])
        if whole:
            self._queue_batch(job, chain, slots[: whole * groups])

    def _queue_batch(self, job: SaveJob, chain: WorkerChain, slots: list[int]) -> None:
        groups, entry_bytes = len(job.block_ids), self._pages.entry_bytes
        entries: list[_Entry] = []
        moves: list[Move] = []
        for number, slot in enumerate(slots):
            index, group = divmod(number, groups)
            position = chain.layout.position(job.blocks[index], group, self._shard)
            entries.append(_Entry(slot, position, entry_bytes[group]))
            moves.append(Move(group, job.block_ids[group][index], self._staging.address_of(slot)))
        started_s = time.monotonic()
        copied = self._pages.copy_out(moves)
        self._tally.took("copy_out_seconds", time.monotonic() - started_s)
        with self._idle:
            self._in_flight += 1
        self._queue.put(_Batch(chain, chain.hashes(), entries, copied))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued is stored or refused; returns whether it is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._in_flight, timeout_s)

    def close(self) -> None:
        """Send what is queued, for a few seconds at most, and stop."""
        self.drain(_DRAIN_S)
        self._queue.put(None)
        self._thread.join(_DRAIN_S + self._deadline_ms / 1000)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                self._send(batch)
            except SalternError as error:
                logger.info("save not made: %s", error)  # the client was closed: its tenant had to make room
                batch.chain.lose(batch.entries[0].position)
            except Exception:
                logger.exception("save failed unexpectedly")
                batch.chain.lose(batch.entries[0].position)
            finally:
                self._staging.give_back([entry.slot for entry in batch.entries])
                with self._idle:
                    self._in_flight -= 1
                    self._idle.notify_all()

    def _send(self, batch: _Batch) -> None:
        batch.copied.wait()
        first = batch.entries[0].position
        # Only here: to find a client may take the time of a verification, which no step is to wait for.
        client = self._clients.get(batch.chain.ticket) if batch.chain.is_found(first) else None
        if client is None:
            batch.chain.lose(first)
            self._tally.add(save_dropped_blocks=len(batch.entries))
            return
        started_s = time.monotonic()
        items = [(entry.position, self._staging.view(entry.slot, entry.size_bytes)) for entry in batch.entries]
        chain = client.chain(batch.chain_hashes, reused_blocks=batch.chain.reused_entries)
        results = chain.put_many(items, deadline_ms=self._deadline_ms)
        self._tally.took("save_seconds", time.monotonic() - started_s)
        self._count(batch, results)

    def _count(self, batch: _Batch, results: Sequence[PutResult]) -> None:
        stored, known, refused = [], 0, 0
        for entry, result in zip(batch.entries, results, strict=True):
            if isinstance(result, Stored):
                stored.append(entry.size_bytes)
            elif isinstance(result, AlreadyStored):
                known += 1
            else:
                refused += 1
                batch.chain.lose(entry.position)
        self._tally.add(
            save_blocks=len(stored), save_bytes=sum(stored), save_known_blocks=known, save_refused_blocks=refused
        )

    def _drop(self, chain: WorkerChain, job: SaveJob, first: int) -> None:
        """Give up a job's blocks from the ``first`` one on."""
        chain.lose(self._position(chain, job, first))
        self._tally.add(save_dropped_blocks=len(job.blocks) - first)

    def _position(self, chain: WorkerChain, job: SaveJob, index: int) -> int:
        return chain.layout.position(job.blocks[index], 0, self._shard)
