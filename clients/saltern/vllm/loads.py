"""Loading: one batched get for each request, whole blocks, and an end that is reported exactly once, always."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, NamedTuple

from saltern.errors import SalternError
from saltern.results import Hit
from saltern.vllm.chains import WorkerChain
from saltern.vllm.clients_in_use import ClientsInUse
from saltern.vllm.layout import NULL_BLOCK
from saltern.vllm.metadata import LoadJob
from saltern.vllm.pages import Move, Pages
from saltern.vllm.staging import StagingArea
from saltern.vllm.stats import Tally

if TYPE_CHECKING:
    from saltern.chain import Chain

logger = logging.getLogger(__name__)

#: Of one get: enough for the transport's full speed, little enough that copying overlaps with the next.
_BATCH_BYTES: Final = 16 * 1024 * 1024
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
        deadline_ms: of each batch, and for a thread to begin with a load.
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
        self._batch_entries = max(1, _BATCH_BYTES // max(pages.entry_bytes))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="saltern-load") if threads else None
        self._copiers = ThreadPoolExecutor(max(1, threads), thread_name_prefix="saltern-copy")

    def start(self, jobs: Sequence[tuple[LoadJob, WorkerChain | None]]) -> None:
        """Load these; each is in ``take_ended`` once, later or, without threads, by the time this returns."""
        if jobs:
            self._pages.begin_loads()
        latest_s = time.monotonic() + self._deadline_ms / 1000
        for job, chain in jobs:
            if self._threads is None:
                self._run(job, chain, latest_s)
            else:
                self._threads.submit(self._run, job, chain, latest_s)

    def take_ended(self) -> list[EndedLoad]:
        """The loads that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Wait for loads in flight, which end by their deadline: they write to memory that is about to go."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._copiers.shutdown(wait=True)

    def _run(self, job: LoadJob, chain: WorkerChain | None, latest_s: float) -> None:
        """Load a job, unless it had to wait for a thread until ``latest_s``: then computing is as quick."""
        started_s = time.monotonic()
        loaded = 0
        try:
            if chain is not None and (self._threads is None or started_s < latest_s):
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
        """Load the job's blocks in order; returns how many came whole, from the first on.

        One get, or several where there is much to load: while one batch is copied into the pages the next one comes.
        """
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
        came, copies = 0, []
        try:
            while came < len(wanted):
                batch = self._staged(wanted[came : came + self._batch_entries])
                positions = [
                    chain.layout.position(job.first_block + one.block, one.group, self._shard) for one, _ in batch
                ]
                moves = self._get(sdk_chain, positions, batch)
                came += len(moves)
                if came == len(wanted) or not moves:
                    self._copy_in(moves, batch)
                else:
                    copies.append(self._copiers.submit(self._copy_in, moves, batch))
                if len(moves) < len(batch) or not batch:
                    break
        finally:
            wait(copies)
        for copy in copies:
            copy.result()
        return len(job.block_ids[0]) if came == len(wanted) else wanted[came].block

    def _staged(self, wanted: Sequence[_Wanted]) -> list[tuple[_Wanted, int]]:
        """Entries with a slot for each, as many as there is room for; none if none comes free in time."""
        slots = self._staging.take(len(wanted), wait_s=_ROOM_DEADLINES * self._deadline_ms / 1000)
        return list(zip(wanted, slots, strict=False))

    def _get(self, chain: Chain, positions: list[int], batch: list[tuple[_Wanted, int]]) -> list[Move]:
        """Read a batch into its slots; returns where to copy those that came, up to the first that did not."""
        entry_bytes = self._pages.entry_bytes
        try:
            views = [self._staging.view(slot, entry_bytes[one.group]) for one, slot in batch]
            results = chain.get_into(positions, views, deadline_ms=self._deadline_ms)
        except BaseException:
            self._staging.give_back([slot for _, slot in batch])
            raise
        moves = []
        for (one, slot), result in zip(batch, results, strict=True):
            # The SDK has compared the checksum (I7); another length is of another layout.
            if not isinstance(result, Hit) or result.size_bytes != entry_bytes[one.group]:
                break
            moves.append(Move(one.group, one.block_id, self._staging.address_of(slot)))
        return moves

    def _copy_in(self, moves: list[Move], batch: list[tuple[_Wanted, int]]) -> None:
        try:
            self._pages.copy_in(moves)
            self._tally.add(load_bytes=sum(self._pages.entry_bytes[move.group] for move in moves))
        finally:
            self._staging.give_back([slot for _, slot in batch])
