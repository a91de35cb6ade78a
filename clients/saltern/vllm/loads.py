"""Loading: one batched get for each request, whole blocks, and an end that is reported exactly once, always."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from saltern.errors import SalternError
from saltern.vllm.chains import WorkerChain
from saltern.vllm.clients_in_use import ClientsInUse
from saltern.vllm.landing import Landing, Wanted
from saltern.vllm.layout import NULL_BLOCK
from saltern.vllm.metadata import LoadJob
from saltern.vllm.pages import Pages
from saltern.vllm.stats import Tally

logger = logging.getLogger(__name__)


class EndedLoad(NamedTuple):
    """A load that is over.

    Attributes:
        failed_block_ids: of the first group, from the first block on that could not be had; empty where all came.
    """

    request_id: str
    failed_block_ids: tuple[int, ...]


class Loads:
    """Loads chains into the engine's pages, in threads of its own or at once.

    Args:
        landing: how entries get into the pages; closed with the loads.
        shard: the part of each block that this rank has.
        deadline_ms: for a thread to begin with a load.
        threads: loads at the same time; 0 loads in the caller's thread.
    """

    def __init__(
        self,
        clients: ClientsInUse,
        pages: Pages,
        landing: Landing,
        tally: Tally,
        *,
        shard: int,
        deadline_ms: float,
        threads: int,
    ) -> None:
        self._clients = clients
        self._pages = pages
        self._landing = landing
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
        self._landing.close()

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
        """Load the job's blocks in order; returns how many came whole, from the first on."""
        client = self._clients.get(chain.ticket)
        if client is None:
            return 0
        wanted = [
            Wanted(block, chain.layout.position(job.first_block + block, group, self._shard), group, block_id)
            for block, ids in enumerate(zip(*job.block_ids, strict=True))
            for group, block_id in enumerate(ids)
            if block_id != NULL_BLOCK
        ]
        came = self._landing.land(client.chain(chain.hashes(job.chain_blocks)), wanted)
        return len(job.block_ids[0]) if came == len(wanted) else wanted[came].block
