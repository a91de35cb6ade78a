"""The scheduler's half by itself: what is asked, what is loaded, what is stored, and when all of it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from saltern.vllm.fingerprint import Binding
from saltern.vllm.identity import Adapter
from saltern.vllm.layout import ChainLayout
from saltern.vllm.lookups import NOTHING, Found
from saltern.vllm.metadata import SaveJob, StepWork
from saltern.vllm.scheduling import ScheduledRequest, SchedulerSide, SchedulingRules
from saltern.vllm.stats import Tally
from saltern.vllm.tenancy import Ticket
from tests.clients.vllm.halves import BLOCK_TOKENS, TICKET, OneClient, Request


class Answer:
    """A lookup of which the test says when it is answered, and with what."""

    bindings = (Binding(b"b" * 32),)

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.found: Found | None = None
        self.waited_s: list[float] = []

    def poll(self, wait_s: float) -> Found | None:
        self.waited_s.append(wait_s)
        return self.found

    def answer(self, blocks: int, *, copies_wanted: tuple[int, ...] = ()) -> None:
        self.found = Found(blocks, self.blocks, is_certain=True, copies_wanted=copies_wanted)


class Lookups:
    """Every lookup that was started."""

    def __init__(self) -> None:
        self.started: list[Answer] = []

    def start(self, ticket: Ticket, block_hashes: Sequence[bytes], adapter: Adapter | None) -> Answer:
        self.started.append(Answer(len(block_hashes)))
        return self.started[-1]


class NoTicket(OneClient):
    """A tenancy that trusts nobody."""

    def __init__(self) -> None:
        self.only = None

    def ticket_for(self, cache_salt: str | None, kv_transfer_params: Mapping[str, object] | None) -> Ticket | None:
        return None


class Scheduler:
    """The half under test with a clock that the test sets."""

    def __init__(self, rules: SchedulingRules | None = None, tenancy: Any = None) -> None:
        self.lookups, self.now_s = Lookups(), 0.0

        def clock() -> float:
            return self.now_s

        self.side = SchedulerSide(
            tenancy or AnyTicket(),
            self.lookups,
            ChainLayout(BLOCK_TOKENS),
            rules or SchedulingRules(),
            Tally(),
            clock=clock,
        )

    def arrived(self, request: Request, found: int | None = None) -> Answer:
        self.side.arrived(request)
        answer = self.lookups.started[-1]
        if found is not None:
            answer.answer(found)
        return answer

    def step(self, request: Request, before: int, tokens: int, table: Sequence[int] | None) -> StepWork:
        tables = None if table is None else [table]
        return self.side.plan_step([ScheduledRequest(request.request_id, before, tokens, lambda: tables)])


class AnyTicket(NoTicket):
    """A tenancy that trusts everybody."""

    def ticket_for(self, cache_salt: str | None, kv_transfer_params: Mapping[str, object] | None) -> Ticket | None:
        return TICKET


def _request(blocks: int, extra: int = 1, name: str = "r") -> Request:
    return Request(name, list(range(blocks * BLOCK_TOKENS + extra)))


def _saved(work: StepWork) -> list[int]:
    return [block for job in work.saves for block in job.blocks]


def test_the_lookup_begins_when_the_request_comes_and_is_asked_once() -> None:
    scheduler, request = Scheduler(), _request(4)
    answer = scheduler.arrived(request)
    assert [scheduler.side.matched(request, 0) for _ in range(3)] == [(None, False)] * 3
    answer.answer(4)
    assert [scheduler.side.matched(request, 0) for _ in range(3)] == [(4 * BLOCK_TOKENS, True)] * 3
    assert len(scheduler.lookups.started) == 1


def test_i10_a_step_waits_for_all_its_lookups_together_no_longer_than_for_one() -> None:
    scheduler = Scheduler(SchedulingRules(lookup_wait_s=1.0))
    requests = [_request(4, name=f"r{number}") for number in range(3)]
    answers = [scheduler.arrived(request) for request in requests]

    def late(wait_s: float) -> Found | None:
        scheduler.now_s += wait_s
        return None

    answers[0].poll = late  # type: ignore[method-assign]
    for request in requests:
        scheduler.side.matched(request, 0)
    assert [answer.waited_s for answer in answers[1:]] == [[0.0], [0.0]]
    scheduler.side.plan_step([])
    scheduler.side.matched(requests[1], 0)
    assert answers[1].waited_s == [0.0, 1.0]


def test_what_waits_long_is_looked_up_anew() -> None:
    scheduler, request = Scheduler(), _request(4)
    scheduler.arrived(request, found=4)
    assert scheduler.side.matched(request, 0) == (4 * BLOCK_TOKENS, True)
    scheduler.now_s = 11
    assert scheduler.side.matched(request, 0) == (None, False)
    scheduler.lookups.started[-1].answer(1)
    assert scheduler.side.matched(request, 0) == (BLOCK_TOKENS, True)


def test_a_prompt_is_never_loaded_whole() -> None:
    scheduler, request = Scheduler(), _request(4, extra=0)
    scheduler.arrived(request, found=4)
    assert scheduler.side.matched(request, 0) == (3 * BLOCK_TOKENS, True)
    drafting = Scheduler(SchedulingRules(withheld_blocks=1))
    drafting.arrived(request, found=4)
    assert drafting.side.matched(request, 0) == (2 * BLOCK_TOKENS, True)
    assert drafting.side.matched(request, 2 * BLOCK_TOKENS) == (0, False)
    assert drafting.side.matched(request, 4 * BLOCK_TOKENS) == (0, False), "never a negative number"


def test_an_engine_that_takes_less_than_it_was_told_gets_the_first_of_it() -> None:
    scheduler, request = Scheduler(), _request(6)
    scheduler.arrived(request, found=5)
    assert scheduler.side.matched(request, BLOCK_TOKENS) == (4 * BLOCK_TOKENS, True)
    scheduler.side.allocated(request, [[1, 2, 3, 4, 5, 6, 7]], 2 * BLOCK_TOKENS)
    [job] = scheduler.side.plan_step([]).loads
    assert (job.first_block, job.block_ids) == (1, ((2, 3),))


def test_without_a_ticket_there_is_no_remote_cache() -> None:
    scheduler, request = Scheduler(tenancy=NoTicket()), _request(4)
    scheduler.side.arrived(request)
    assert scheduler.side.matched(request, 0) == (0, False)
    scheduler.side.allocated(request, [[1, 2, 3, 4, 5]], 0)
    assert scheduler.step(request, 0, request.num_tokens, [1, 2, 3, 4, 5]) == StepWork()
    assert (len(scheduler.side), scheduler.lookups.started) == (0, [])


class Lora(NamedTuple):
    """A request's adapter, as vLLM names it."""

    lora_int_id: int
    lora_path: str = "/adapters/style"
    load_inplace: bool = False


