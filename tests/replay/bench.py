"""How fast the simulated engine is, on LRU, beside libCacheSim's Python binding on the same accesses, in turns.

    python -m tests.replay.bench TRACES_FOLDER [--turns N] [--fraction F]

``simulated`` is all of the engine: routing, queue, keys, the node's core, quantiles and series, over requests that
are in memory. ``libcachesim gets`` is one ``get`` for each block, tail first; ``libcachesim job`` looks up the prefix
first, as a request does. CPU seconds; the best of each counts, since other processes only ever make a turn slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dataplane.replay.engine import SimulatedEngine
from saltern.replay.profiles import builtin_profiles
from saltern.replay.results import Column
from saltern.replay.setup import ReplaySetup, Use
from saltern.traces.hit_rates import Accesses, accesses_of
from saltern.traces.load import load_trace
from saltern.traces.request import Trace
from tests.replay.rules import INSTANT, MODEL

TRACE: Final = "mooncake/conversation_trace.jsonl.gz"
TARGET_PER_S: Final = 300_000
COLUMNS_TARGET_S: Final = 60.0


def simulate(trace: Trace, capacity_blocks: int) -> float:
    """Hit rate, by the simulated engine under the reference's rule."""
    setup = ReplaySetup(model=MODEL, hardware=INSTANT, node_bytes=capacity_blocks * 4096, eviction="lru", use=Use.CHAIN)
    (result,) = SimulatedEngine().replay(trace, setup, [Column.SHARED], lambda column, served: None)
    return result.hit_rate


def peer_job(peer: Any, accesses: Accesses, capacity_blocks: int, *, looks_up: bool) -> float:
    """Hit rate, by libCacheSim; 0 where no prefix is looked up."""
    cache, request = peer.LRU(cache_size=capacity_blocks), peer.Request()
    request.obj_size = 1
    find, get = cache.find, cache.get
    hit_tokens = tokens = 0
    for prompt, blocks in accesses.requests():
        prefix = 0
        if looks_up:
            for block in blocks:
                request.obj_id = block + 1
                if find(request, False) is None:
                    break
                prefix += 1
        for block in reversed(blocks):
            request.obj_id = block + 1
            get(request)
        hit_tokens += min(prompt, prefix * accesses.block_tokens)
        tokens += prompt
    return hit_tokens / tokens


def measured(job: Callable[[], float]) -> tuple[float, float]:
    """(CPU seconds, what it gave)."""
    began_s = time.process_time()
    gave = job()
    return time.process_time() - began_s, gave


def six_columns(trace: Trace) -> float:
    """CPU seconds of all six columns over 8 nodes under the client's placement."""
    profiles = builtin_profiles()
    setup = ReplaySetup(
        model=profiles.model("llama-3-70b"),
        hardware=profiles.machine("8xa800"),
        nodes=8,
        engines=8,
        node_bytes=2**40,
    )
    began_s = time.process_time()
    results = list(SimulatedEngine().replay(trace, setup, list(Column), lambda column, served: None))
    assert all(result.complete for result in results)
    return time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.replay.bench")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--fraction", type=float, default=0.1, help="capacity, of the distinct blocks")
    options = parser.parse_args()
    loaded = load_trace(options.folder / TRACE)
    requests = list(loaded)
    trace = replace(loaded, opener=lambda: iter(requests))
    accesses = accesses_of(trace)
    capacity_blocks = int(accesses.unique_blocks * options.fraction)
    jobs: dict[str, Callable[[], float]] = {"simulated": lambda: simulate(trace, capacity_blocks)}
    try:
        import libcachesim  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        print("libcachesim is not installed (pip install libcachesim): nothing to compare with")
    else:
        jobs["libcachesim gets"] = lambda: peer_job(libcachesim, accesses, capacity_blocks, looks_up=False)
        jobs["libcachesim job"] = lambda: peer_job(libcachesim, accesses, capacity_blocks, looks_up=True)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    rates: dict[str, float] = {}
    for _ in range(options.turns):
        for name, job in jobs.items():
            took_s, rates[name] = measured(job)
            seconds[name].append(took_s)
    total = len(accesses.blocks)
    print(f"{TRACE}: {total:,} accesses, LRU of {capacity_blocks:,} blocks, best of {options.turns} turns")
    for name, taken in seconds.items():
        told = f", hit rate {rates[name]:.4f}" if rates[name] else ""
        print(f"  {name:18} {total / min(taken):10,.0f} accesses/s of CPU{told}  (slowest {total / max(taken):,.0f})")
    print(f"  target             {TARGET_PER_S:10,.0f}")
    print(f"six columns of {len(requests):,} requests, 8 nodes: {six_columns(trace):.1f} s of CPU")
    print(f"  target             {COLUMNS_TARGET_S:10.1f}")


if __name__ == "__main__":
    main()
