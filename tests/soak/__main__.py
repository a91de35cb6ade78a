"""``python -m tests.soak --minutes 30``: a deployment under load for a while; are memory, descriptors and disk flat?

Postgres, a control plane and two nodes with SSD, six tenants whose prompts never all fit, engines that come and go, and
an administrator who rotates salts, moves quotas and makes and deletes tenants and keys. The second quarter of the time
is compared with the last one. Exit status 1 where something grew, other bytes were read, or a call failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saltern.demo.stack import RunningUp, running_up
from tests.soak.load import BLOCK_BYTES, BLOCK_TOKENS, Administrator, Counts, Engine, working
from tests.soak.samples import command_of, descendants, folder_bytes, mapped_shared_bytes, sample, trend

MIB = 1024 * 1024
TENANTS = [f"team-{number}" for number in range(6)]
DRAM_BYTES, SSD_BYTES = 128 * MIB, 512 * MIB
#: What may be added between the second quarter and the last: caches of allocators and of Postgres settle slowly.
ALLOWED = {"memory": 0.05, "descriptors": 4, "threads": 2}
_SAMPLE_S = 5.0
_TOUCHED, _MAPPED = "postgres: shared memory", "postgres: shared memory that is mapped"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the series there")
    arguments = parser.parse_args()
    options = ("--dram", str(DRAM_BYTES), "--nodes", "2", "--ssd", str(SSD_BYTES))
    environment = {"SALTERN_NODE_METRICS_LISTEN": "off"}
    with running_up(options, environment=environment, purpose="soak") as up:
        figures = soak(up, arguments.minutes * 60)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(figures))
    return 1 if figures["violations"] else 0


def soak(up: RunningUp, seconds: float) -> dict[str, Any]:
    """Load and look for so long; the figures, ``violations`` among them."""
    run, folder = up.run, up.folder

    def saltern(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "saltern", *words, "--data-dir", str(folder / "data"), "--deadline-ms", "30000"],
            capture_output=True,
            text=True,
            timeout=120,
        )

    counts, stop = Counts(), threading.Event()
    threads: list[Engine | Administrator] = []
    for number, tenant in enumerate(TENANTS):
        secret = _make_tenant(saltern, folder, tenant)
        threads.append(Engine(tenant, run["control_endpoint"], secret, number, counts, stop))
    threads.append(Administrator(TENANTS, saltern, folder, counts, stop))

    series: dict[str, list[float]] = defaultdict(list)
    began_s = time.monotonic()
    with working(threads, stop):
        while (now_s := time.monotonic() - began_s) < seconds:
            _look(run, folder, series)
            _progress(now_s, seconds, series)
            stop.wait(max(0.0, _SAMPLE_S - (time.monotonic() - began_s - now_s)))
    violations = [violation for thread in threads for violation in thread.violations]
    trends = {name: trend(values) for name, values in series.items()}
    violations += [
        f"{name} grew from {one.early:,.0f} to {one.late:,.0f}"
        for name, one in trends.items()
        if _grew(name, one.early, one.late)
    ]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "seconds": round(time.monotonic() - began_s),
        "trends": {name: {"early": one.early, "late": one.late} for name, one in sorted(trends.items())},
        "counts": dict(counts.of.most_common()),
        "violations": violations,
        "series": dict(series),
    }


def _make_tenant(saltern: Any, folder: Path, tenant: str) -> str:
    key = folder / f"{tenant}.key"
    for words in (
        ("tenant", "create", tenant),
        ("quota", "set", tenant, "--dram-limit", "30MiB", "--dram-reserved", "8MiB", "--ssd-limit", "96MiB"),
        ("namespace", "create", tenant, "chat", "--model-fingerprint", "soak", "--block-tokens", str(BLOCK_TOKENS),
         "--block-bytes", str(BLOCK_BYTES)),
        ("key", "create", "engine", "--tenant", tenant, "--role", "writer", "--save", str(key), "--wait"),
    ):  # fmt: skip
        done = saltern(*words)
        assert done.returncode == 0, done.stderr
    return key.read_text().strip()


def _look(run: Mapping[str, Any], folder: Path, series: dict[str, list[float]]) -> None:
    """One sample of each part."""
    everybody = list(descendants(int(run["pid"])))
    nodes = [int(node["pid"]) for node in run["nodes"]]
    postgres = [pid for pid in everybody if "postgres" in command_of(pid).partition(" ")[0]]
    control = [pid for pid in everybody if "serve control" in command_of(pid)]
    parts = {"nodes": nodes, "control plane": control, "postgres": postgres, "clients": [os.getpid()]}
    for part, pids in parts.items():
        seen = sample(pids)
        assert seen.processes, f"no process of {part} is left"
        series[f"{part}: memory"].append(seen.memory_bytes)
        series[f"{part}: shared memory"].append(seen.shared_bytes)
        if part == "postgres":
            series[_MAPPED].append(mapped_shared_bytes(pids[0]))
        else:  # it has a process for each connection, and lets them go when it likes
            series[f"{part}: descriptors"].append(seen.descriptors)
            series[f"{part}: threads"].append(seen.threads)
    series["disk of nodes (SSD tier, policy)"].append(
        sum(folder_bytes(path) for path in (folder / "data").iterdir() if path.name.startswith(("node", "ssd")))
    )
    series["disk of everything"].append(folder_bytes(folder / "data"))


def _grew(name: str, early: float, late: float) -> bool:
    if name == "disk of everything":
        return False  # the audit trail and Postgres's log of writes grow with acts, as they must
    if name == _TOUCHED:
        return False  # buffers are touched one after the other; what is mapped is the most that it can come to
    if name == _MAPPED:
        return late > early
    for what, allowed in ALLOWED.items():
        if name.endswith(what):
            return late > early + (max(8 * MIB, early * allowed) if what == "memory" else allowed)
    return late > early * 1.1 + 16 * MIB


def _progress(now_s: float, seconds: float, series: dict[str, list[float]]) -> None:
    if len(series["nodes: memory"]) % 12 == 1:
        held = ", ".join(
            f"{part} {series[f'{part}: memory'][-1] / MIB:.0f} MiB"
            for part in ("nodes", "control plane", "postgres", "clients")
        )
        print(f"{now_s / 60:5.1f} of {seconds / 60:.0f} min: {held}", file=sys.stderr, flush=True)


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{figures['machine']}, {figures['seconds']} s", "", f"{'':<36}{'second quarter':>18}{'last quarter':>18}"]
    for name, one in figures["trends"].items():
        if "memory" in name or name.startswith("disk"):
            lines.append(f"{name:<36}{one['early'] / MIB:>14,.1f} MiB{one['late'] / MIB:>14,.1f} MiB")
        else:
            lines.append(f"{name:<36}{one['early']:>18,.0f}{one['late']:>18,.0f}")
    lines += ["", *(f"{what:<36}{count:>18,}" for what, count in figures["counts"].items())]
    lines += [f"VIOLATION: {violation}" for violation in figures["violations"][:20]] or ["nothing grew, nothing failed"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