def test_an_adapter_that_was_loaded_in_place_has_no_remote_cache_from_then_on() -> None:
    scheduler = Scheduler()
    for number, (lora, uses) in enumerate(
        [(Lora(1), True), (Lora(2), True), (Lora(1, load_inplace=True), False), (Lora(1), False), (Lora(2), True)]
    ):
        request = _request(4, name=f"r{number}")
        request.lora_request = lora
        before = len(scheduler.lookups.started)
        scheduler.side.arrived(request)
        assert (len(scheduler.lookups.started) > before) == uses


def test_the_last_lookup_decides_what_is_stored_and_each_block_is_stored_once() -> None:
    scheduler, request = Scheduler(), _request(6)
    scheduler.arrived(request, found=2)
    table = [1, 2, 3, 4, 5, 6, 7]
    assert scheduler.side.matched(request, 0) == (2 * BLOCK_TOKENS, True)
    scheduler.side.allocated(request, [table], 2 * BLOCK_TOKENS)
    work = scheduler.side.plan_step([])
    assert [(job.first_block, job.block_ids) for job in work.loads] == [(0, ((1, 2),))]
    scheduler.side.loads_ended({"r"}, (), ())
    assert _saved(scheduler.step(request, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, table)) == [2, 3]
    assert _saved(scheduler.step(request, 4 * BLOCK_TOKENS, BLOCK_TOKENS + 3, table)) == [4]
    assert _saved(scheduler.step(request, 5 * BLOCK_TOKENS + 3, 14, table)) == [5]
    assert scheduler.step(request, 6 * BLOCK_TOKENS + 1, 1, table) == StepWork()


def test_blocks_are_stored_only_when_their_last_slot_is_computed() -> None:
    scheduler, request = Scheduler(), _request(1, extra=BLOCK_TOKENS - 1)
    scheduler.arrived(request, found=0)
    scheduler.side.matched(request, 0)
    scheduler.side.allocated(request, [[1, 2]], 0)
    assert _saved(scheduler.step(request, 0, request.num_tokens, [1, 2])) == [0]
    request.tokens.append(7)  # sampled: the block is full, its last slot is not computed
    assert scheduler.side.plan_step([]) == StepWork()
    assert _saved(scheduler.step(request, 2 * BLOCK_TOKENS - 1, 1, [1, 2, 3])) == [1]


def test_drafts_that_may_be_rejected_are_stored_a_step_later() -> None:
    scheduler, request = Scheduler(SchedulingRules(save_lags=True)), _request(2)
    scheduler.arrived(request, found=0)
    scheduler.side.matched(request, 0)
    scheduler.side.allocated(request, [[1, 2, 3]], 0)
    assert scheduler.step(request, 0, request.num_tokens, [1, 2, 3]).saves == ()
    assert _saved(scheduler.step(request, request.num_tokens, 4, [1, 2, 3])) == [0, 1]


