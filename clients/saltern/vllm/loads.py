"""Loading: one batched get for each request, whole blocks, and an end that is reported exactly once, always."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from saltern.errors import SalternError
from saltern.results import Hit
from saltern.vllm.chains import WorkerChain
from saltern.vllm.clients_in_use import ClientsInUse
from saltern.vllm.layout import NULL_BLOCK
from saltern.vllm.metadata import LoadJob
from saltern.vllm.pages import Move, Pages
from saltern.vllm.staging import StagingArea
from saltern.vllm.stats import Tally

logger = logging.getLogger(__name__)

#: Waiting for room to load into, in load deadlines: another load has it for one deadline at most.
_ROOM_DEADLINES: Final = 2.0


class EndedLoad(NamedTuple):
    """A load that is over.

    Attributes:
        failed_block_ids: of the first group, from the first block on that could not be had; empty where all came.
    """

    request_id: str
    failed_block_ids: tuple[int, ...]


class _Wanted(NamedTuple):
    """One entry to load: which block of the job, and where it goes."""

    block: int
    group: int
    block_id: int


class Loads:
    """Loads chains into the engine's pages, in threads of its own or at once.

    Args:
        shard: the part of each block that this rank has.
        deadline_ms: of each batch.
        threads: loads at the same time; 0 loads in the caller's thread.
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
        threads: int,
    ) -> None:
        self._clients = clients
        self._pages = pages
        self._staging = staging
        self._tally = tally
        self._shard = shard
        self._deadline_ms = deadline_ms
        self._lock = threading.Lock()
        self._ended: list[EndedLoad] = []
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="saltern-load") if threads else None

    def start(self, jobs: Sequence[tuple[LoadJob, WorkerChain | None]]) -> None:
        """Load these; each is in ``take_ended`` once, later or, without threads, by the time this returns."""
        if jobs:
            self._pages.begin_loads()
        for job, chain in jobs:
            if self._threads is None:
                self._run(job, chain)
            else:
                self._threads.submit(self._run, job, chain)

    def take_ended(self) -> list[EndedLoad]:
        """The loads that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Wait for loads in flight, which end by their deadline: they write to memory that is about to go."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: LoadJob, chain: WorkerChain | None) -> None:
        started_s = time.monotonic()
        loaded = 0
        try:
            if chain is not None:
                loaded = self._load(job, chain)
        except SalternError as error:
            logger.info("load not made: %s", error)  # the client was closed: its tenant had to make room
        except Exception:
            logger.exception("load failed unexpectedly")
        finally:
            blocks = len(job.block_ids[0])
            self._tally.add(load_blocks=loaded, load_failed_blocks=blocks - loaded)
            self._tally.took("load_seconds", time.monotonic() - started_s)
            # What is behind a block that failed is of no use: vLLM computes from the first one on.
            with self._lock:
                self._ended.append(EndedLoad(job.request_id, job.block_ids[0][loaded:]))

    def _load(self, job: LoadJob, chain: WorkerChain) -> int:
        """Load the job's blocks in order; returns how many came whole, from the first on."""
        client = self._clients.get(chain.ticket)
        if client is None:
            return 0
        sdk_chain = client.chain(chain.hashes(job.chain_blocks))
        wanted = [
            _Wanted(block, group, block_id)
            for block, ids in enumerate(zip(*job.block_ids, strict=True))
            for group, block_id in enumerate(ids)
            if block_id != NULL_BLOCK
        ]
        entry_bytes, layout = self._pages.entry_bytes, chain.layout
        done = 0
        while done < len(wanted):
            slots = self._staging.take(len(wanted) - done, wait_s=_ROOM_DEADLINES * self._deadline_ms / 1000)
            batch = wanted[done : done + len(slots)]
            if not batch:
                return wanted[done].block
            try:
                results = sdk_chain.get_into(
                    [layout.position(job.first_block + one.block, one.group, self._shard) for one in batch],
                    [self._staging.view(slot, entry_bytes[one.group]) for slot, one in zip(slots, batch, strict=True)],
                    deadline_ms=self._deadline_ms,
                )
                came = 0
                for one, result in zip(batch, results, strict=True):
                    # The SDK has compared the checksum (I7); another length is of another layout.
                    if not isinstance(result, Hit) or result.size_bytes != entry_bytes[one.group]:
                        break
                    came += 1
                moves = [
                    Move(one.group, one.block_id, self._staging.address_of(slot))
                    for one, slot in zip(batch[:came], slots, strict=False)
                ]
                self._pages.copy_in(moves)
                self._tally.add(load_bytes=sum(entry_bytes[move.group] for move in moves))
            finally:
                self._staging.give_back(slots)
            if came < len(batch):
                return batch[came].block
            done += len(batch)
        return len(job.block_ids[0])
