"""The simulated engine on traces that are small enough to reckon by hand, and against reference hit rates."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from dataplane.replay.engine import SimulatedEngine
from saltern.errors import InvalidArgumentError
from saltern.replay.profiles import HardwareProfile, ModelProfile
from saltern.replay.results import Column, ColumnResult
from saltern.replay.setup import ReplaySetup, Restart, Routing, Slo, TenantQuota, ToolDelays, Use
from saltern.traces.hit_rates import Policy, accesses_of, hit_rate
from saltern.traces.request import Arrival, Identity, Provenance, Trace, TraceRequest, block_ids

BLOCK_TOKENS = 10
#: One second for each token that is computed, one for each block that is moved, none to ask.
MODEL = ModelProfile(linear_flops_per_token=1.0, attention_flops_per_pair=0.0, kv_bytes_per_token=1)
MACHINE = HardwareProfile(flops_per_s=1.0, efficiency=1.0, link_bytes_per_s=BLOCK_TOKENS, latency_s=0.0)
INSTANT = HardwareProfile(flops_per_s=math.inf, link_bytes_per_s=math.inf, latency_s=0.0)
BLOCK_MEMORY_BYTES = 4096


def trace_of(
    requests: Sequence[TraceRequest], *, arrival: Arrival = Arrival.ABSOLUTE, damage: InvalidArgumentError | None = None
) -> Trace:
    def opened() -> Iterator[TraceRequest]:
        yield from requests
        if damage is not None:
            raise damage

    return Trace(
        name="small",
        provenance=Provenance(source="small", format="test", sha256="0" * 64),
        block_tokens=BLOCK_TOKENS,
        arrival=arrival,
        identity=Identity.RECORDED,
        opener=opened,
    )


def request(at_s: float, *ids: int, tenant: str = "", **more: object) -> TraceRequest:
    return TraceRequest(
        arrival_s=at_s,
        input_tokens=len(ids) * BLOCK_TOKENS,
        block_ids=block_ids(ids),
        tenant=tenant,
        **more,  # type: ignore[arg-type]
    )


def setup_of(blocks: int = 100, hardware: HardwareProfile = INSTANT, **more: object) -> ReplaySetup:
    return ReplaySetup(model=MODEL, hardware=hardware, node_bytes=blocks * BLOCK_MEMORY_BYTES, **more)  # type: ignore[arg-type]


def replay(trace: Trace, setup: ReplaySetup, *columns: Column) -> list[ColumnResult]:
    return list(SimulatedEngine().replay(trace, setup, columns, lambda column, served: None))


def busy_trace(requests: int, seed: int) -> Trace:
    """Chains over a few roots, of which some come back; many at one instant."""
    chance = random.Random(seed)
    chains = [[root * 1000 + depth for depth in range(chance.randrange(1, 12))] for root in range(20)]
    made = []
    for number in range(requests):
        chain = chance.choice(chains)
        own = [100_000 + number * 20 + depth for depth in range(chance.randrange(4))]
        made.append(request(float(number // 3), *chain[: chance.randrange(1, len(chain) + 1)], *own))
    return trace_of(made)


@pytest.mark.parametrize("capacity_blocks", [1, 7, 30, 90, 400])
@pytest.mark.parametrize("policy", [Policy.FIFO, Policy.LRU])
def test_hit_rates_are_those_of_the_reference(policy: Policy, capacity_blocks: int) -> None:
    trace = busy_trace(300, seed=capacity_blocks)
    setup = setup_of(capacity_blocks, eviction=str(policy), use=Use.CHAIN)
    (result,) = replay(trace, setup, Column.SHARED)
    assert result.hit_rate == hit_rate(accesses_of(trace), policy, capacity_blocks)
    assert result.requests == 300
    assert result.complete


def test_ttft_is_queue_and_transfer_and_prefill() -> None:
    trace = trace_of([request(0.0, 1, 2), request(5.0, 1, 2, 3), request(6.0, 1, 2, 3)])
    (result,) = replay(trace, setup_of(hardware=MACHINE), Column.SHARED)
    # The first computes 20 tokens until 20 s; its blocks are there from 22 s on, after the second has looked at 20 s.
    # So the second computes 30 tokens until 50 s, and its blocks are there at 53 s; the third begins at 50 s and finds
    # the two of the first, reads them for 2 s and computes the rest, 10 tokens.
    assert result.ttft.max_s == 62.0 - 6.0
    assert result.ttft.p50_s == 50.0 - 5.0
    assert result.prefill_s == 20 + 30 + 10
    assert result.transfer_s == 2.0
    assert result.queue_s == 0 + 15 + 44
    assert result.hit_tokens == 20
    assert (result.read_bytes, result.written_bytes) == (20, 20 + 10 + 10 + 20)
    assert result.duration_s == 62.0


def test_without_a_cache_nothing_is_hit_or_moved() -> None:
    trace = trace_of([request(0.0, 1, 2), request(100.0, 1, 2)])
    (result,) = replay(trace, setup_of(hardware=MACHINE), Column.NO_CACHE)
    assert (result.hit_tokens, result.read_bytes, result.block_accesses) == (0, 0, 0)
    assert result.prefill_s == 40


def test_what_an_engine_has_itself_is_not_asked_for() -> None:
    trace = trace_of([request(0.0, 1, 2), request(100.0, 1, 2, 3)])
    setup = setup_of(hardware=MACHINE, engine_cache_tokens=100)
    without, shared = replay(trace, setup, Column.NO_CACHE, Column.SHARED)
    assert without.engine_hit_tokens == shared.engine_hit_tokens == 20
    assert shared.hit_tokens == 0
    assert shared.read_bytes == 0


def test_warm_finds_all_that_cold_has_left() -> None:
    trace = trace_of([request(float(number), number, number + 50) for number in range(20)])
    cold, warm = replay(trace, setup_of(), Column.COLD, Column.WARM)
    assert (cold.hit_rate, warm.hit_rate) == (0.0, 1.0)
    assert warm.written_bytes == 0
    (alone,) = replay(trace, setup_of(), Column.WARM)
    assert alone.hit_rate == 1.0


@pytest.mark.parametrize(("restart", "hits"), [(Restart.LOST, 0), (Restart.KEPT, 10)])
def test_a_restart_loses_blocks_or_keeps_them(restart: Restart, hits: int) -> None:
    trace = trace_of([*(request(float(n), n) for n in range(10)), *(request(100.0 + n, n) for n in range(10))])
    setup = setup_of(restart=restart, restart_s=0.0)
    (result,) = replay(trace, setup, Column.AFTER_RESTART)
    assert result.hit_tokens == hits * BLOCK_TOKENS


def test_nodes_that_are_away_are_neither_read_nor_written() -> None:
    trace = trace_of([request(0.0, 1), request(1.0, 1), request(2.0, 1), request(40.0, 1)])
    (result,) = replay(trace, setup_of(restart=Restart.KEPT, restart_s=30.0, loss_at=0.25), Column.AFTER_RESTART)
    assert result.hit_tokens == BLOCK_TOKENS  # the last: it was kept
    assert result.series.read_bytes[0] == 0


def test_losing_a_node_costs_hits_and_no_request() -> None:
    trace = trace_of([*(request(float(n), n) for n in range(60)), *(request(100.0 + n, n) for n in range(60))])
    setup = setup_of(nodes=4)
    shared, lost = replay(trace, setup, Column.SHARED, Column.NODE_LOST)
    assert shared.hit_tokens == 60 * BLOCK_TOKENS
    assert 20 * BLOCK_TOKENS < lost.hit_tokens < shared.hit_tokens
    assert lost.requests == shared.requests == 120
    (nothing,) = replay(trace, setup_of(nodes=1), Column.NODE_LOST)
    assert nothing.hit_tokens == 0


def test_a_closed_loop_waits_for_answers_and_thinks() -> None:
    def session(**more: object) -> list[TraceRequest]:
        return [
            request(0.0, 1, session="s", **more),
            request(1.0, 1, 2, session="s", think_s=100.0, **more),
        ]

    trace = trace_of(session(), arrival=Arrival.CLOSED_LOOP)
    asked = setup_of(hardware=MACHINE)
    (result,) = replay(trace, asked, Column.NO_CACHE)
    assert result.duration_s == 10 + 100 + 20
    (capped,) = replay(trace, setup_of(hardware=MACHINE, delays=ToolDelays(scale=0.5, cap_s=5.0)), Column.NO_CACHE)
    assert capped.duration_s == 10 + 5 + 20
    (open_loop,) = replay(trace_of(session()), asked, Column.NO_CACHE)
    assert open_loop.duration_s == 10 + 20


def test_a_full_queue_turns_requests_away_and_sessions_go_on() -> None:
    crowd = [request(0.0, number, session=f"s{number}") for number in range(5)]
    crowd.append(request(1.0, 9, session="s4", think_s=1000.0))
    trace = trace_of(crowd, arrival=Arrival.CLOSED_LOOP)
    (result,) = replay(trace, setup_of(hardware=MACHINE, queue_max=2), Column.NO_CACHE)
    assert result.shed == 2
    assert result.requests == 4


def test_sessions_stay_with_their_engine() -> None:
    trace = trace_of([request(float(n), n % 2, session=f"s{n % 2}") for n in range(40)])
    spread = setup_of(engines=3, engine_cache_tokens=1000)
    (rounds,) = replay(trace, spread, Column.NO_CACHE)
    (session,) = replay(trace, setup_of(engines=3, engine_cache_tokens=1000, routing=Routing.SESSION), Column.NO_CACHE)
    assert rounds.engine_hit_tokens == (40 - 6) * BLOCK_TOKENS
    assert session.engine_hit_tokens == (40 - 2) * BLOCK_TOKENS


def test_prefixes_find_the_engine_that_has_them_unless_it_is_busy() -> None:
    setup = setup_of(hardware=MACHINE, engines=2, engine_cache_tokens=1000, routing=Routing.PREFIX)
    calm = trace_of([request(100.0 * n, *range(5)) for n in range(4)])
    (result,) = replay(calm, setup, Column.NO_CACHE)
    assert result.engine_hit_tokens == 3 * 5 * BLOCK_TOKENS
    rush = trace_of([request(0.0, *range(5)), *(request(0.0, 50 + n, 51 + n) for n in range(0, 8, 2))])
    (result,) = replay(rush, setup, Column.NO_CACHE)
    assert result.ttft.max_s < 50 + 4 * 20  # all on one engine


def test_tenants_share_the_pool_or_have_walls() -> None:
    small = [request(float(n), n % 4, tenant="small") for n in range(200)]
    scan = [request(n + 0.5, *range(1000 + 10 * n, 1010 + 10 * n), tenant="scan") for n in range(200)]
    trace = trace_of(sorted([*small, *scan], key=lambda one: one.arrival_s))
    quotas = {"small": TenantQuota(reserved_bytes=4 * BLOCK_MEMORY_BYTES)}
    cold, shared = replay(trace, setup_of(20, eviction="lru"), Column.COLD, Column.SHARED)
    assert cold.tenants["small"].hit_rate == pytest.approx(196 / 200)
    assert shared.tenants["small"].hit_rate == 0.0, "without a reservation the scan takes everything"
    (reserved,) = replay(trace, setup_of(20, eviction="lru", quotas=quotas), Column.SHARED)
    assert reserved.tenants["small"].hit_rate == pytest.approx(196 / 200), "I5"
    for result in (cold, shared, reserved):
        for tenant in result.tenants.values():
            assert sum(tenant.evicted_by.values()) == sum(tenant.evictions_by_cause.values())
        assert sum(tenant.occupancy_share for tenant in result.tenants.values()) == pytest.approx(1.0)
    assert shared.tenants["small"].evicted_by["scan"] > 150
    assert set(cold.tenants["small"].evicted_by) <= {"small"}


def test_a_damaged_trace_gives_what_came_before_and_then_the_error() -> None:
    damage = InvalidArgumentError("line 3 is no JSON", reason="INVALID_TRACE", hint="look at it")
    for arrival in Arrival:
        trace = trace_of([request(0.0, 1), request(1.0, 1)], damage=damage, arrival=arrival)
        results = SimulatedEngine().replay(trace, setup_of(), [Column.SHARED, Column.COLD], lambda column, served: None)
        part = next(results)
        assert (part.complete, part.requests, part.hit_tokens) == (False, 2, BLOCK_TOKENS)
        with pytest.raises(InvalidArgumentError, match="line 3"):
            next(results)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_gives_what_is_known_so_far_and_it_adds_up(number: signal.Signals) -> None:
    """Nothing is evicted, so nodes hold every block of the requests that are counted, those on their way included."""

    def stop(column: Column, served: int) -> None:
        signal.raise_signal(number)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trace = busy_trace(600, 1)
    for hardware in (INSTANT, MACHINE):
        results = SimulatedEngine().replay(trace, setup_of(10_000, hardware), [Column.SHARED, Column.COLD], stop)
        part = next(results)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
        assert not part.complete
        assert 0 < part.requests < 600
        served = list(trace)[: part.requests]
        assert part.prompt_tokens == sum(request.input_tokens for request in served)
        assert part.block_accesses == sum(len(request.block_ids) for request in served)
        assert sum(node.written_bytes for node in part.nodes.values()) == part.written_bytes
        held_bytes = sum(tenant.occupancy_bytes for tenant in part.tenants.values())
        assert held_bytes == BLOCK_TOKENS * len({block for request in served for block in request.block_ids})
        with pytest.raises(KeyboardInterrupt):
            next(results)


def test_the_same_replay_gives_the_same_figures() -> None:
    trace = busy_trace(300, 5)
    setup = setup_of(40, nodes=3, engines=2, hardware=MACHINE)
    first, second = (replay(trace, setup, *Column) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        one.driver_cpu_s = other.driver_cpu_s = 0.0
        assert one == other


def test_memory_for_no_block_is_refused() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        replay(trace_of([request(0.0, 1)]), setup_of(0), Column.SHARED)
    assert refused.value.reason == "INVALID_REPLAY"


def test_goodput_counts_what_met_the_target() -> None:
    trace = trace_of([request(0.0, 1), request(0.0, 2), request(0.0, 3)])
    (result,) = replay(trace, setup_of(hardware=MACHINE, slo=Slo(ttft_s=20.0)), Column.NO_CACHE)
    assert (result.requests, result.within_slo) == (3, 2)
    assert result.goodput_per_s == pytest.approx(2 / 30)
    times = [result.ttft.p50_s, result.ttft.p95_s, result.ttft.max_s]
    assert all(earlier <= later for earlier, later in pairwise(times))
