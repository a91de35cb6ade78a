"""One pass over a trace gives the hit rate of an LRU cache of every size: that which a cache of that size has."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from saltern.errors import InvalidArgumentError
from saltern.traces.hit_rates import Policy, accesses_of, hit_rate, infinite_hit_rate
from saltern.traces.load import load_trace
from saltern.traces.request import Arrival, Identity, Provenance, Trace, TraceRequest, block_ids
from saltern.traces.reuse import hit_curves

BLOCK_TOKENS = 10


def trace_of(requests: list[TraceRequest], identity: Identity = Identity.RECORDED) -> Trace:
    def opened() -> Iterator[TraceRequest]:
        yield from requests

    return Trace(
        name="t",
        provenance=Provenance(source="t", format="test", sha256="0" * 64),
        block_tokens=BLOCK_TOKENS,
        arrival=Arrival.ABSOLUTE,
        identity=identity,
        opener=opened,
    )


def chains(seed: int, requests: int, tenants: str = "ab") -> Trace:
    """Prompts over a few chains, with tails of their own, and a last block that is seldom whole."""
    chance = random.Random(seed)
    made = []
    for number in range(requests):
        root = chance.randrange(12)
        shared = [root * 1000 + depth for depth in range(chance.randrange(1, 40))]
        own = [100_000 + number * 50 + depth for depth in range(chance.randrange(4))]
        ids = [*shared, *own]
        tokens = len(ids) * BLOCK_TOKENS - chance.randrange(BLOCK_TOKENS)
        made.append(
            TraceRequest(
                arrival_s=float(number), input_tokens=tokens, block_ids=block_ids(ids), tenant=chance.choice(tenants)
            )
        )
    return trace_of(made)


@pytest.mark.parametrize("seed", range(5))
def test_every_size_has_the_rate_of_a_cache_of_that_size(seed: int) -> None:
    trace = chains(seed, 120)
    accesses = accesses_of(trace)
    curve = hit_curves(trace).all
    assert curve.unique_blocks == accesses.unique_blocks
    assert curve.infinite_hit_rate == pytest.approx(infinite_hit_rate(accesses), abs=1e-12)
    for capacity in [*range(40), *range(40, accesses.unique_blocks + 2, 17)]:
        assert curve.hit_rate(capacity) == pytest.approx(hit_rate(accesses, Policy.LRU, capacity), abs=1e-12)


def test_ids_that_contradict_themselves_are_counted_as_a_cache_would() -> None:
    chance = random.Random(3)
    requests = [
        TraceRequest(
            arrival_s=float(number),
            input_tokens=8 * BLOCK_TOKENS,
            block_ids=block_ids(chance.sample(range(40), 8)),  # the same block behind other ones
        )
        for number in range(200)
    ]
    accesses, curve = accesses_of(trace_of(requests)), hit_curves(trace_of(requests)).all
    for capacity in range(42):
        assert curve.hit_rate(capacity) == pytest.approx(hit_rate(accesses, Policy.LRU, capacity), abs=1e-12)


def test_a_block_twice_in_one_prompt_counts_once() -> None:
    twice = TraceRequest(arrival_s=0.0, input_tokens=30, block_ids=block_ids([1, 2, 1]))
    curve = hit_curves(trace_of([twice, twice])).all
    assert curve.unique_blocks == 2
    assert [curve.hit_tokens(blocks) for blocks in range(3)] == [0, 10, 20]


def test_each_tenant_has_the_curve_that_it_has_alone() -> None:
    trace = chains(9, 150)
    curves = hit_curves(trace)
    assert list(curves.tenants) == ["a", "b"]
    for tenant, curve in curves.tenants.items():
        alone = hit_curves(trace_of([request for request in trace if request.tenant == tenant])).all
        assert curve == alone
    assert sum(curve.hits[-1] for curve in curves.tenants.values()) == curves.all.hits[-1]


def test_the_least_cache_for_so_many_hits() -> None:
    curve = hit_curves(chains(2, 200)).all
    for tokens in (1.0, curve.hits[-1] / 3, curve.hits[-1]):
        blocks = curve.capacity_for(tokens)
        assert blocks is not None
        assert curve.hit_tokens(blocks) >= tokens > curve.hit_tokens(blocks - 1)
    assert curve.capacity_for(curve.hits[-1] + 1) is None


def test_a_sample_is_near_and_what_it_holds_is_less() -> None:
    trace = chains(4, 1500)
    exact, sampled = hit_curves(trace).all, hit_curves(trace, sampled=0.25).all
    assert sampled.unique_blocks == pytest.approx(exact.unique_blocks, rel=0.1)
    assert len(sampled.hits) < len(exact.hits) / 3
    sizes = range(0, exact.unique_blocks, 50)
    assert max(abs(sampled.hit_rate(size) - exact.hit_rate(size)) for size in sizes) < 0.05
    assert sampled == hit_curves(trace, sampled=0.25).all, "the hash decides, not chance"


def test_what_has_no_curve_says_why() -> None:
    nothing = trace_of([TraceRequest(arrival_s=0.0, input_tokens=5)], Identity.NONE)
    with pytest.raises(InvalidArgumentError, match="no prefix identity"):
        hit_curves(nothing)
    for share in (0.0, 1.5):
        with pytest.raises(InvalidArgumentError, match="cannot sample"):
            hit_curves(chains(1, 2), sampled=share)


@pytest.mark.skipif("SALTERN_TRACES" not in os.environ, reason="SALTERN_TRACES names no folder of traces")
def test_on_a_published_trace_it_is_exact_and_a_tenth_of_the_blocks_errs_little() -> None:
    loaded = load_trace(Path(os.environ["SALTERN_TRACES"]) / "mooncake/synthetic_trace.jsonl.gz")
    requests = list(loaded)
    trace = replace(loaded, opener=lambda: iter(requests))
    accesses = accesses_of(trace)
    exact, sampled = hit_curves(trace).all, hit_curves(trace, sampled=0.1).all
    for share in (0.02, 0.05, 0.1, 0.3, 0.5):
        capacity = int(accesses.unique_blocks * share)
        assert exact.hit_rate(capacity) == pytest.approx(hit_rate(accesses, Policy.LRU, capacity), abs=1e-12)
    worst = max(abs(exact.hit_rate(size) - sampled.hit_rate(size)) for size in range(0, exact.unique_blocks, 400))
    assert worst < 0.03
