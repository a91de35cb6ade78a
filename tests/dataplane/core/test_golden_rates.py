"""The orders on real traces, against figures that others computed; and tenants beside each other on one.

Needs the folder of traces that ``SALTERN_TRACES`` names; ``golden_hit_rates.json`` in it says how its figures were
made. What is left out here for its length is in docs/eviction.md, with the commands that run it.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.reservations import Reservations
from saltern.keys import BlockKey
from tests.replay import fairness
from tests.replay.orders import best_hit_rate, hit_rate
from tests.replay.traces import ReplayTrace, load

pytestmark = pytest.mark.skipif("SALTERN_TRACES" not in os.environ, reason="SALTERN_TRACES names no folder of traces")

#: (trace, largest capacity in blocks).
POINTS = [("mc_synth", 13_177), ("mc_conv", 3_655)]


@cache
def traced(name: str) -> tuple[ReplayTrace, list[BlockKey]]:
    trace = load(Path(os.environ["SALTERN_TRACES"]), name)
    return trace, trace.keys()


@cache
def golden(name: str) -> dict[tuple[str, int], float]:
    """(policy, capacity in blocks): hit rate."""
    document = json.loads((Path(os.environ["SALTERN_TRACES"]) / "golden_hit_rates.json").read_text())
    return {(p["policy"], p["capacity_blocks"]): p["hit_rate"] for p in document["traces"][name]["points"]}


@pytest.mark.parametrize(("name", "capacity_max"), POINTS)
@pytest.mark.parametrize("policy", ["fifo", "lru", "opt"])
def test_it_reproduces_the_golden_figures(name: str, capacity_max: int, policy: str) -> None:
    trace, keys = traced(name)
    for (golden_policy, capacity_blocks), golden_rate in golden(name).items():
        if golden_policy == policy and capacity_blocks <= capacity_max:
            if policy == "opt":
                rate = best_hit_rate(trace, capacity_blocks)
            else:
                rate = hit_rate(trace, keys, Eviction(policy), capacity_blocks)
            assert round(rate, 4) == golden_rate, capacity_blocks


@pytest.mark.parametrize(("name", "capacity_max"), POINTS)
def test_the_default_order_never_loses_half_a_point_to_lru(name: str, capacity_max: int) -> None:
    trace, keys = traced(name)
    gains = {
        capacity_blocks: hit_rate(trace, keys, DEFAULT_EVICTION, capacity_blocks) - rate
        for (policy, capacity_blocks), rate in golden(name).items()
        if policy == "lru" and capacity_blocks <= capacity_max
    }
    assert min(gains.values()) > -0.005, gains
    assert max(gains.values()) > 0.015, "it wins where the pool thrashes"


@pytest.mark.parametrize(
    ("reservations", "requests", "aggregate_least"),
    [(Reservations.STRICT, 4_000, 0.30), (Reservations.EARNING, 6_865, 0.57)],
)
def test_i5_nobody_is_served_worse_than_alone_at_its_reservation(
    reservations: Reservations, requests: int, aggregate_least: float
) -> None:
    """Four tenants, one of them a scan, in a pool far too small. One shared LRU: 0.591 in all, one tenant at 0.66."""
    whole, keys = traced("mt_sample")
    trace = replace(whole, requests=whole.requests[:requests])
    rates = fairness.replay(trace, keys, 24_000, reserved_blocks=6_000, reservations=reservations)
    alone = fairness.alone_rates(trace, keys, 6_000)
    assert min(rates.rho(alone).values()) >= 1.0
    assert rates.aggregate >= aggregate_least
