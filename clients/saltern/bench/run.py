"""The bench from beginning to end: a private stack, a tenant, turns of ours and the limit, a report."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from saltern.admin_client import AdminClient, read_api_key
from saltern.bench.cases import (
    BATCH_BYTES,
    MIB,
    SIZES_BYTES,
    Case,
    CpuMeter,
    latencies,
    lookup_cases,
    transfer_cases,
)
from saltern.bench.limits import BareSocket, Memcpy
from saltern.client import Client
from saltern.demo.member import Member
from saltern.demo.stack import running_stack

DRAM_BYTES: Final = 1536 * MIB
LATENCY_COUNT: Final = 300
_METERS: Final = ("tcp put", "tcp get", "shm put", "shm get")


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was measured: the paired cases, latencies of single blocks, CPU seconds for each gigabyte."""

    turns: int
    cases: list[Case]
    latency_ms: dict[str, dict[str, dict[str, float]]]
    cpu_s_per_gb: dict[str, dict[str, float]]

    def as_json(self) -> dict[str, Any]:
        """The stable shape of ``build/bench/report.json``."""
        return {
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
            "turns": self.turns,
            "batch_bytes": BATCH_BYTES,
            "authentication": True,
            "cases": [
                {
                    "name": case.name,
                    "unit": case.unit,
                    "ours": median(case.ours_seen),
                    "limit": median(case.limit_seen),
                    "limit_name": case.limit_name,
                    "ratio": case.ratio,
                    "target": case.target,
                    "ours_all": case.ours_seen,
                    "limit_all": case.limit_seen,
                }
                for case in self.cases
            ],
            "latency_1mib_ms": self.latency_ms,
            "cpu_s_per_gb": self.cpu_s_per_gb,
        }

    def write(self, output_dir: Path) -> Path:
        """Write ``report.json``; returns its path."""
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / "report.json"
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        return path


def run_bench(turns: int, say: Callable[[str], None]) -> BenchReport:
    """Measure on a private stack that is gone afterwards.

    Args:
        turns: how often each pair is measured; the medians of that many are reported.
        say: called with what is being done.

    Raises:
        SalternError: the stack did not start, or a put or get of the bench failed.
    """
    with ExitStack() as resources:
        say("starting a private stack: Postgres, control plane, one node")
        stack = resources.enter_context(running_stack(dram_bytes=DRAM_BYTES, environment={}))
        admin = resources.enter_context(AdminClient(stack.control, read_api_key(stack.admin_api_key_file)))
        tcp, shm = (_client(resources, admin, door) for door in ("tcp", "shm"))
        bare = resources.enter_context(BareSocket())
        meters = {name: CpuMeter(stack.node_pid) for name in _METERS}
        cases = [*transfer_cases(tcp, shm, bare, Memcpy(), meters), *lookup_cases(tcp, bare)]
        say("warming up")
        for case in cases:
            case.turn(ours_first=True)
            case.ours_seen.clear()
            case.limit_seen.clear()
        for meter in meters.values():
            meter.reset()
        for turn in range(turns):
            say(f"turn {turn + 1} of {turns}")
            for case in cases:
                case.turn(ours_first=turn % 2 == 0)
        cpu = {name: meter.per_gigabyte() for name, meter in meters.items()}
        say("single blocks of 1 MiB")
        latency = {client.transport: latencies(client, LATENCY_COUNT) for client in (tcp, shm)}
        say("stopping the stack")
    return BenchReport(turns, cases, latency, cpu)


def _client(resources: ExitStack, admin: AdminClient, transport: str) -> Client:
    """A client of a tenant of its own that holds half the node."""
    member = Member.join(
        admin,
        tenant=f"bench-{transport}",
        namespace="bench",
        limit_bytes=DRAM_BYTES // 2,
        reserved_bytes=DRAM_BYTES // 2,
        block_bytes=max(SIZES_BYTES),
        transport=transport,
    )
    return resources.enter_context(member).client
