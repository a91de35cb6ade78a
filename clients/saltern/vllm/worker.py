"""A worker's half: does what the scheduler says in each step, and tells what became of the loads."""

from __future__ import annotations

from typing import NamedTuple

from saltern.vllm.chains import WorkerChains
from saltern.vllm.clients_in_use import ClientsInUse
from saltern.vllm.landing import HotLanding, Landing, StagedLanding
from saltern.vllm.layout import ChainLayout
from saltern.vllm.loads import Loads
from saltern.vllm.metadata import LoadJob, StepWork
from saltern.vllm.options import ConnectorOptions
from saltern.vllm.pages import Pages
from saltern.vllm.saves import Saves
from saltern.vllm.staging import StagingArea
from saltern.vllm.stats import Tally
from saltern.vllm.tenancy import Tenancy


class LoadResults(NamedTuple):
    """What became of loads since the last time.

    Attributes:
        done: requests whose load is over, each exactly once.
        failed: those of them of which a block could not be loaded.
        invalid_block_ids: the blocks that could not be loaded, of the first group.
    """

    done: set[str]
    failed: set[str]
    invalid_block_ids: set[int]


class WorkerSide:
    """One rank's loads and saves. Its methods are called by the engine's thread, in the order of a step.

    Args:
        pages: where the rank's cache is.
        shard: the part of each block that the rank has.
        stores: whether the rank is the one that stores that part.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        pages: Pages,
        layout: ChainLayout,
        options: ConnectorOptions,
        tally: Tally,
        *,
        shard: int,
        stores: bool,
    ) -> None:
        slot_bytes, shared = max(pages.entry_bytes), options.transport != "tcp"
        threads = options.load_threads if options.load == "async" else 0
        self._pages = pages
        save_staging = StagingArea(slot_bytes, options.save_staging_bytes, shared=shared)
        self._stagings = [save_staging]
        landing: Landing
        if pages.in_host_memory:
            landing = HotLanding(pages, tally, deadline_ms=options.load_deadline_ms)
        else:
            load_staging = StagingArea(slot_bytes, options.load_staging_bytes, shared=shared)
            self._stagings.append(load_staging)
            landing = StagedLanding(pages, load_staging, tally, deadline_ms=options.load_deadline_ms, threads=threads)
        buffers = [staging.buffer for staging in self._stagings]
        for buffer in buffers:
            pages.pin(buffer)
        clients = ClientsInUse(tenancy, layout, slot_bytes, buffers)
        self._chains = WorkerChains(layout)
        self._loads = Loads(
            clients, pages, landing, tally, shard=shard, deadline_ms=options.load_deadline_ms, threads=threads
        )
        self._saves = (
            Saves(clients, pages, save_staging, tally, shard=shard, deadline_ms=options.save_deadline_ms)
            if stores and options.save
            else None
        )

    def begin_step(self, work: StepWork) -> None:
        """Take in the news of chains; first thing in a step."""
        for request_id in work.forgotten:
            self._chains.forget(request_id)
        for update in work.chains:
            self._chains.update(update)

    def start_loads(self, work: StepWork) -> None:
        self._loads.start([(job, self._chains.get(job.request_id)) for job in work.loads])

    def save(self, work: StepWork) -> None:
        """Copy out what the step has computed; the engine may overwrite it when this returns."""
        if self._saves is None:
            return
        for job in work.saves:
            chain = self._chains.get(job.request_id)
            if chain is not None:
                self._saves.save(job, chain)

    def take_load_results(self) -> LoadResults:
        ended = self._loads.take_ended()
        return LoadResults(
            {load.request_id for load in ended},
            {load.request_id for load in ended if load.failed_block_ids},
            {block_id for load in ended for block_id in load.failed_block_ids},
        )

    def drain(self, timeout_s: float) -> bool:
        """Wait until what was computed so far is stored or refused; returns whether it is."""
        return self._saves is None or self._saves.drain(timeout_s)

    def close(self) -> None:
        """End loads and saves, within their deadlines."""
        if self._saves is not None:
            self._saves.close()
        self._loads.close()
        self._pages.close()  # before the memory goes that a device was told of
        for staging in self._stagings:
            staging.close()


class NoLoads:
    """Stands in for a worker that cannot use the cache: each load that the scheduler asks for has failed."""

    def __init__(self) -> None:
        self._jobs: list[LoadJob] = []

    def begin_step(self, work: StepWork) -> None:
        """Nothing to take in."""

    def start_loads(self, work: StepWork) -> None:
        self._jobs += work.loads

    def save(self, work: StepWork) -> None:
        """Nothing is stored."""

    def take_load_results(self) -> LoadResults:
        jobs, self._jobs = self._jobs, []
        names = {job.request_id for job in jobs}
        return LoadResults(names, names, {block_id for job in jobs for block_id in job.block_ids[0]})

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        """Nothing to end."""
