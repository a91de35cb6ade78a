"""The scheduler's half: what each request has in the remote cache, what to load, what to store. No threads, no I/O.

A request's life, as the scheduler of vLLM drives it::

    arrived --> LOOKING --(answer, or given up)--> KNOWN --(blocks allocated)--> LOADING --(all ranks)--> RUNNING
                   ^                                 |                              |
                   |                                 +--(nothing to load)-----------|--------------------> RUNNING
                   +------------- preempted: asked for again ----------------------<|-----------------------+
                                                                                    |
                                     a load that failed is never asked for again  <-+
    finished, aborted: forgotten, from any state

Rules that the engine depends on:

- never all of a prompt: at least one token is left to compute, or vLLM has nothing to sample from;
- what was found is asked for again only after it was used: a full pool does not make a request ask in every step;
- a request whose load failed is computed without the cache: a store that lists what it cannot give costs one load;
- only blocks whose every slot is computed are stored: the last sampled token's is not, a rejected draft's is not;
- nothing is stored of a step that computes with blocks which are loaded in it: whether they came is known afterwards;
- what is stored has no gap: blocks behind one could never be found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from saltern.vllm.fingerprint import Binding
from saltern.vllm.identity import Adapter
from saltern.vllm.layout import NULL_BLOCK, ChainLayout
from saltern.vllm.lookups import NOTHING, Found
from saltern.vllm.metadata import ChainUpdate, LoadJob, SaveJob, StepWork
from saltern.vllm.stats import Tally
from saltern.vllm.tenancy import Tenancy, Ticket

#: What was found is found out anew after this time in the waiting queue.
_FOUND_LASTS_S: Final = 10.0


class EngineRequest(Protocol):
    """The parts of ``vllm.v1.request.Request`` that matter here."""

    request_id: str
    block_hashes: Sequence[Any]
    cache_salt: str | None
    kv_transfer_params: Mapping[str, Any] | None
    lora_request: Any

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def skip_reading_prefix_cache(self) -> bool: ...


class ScheduledRequest(NamedTuple):
    """One request of a step.

    Attributes:
        computed_tokens: before the step.
        tokens: that the step computes.
        block_ids: reads the request's block table, by group; called only for requests that store something.
    """

    request_id: str
    computed_tokens: int
    tokens: int
    block_ids: Callable[[], Sequence[Sequence[int]] | None]


class Pending(Protocol):
    """A lookup that runs; see :class:`saltern.vllm.lookups.PendingLookup`."""

    bindings: tuple[Binding, ...]

    def poll(self, wait_s: float) -> Found | None: ...


class LookupStarter(Protocol):
    """See :class:`saltern.vllm.lookups.Lookups`."""

    def start(self, ticket: Ticket, block_hashes: Sequence[bytes], adapter: Adapter | None) -> Pending: ...


class Phase(Enum):
    NEW = "new"
    LOOKING = "looking"
    KNOWN = "known"
    LOADING = "loading"
    RUNNING = "running"


class SchedulingRules(NamedTuple):
    """How the scheduler's half goes about it.

    Attributes:
        load_async: whether other requests run while one is loaded.
        save, save_generated: see :class:`saltern.vllm.options.ConnectorOptions`.
        lookup_wait_s: for all lookups of a step.
        withheld_blocks: at the end of a hit that are computed all the same: draft models need their inputs.
        save_lags: computed tokens may turn out to be none (drafts, steps in flight): store a step later.
    """

    load_async: bool = True
    save: bool = True
    save_generated: bool = True
    lookup_wait_s: float = 0.005
    withheld_blocks: int = 0
    save_lags: bool = False


@dataclass(slots=True)
class _Record:
    """What is known of one request.

    Attributes:
        computed_blocks: how many were there (locally, loaded) when it was scheduled first.
        saved_blocks: how many from the first on need not be stored (again); None while nobody knows.
        sent_blocks: how many block hashes the workers have.
        matched_from: blocks that the engine had itself when it was last told what can be loaded.
        loads_from: first block of the load in flight, and ``loads`` the ids of its blocks in the first group.
        failed: a load has failed: it is not looked up again.
        gapped: a block of it could not be stored: none behind it is.
    """

    request: EngineRequest
    ticket: Ticket
    phase: Phase = Phase.NEW
    pending: Pending | None = None
    found: Found = NOTHING
    found_at_s: float = 0.0
    failed: bool = False
    gapped: bool = False
    bindings: tuple[Binding, ...] = ()
    computed_blocks: int | None = None
    saved_blocks: int | None = None
    sent_blocks: int = 0
    reused_blocks: int | None = None
    copies_wanted: tuple[int, ...] = ()
    matched_from: int = 0
    loads_from: int = 0
    loads: tuple[int, ...] = ()


class SchedulerSide:
    """The state of every request that uses the remote cache. Used by the scheduler's thread alone.

    Args:
        tenancy: whose cache a request uses.
        lookups: asks the cache, beside the scheduler.
        layout: of the chains.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        lookups: LookupStarter,
        layout: ChainLayout,
        rules: SchedulingRules,
        tally: Tally,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenancy = tenancy
        self._lookups = lookups
        self._layout = layout
        self._rules = rules
        self._tally = tally
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._loads: list[LoadJob] = []
        self._chains: list[ChainUpdate] = []
        self._forgotten: list[str] = []
        #: Records of the loads in the step that runs, where loads are part of steps.
        self._loaded_in_step: list[_Record] = []
        #: Numbers of adapters that were loaded in place.
        self._replaced: set[int] = set()
        self._wait_left_s = rules.lookup_wait_s

    def __len__(self) -> int:
        return len(self._records)

    # ---- a request comes -----------------------------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        """Find out whose cache a new request uses and start its lookup: the answer is mostly there when it is due."""
        if request.request_id in self._records:
            self.finished(request.request_id)
        ticket = self._tenancy.ticket_for(request.cache_salt, request.kv_transfer_params)
        if ticket is None or self._is_replaced(request.lora_request):
            self._tally.add(unused_requests=1)
            return
        record = self._records[request.request_id] = _Record(request, ticket)
        self._look(record)

    def matched(self, request: EngineRequest, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed_tokens`` can be loaded, and whether beside the step.

        None stands for "ask again in the next step".
        """
        record = self._records.get(request.request_id)
        if record is None or record.failed or request.skip_reading_prefix_cache:
            return 0, False
        if record.phase is Phase.KNOWN and self._clock() - record.found_at_s > _FOUND_LASTS_S:
            record.phase = Phase.NEW
        if record.phase in (Phase.NEW, Phase.RUNNING):
            self._look(record)
        if record.phase is Phase.LOOKING and not self._settle(record):
            return None, False
        record.matched_from = computed_tokens // self._layout.block_tokens
        count = max(0, min(record.found.blocks, self._last_loadable(record)) - record.matched_from)
        return (count * self._layout.block_tokens, self._rules.load_async) if count else (0, False)

    def allocated(self, request: EngineRequest, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Note that blocks are there for a request: with ``external_tokens`` to load, or to compute.

        Args:
            block_ids: the whole table, by group: local hits first, then what is loaded, then what is computed.
        """
        record = self._records.get(request.request_id)
        if record is None:
            return
        if external_tokens == 0:
            # A lookup that is still open is worth waiting for all the same: the saves go by it.
            if record.phase not in (Phase.LOADING, Phase.LOOKING):
                record.phase = Phase.RUNNING
            return
        count = external_tokens // self._layout.block_tokens
        first = record.matched_from
        record.phase = Phase.LOADING
        record.loads_from = first
        record.loads = tuple(block_ids[0][first : first + count])
        self._send_chain(record, record.found.chain_blocks)
        self._loads.append(
            LoadJob(
                request.request_id,
                record.found.chain_blocks,
                first,
                tuple(tuple(ids[first : first + count]) for ids in block_ids),
            )
        )

    # ---- a step begins, a step ends --------------------------------------------------------------------------------

    def plan_step(self, scheduled: Iterable[ScheduledRequest]) -> StepWork:
        """What the workers have to do in this step; forgets it here."""
        for record in self._loaded_in_step:
            record.phase, record.loads = Phase.RUNNING, ()
        self._loaded_in_step = []
        saves: list[SaveJob] = []
        if self._loads and not self._rules.load_async:
            # If one of these loads fails, all that the step computes may be wrong: it is stored a step later, or not.
            self._loaded_in_step = [self._records[load.request_id] for load in self._loads]
        elif self._rules.save:
            saves = [job for one in scheduled if (job := self._plan_save(one)) is not None]
        work = StepWork(tuple(self._forgotten), tuple(self._chains), tuple(self._loads), tuple(saves))
        self._forgotten, self._chains, self._loads = [], [], []
        self._wait_left_s = self._rules.lookup_wait_s
        return work

    def loads_ended(self, done: Collection[str], failed: Collection[str], invalid_block_ids: Collection[int]) -> None:
        """Note which loads are over, and which of them have failed.

        Args:
            failed: requests of which some part could not be loaded, where blocks cannot say so (several groups).
            invalid_block_ids: blocks that could not be loaded.
        """
        loading = [record for record in map(self._records.get, {*done, *failed}) if record and record.loads]
        for record in loading:  # others may be of another connector beside this one
            if record.request.request_id in failed:
                self._fail(record, record.loads_from)
        if invalid_block_ids:
            for record in self._records.values():
                bad = next((index for index, id_ in enumerate(record.loads) if id_ in invalid_block_ids), None)
                if bad is not None:
                    self._fail(record, record.loads_from + bad)
        for record in loading:
            if record.request.request_id in done:
                record.phase, record.loads = Phase.RUNNING, ()

    def finished(self, request_id: str) -> None:
        """Forget a request: finished or aborted, in whatever state. Nothing of it is waited for."""
        record = self._records.pop(request_id, None)
        if record is not None and record.sent_blocks:
            self._forgotten.append(request_id)

    def forget_names(self) -> None:
        """Neither load nor store any more for the requests that are there: their blocks' names are of the past."""
        for record in self._records.values():
            record.failed = record.gapped = True

    def _is_replaced(self, lora: Any) -> bool:
        """Whether an adapter was ever loaded in place of another: then nobody can tell whose weights computed what."""
        if lora is not None and lora.load_inplace:
            self._replaced.add(lora.lora_int_id)
        return lora is not None and lora.lora_int_id in self._replaced

    # ---- looking ---------------------------------------------------------------------------------------------------

    def _look(self, record: _Record) -> None:
        request = record.request
        lora = request.lora_request
        adapter = None if lora is None else Adapter(lora.lora_path, lora.lora_int_id)
        record.pending = self._lookups.start(record.ticket, request.block_hashes, adapter)
        record.phase = Phase.LOOKING

    def _settle(self, record: _Record) -> bool:
        """Take the answer of a lookup if it is there, or comes within what the step may still wait for lookups."""
        assert record.pending is not None
        started_s = self._clock()
        found = record.pending.poll(self._wait_left_s)
        self._wait_left_s = max(0.0, self._wait_left_s - (self._clock() - started_s))
        if found is None:
            return False
        record.bindings = record.pending.bindings
        record.pending = None
        record.phase, record.found, record.found_at_s = Phase.KNOWN, found, self._clock()
        if found.is_certain:
            record.saved_blocks = max(record.saved_blocks or 0, found.blocks)
            record.copies_wanted = found.copies_wanted
            if record.reused_blocks is None:
                record.reused_blocks = found.blocks
        return True

    def _last_loadable(self, record: _Record) -> int:
        """How many blocks may come from elsewhere: a token is left to compute, or there is nothing to sample from."""
        return (record.request.num_tokens - 1) // self._layout.block_tokens - self._rules.withheld_blocks

    # ---- storing ---------------------------------------------------------------------------------------------------

    def _plan_save(self, one: ScheduledRequest) -> SaveJob | None:
        record = self._records.get(one.request_id)
        if record is None or record.gapped:
            return None
        if record.computed_blocks is None:
            record.computed_blocks = one.computed_tokens // self._layout.block_tokens
        if record.phase is Phase.LOOKING and self._settle(record):
            record.phase = Phase.RUNNING
        if not record.bindings:
            return None
        if record.saved_blocks is None:
            # The cache did not say what it has: what was computed before this request came was stored then.
            record.saved_blocks = max(record.found.blocks, record.computed_blocks)
        first, end = record.saved_blocks, self._complete_blocks(record, one)
        if end <= first and not record.copies_wanted:
            return None
        tables = one.block_ids()
        if tables is None:
            return None
        held = min(end, *(len(table) for table in tables))
        blocks = [block for block in record.copies_wanted if block < min(first, held) and _all_held(tables, block)]
        for block in range(first, held):
            if not _all_held(tables, block):
                record.gapped = True  # out of a sliding window: what comes after could never be found
                break
            blocks.append(block)
            record.saved_blocks = block + 1
        record.copies_wanted = ()
        if not blocks:
            return None
        self._send_chain(record, len(record.request.block_hashes))
        return SaveJob(one.request_id, tuple(blocks), tuple(tuple(table[b] for b in blocks) for table in tables))

    def _complete_blocks(self, record: _Record, one: ScheduledRequest) -> int:
        """How many blocks have every slot computed once the step is over, and a hash of tokens that are final."""
        request = record.request
        computed = one.computed_tokens + (0 if self._rules.save_lags else one.tokens)
        if not self._rules.save_generated:
            computed = min(computed, request.num_prompt_tokens)
        return min(computed // self._layout.block_tokens, len(request.block_hashes))

    def _send_chain(self, record: _Record, blocks: int) -> None:
        """Tell the workers the hashes that they do not have yet, up to so many blocks."""
        if blocks <= record.sent_blocks:
            return
        hashes = tuple(record.request.block_hashes[record.sent_blocks : blocks])
        begins = record.sent_blocks == 0
        self._chains.append(
            ChainUpdate(
                record.request.request_id,
                record.sent_blocks,
                hashes,
                record.ticket if begins else None,
                record.bindings if begins else (),
                record.reused_blocks if begins else None,
            )
        )
        record.sent_blocks = blocks

    def _fail(self, record: _Record, first_bad_block: int) -> None:
        record.failed = True
        record.saved_blocks = min(record.saved_blocks or 0, first_bad_block)


def _all_held(tables: Sequence[Sequence[int]], block: int) -> bool:
    return all(table[block] != NULL_BLOCK for table in tables)