def test_generated_blocks_are_left_out_where_that_is_asked_for() -> None:
    scheduler, request = Scheduler(SchedulingRules(save_generated=False)), _request(1, extra=4)
    scheduler.arrived(request, found=0)
    scheduler.side.matched(request, 0)
    request.tokens += range(BLOCK_TOKENS)
    assert _saved(scheduler.step(request, 0, request.num_tokens, [1, 2, 3])) == [0]


def test_nothing_is_stored_in_a_step_that_loads_what_it_computes_with() -> None:
    """Were one of those blocks not to come, all that the step computes would be wrong, on every rank."""
    scheduler, request = Scheduler(SchedulingRules(load_async=False)), _request(4)
    scheduler.arrived(request, found=2)
    assert scheduler.side.matched(request, 0) == (2 * BLOCK_TOKENS, False)
    scheduler.side.allocated(request, [[1, 2, 3, 4, 5]], 2 * BLOCK_TOKENS)
    work = scheduler.step(request, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, [1, 2, 3, 4, 5])
    assert len(work.loads) == 1
    assert work.saves == ()
    request.tokens.append(7)
    assert _saved(scheduler.step(request, 4 * BLOCK_TOKENS + 1, 1, [1, 2, 3, 4, 5])) == [2, 3]


def test_a_block_out_of_the_window_ends_what_is_stored_for_good() -> None:
    scheduler, request = Scheduler(), _request(5)
    scheduler.arrived(request, found=1)
    scheduler.side.matched(request, 3 * BLOCK_TOKENS)
    scheduler.side.allocated(request, [[0, 0, 3, 4, 5, 6]], 0)
    assert scheduler.step(request, 3 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, [0, 0, 3, 4, 5, 6]).saves == ()
    request.tokens += range(BLOCK_TOKENS)
    assert scheduler.step(request, 5 * BLOCK_TOKENS, BLOCK_TOKENS, [0, 0, 3, 4, 5, 6, 7]).saves == ()


def test_a_cache_that_did_not_answer_gets_what_is_computed_from_here_on() -> None:
    scheduler, request = Scheduler(), _request(4)
    answer = scheduler.arrived(request)
    answer.found = NOTHING
    assert scheduler.side.matched(request, 2 * BLOCK_TOKENS) == (0, False)
    scheduler.side.allocated(request, [[1, 2, 3, 4, 5]], 0)
    assert _saved(scheduler.step(request, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, [1, 2, 3, 4, 5])) == [2, 3]


def test_copies_that_the_cache_wants_go_along_once_their_bytes_are_there() -> None:
    scheduler, request = Scheduler(), _request(4)
    scheduler.arrived(request).answer(3, copies_wanted=(0, 2))
    assert scheduler.side.matched(request, 0) == (3 * BLOCK_TOKENS, True)
    scheduler.side.allocated(request, [[1, 2, 3, 4, 5]], 3 * BLOCK_TOKENS)
    scheduler.side.plan_step([])
    scheduler.side.loads_ended({"r"}, (), ())
    work = scheduler.step(request, 3 * BLOCK_TOKENS, BLOCK_TOKENS + 1, [1, 2, 3, 4, 5])
    assert work.saves == (SaveJob("r", (0, 2, 3), ((1, 3, 4),)),)


def test_a_failed_load_is_never_asked_for_again_and_what_it_lost_is_stored_again() -> None:
    scheduler, request = Scheduler(), _request(4)
    scheduler.arrived(request, found=4)
    scheduler.side.matched(request, 0)
    scheduler.side.allocated(request, [[1, 2, 3, 4, 5]], 4 * BLOCK_TOKENS)
    scheduler.side.plan_step([])
    scheduler.side.loads_ended({"r"}, (), {3, 4})
    assert scheduler.side.matched(request, 0) == (0, False)
    assert len(scheduler.lookups.started) == 1
    assert _saved(scheduler.step(request, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, [1, 2, 8, 9, 10])) == [2, 3]


def test_a_request_that_was_preempted_is_looked_up_again_and_its_blocks_are_not_stored_twice() -> None:
    scheduler, request = Scheduler(), _request(3)
    scheduler.arrived(request, found=0)
    scheduler.side.matched(request, 0)
    scheduler.side.allocated(request, [[1, 2, 3, 4]], 0)
    assert _saved(scheduler.step(request, 0, request.num_tokens, [1, 2, 3, 4])) == [0, 1, 2]
    assert scheduler.side.matched(request, 0) == (None, False)
    scheduler.lookups.started[-1].answer(3)
    assert scheduler.side.matched(request, 0) == (3 * BLOCK_TOKENS, True)
    scheduler.side.allocated(request, [[5, 6, 7, 8]], 3 * BLOCK_TOKENS)
    [job] = scheduler.side.plan_step([]).loads
    assert job.block_ids == ((5, 6, 7),)
    scheduler.side.loads_ended({"r"}, (), ())
    assert scheduler.step(request, 3 * BLOCK_TOKENS, 1, [5, 6, 7, 8]) == StepWork()


def test_hashes_are_sent_once_and_a_name_that_is_used_again_begins_anew() -> None:
    scheduler, request = Scheduler(), _request(2)
    scheduler.arrived(request, found=0)
    scheduler.side.matched(request, 0)
    [update] = scheduler.step(request, 0, request.num_tokens, [1, 2, 3]).chains
    assert (update.start, update.block_hashes, update.ticket) == (0, tuple(request.block_hashes), TICKET)
    request.tokens += range(BLOCK_TOKENS)
    [update] = scheduler.step(request, 2 * BLOCK_TOKENS + 1, BLOCK_TOKENS, [1, 2, 3, 4]).chains
    assert (update.start, len(update.block_hashes), update.ticket) == (2, 1, None)
    scheduler.side.finished("r")
    other = _request(1)
    scheduler.arrived(other, found=0)
    scheduler.side.matched(other, 0)
    work = scheduler.step(other, 0, other.num_tokens, [5, 6])
    assert work.forgotten == ("r",)
    assert [(update.start, update.block_hashes) for update in work.chains] == [(0, tuple(other.block_hashes))]


def test_another_connectors_hit_is_stored_here_too() -> None:
    """Beside a connector that brings blocks from a prefill engine, as a child of vLLM's MultiConnector."""
    scheduler, request = Scheduler(), _request(4)
    scheduler.arrived(request, found=1)
    assert scheduler.side.matched(request, 0) == (BLOCK_TOKENS, True)
    scheduler.side.allocated(request, [[1, 2, 3, 4, 5]], 0)
    assert scheduler.side.plan_step([]).loads == ()
    assert _saved(scheduler.step(request, 4 * BLOCK_TOKENS, 1, [1, 2, 3, 4, 5])) == [1, 2, 3]


def test_ends_and_failures_of_another_connectors_loads_are_its_own() -> None:
    scheduler, request = Scheduler(SchedulingRules(lookup_wait_s=0)), _request(4)
    answer = scheduler.arrived(request)
    scheduler.side.loads_ended({"r", "stranger"}, {"r"}, {1, 2})
    answer.answer(2)
    assert scheduler.side.matched(request, 0) == (2 * BLOCK_TOKENS, True)
    scheduler.side.loads_ended({"r"}, {"r"}, {1, 2})
    assert scheduler.side.matched(request, 0) == (2 * BLOCK_TOKENS, True)
    assert len(scheduler.lookups.started) == 1


def test_a_request_that_reads_no_cache_is_stored_once_its_lookup_is_answered() -> None:
    """Prompt log probabilities need every token computed; other requests may use what comes of it."""
    scheduler, request = Scheduler(SchedulingRules(lookup_wait_s=0)), _request(4)
    request.skip_reading_prefix_cache = True
    answer = scheduler.arrived(request)
    assert scheduler.side.matched(request, 0) == (0, False)
    scheduler.side.allocated(request, [[1, 2, 3, 4, 5]], 0)
    assert _saved(scheduler.step(request, 0, 2 * BLOCK_TOKENS, [1, 2, 3])) == []
    answer.answer(1)
    assert _saved(scheduler.step(request, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, [1, 2, 3, 4, 5])) == [1, 2, 3]


def test_blocks_of_a_load_that_is_over_are_nobodys_when_other_blocks_fail() -> None:
    scheduler = Scheduler(SchedulingRules(load_async=False))
    first, second = _request(4, name="first"), _request(4, name="second")
    for request, table in ((first, [1, 2, 3, 4, 5]), (second, [3, 4, 6, 7, 8])):
        scheduler.arrived(request, found=2)
        assert scheduler.side.matched(request, 0)[0] == 2 * BLOCK_TOKENS
        scheduler.side.allocated(request, [table], 2 * BLOCK_TOKENS)
        scheduler.step(request, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, table)
    scheduler.side.loads_ended((), (), {3})
    assert scheduler.side.matched(second, 0) == (0, False)
    assert scheduler.side.matched(first, 0) == (None, False), "preempted meanwhile: looked up again, not given up"


def test_after_the_names_were_forgotten_running_requests_neither_load_nor_store() -> None:
    scheduler, request = Scheduler(), _request(4)
    scheduler.arrived(request, found=4)
    scheduler.side.forget_names()
    assert scheduler.side.matched(request, 0) == (0, False)
    assert scheduler.step(request, 0, request.num_tokens, [1, 2, 3, 4, 5]) == StepWork()
