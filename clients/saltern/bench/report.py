"""What a run has to say: JSON for programs, tables for people, Markdown for docs/performance.md."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from saltern.bench.batches import BatchResult
from saltern.bench.case import Case, Contender, Role
from saltern.bench.markdown import markdown_table
from saltern.bench.targets import Target, targets

SCHEMA: Final = "saltern.bench/2"


@dataclass(frozen=True, slots=True)
class PeerNote:
    """What is known of a peer: its version where it ran, else why it did not."""

    name: str
    version: str
    ways: dict[int, dict[str, str]]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One run.

    Attributes:
        turns: how often each contender was measured.
        private_network: everything ran in a network namespace with only loopback.
        load_before: the machine's load average over a minute before it began.
    """

    turns: int
    batch_bytes: int
    private_network: bool
    load_before: float
    cases: Sequence[Case]
    batches: Sequence[BatchResult]
    latency_ms: dict[str, dict[str, dict[str, float]]]
    authentication: dict[str, float]
    peers: Sequence[PeerNote]

    @property
    def targets(self) -> list[Target]:
        return targets(self.cases, self.batches)

    def as_json(self) -> dict[str, Any]:
        """The stable shape of ``build/bench/report.json``, told in docs/performance.md."""
        return {
            "schema": SCHEMA,
            "machine": {
                "cpus": len(os.sched_getaffinity(0)),
                "kernel": platform.release(),
                "python": platform.python_version(),
                "load_before": self.load_before,
                "private_network": self.private_network,
            },
            "turns": self.turns,
            "batch_bytes": self.batch_bytes,
            "cases": [_case_json(case) for case in self.cases],
            "batches": [asdict(batch) for batch in self.batches],
            "latency_1mib_ms": self.latency_ms,
            "authentication": {"on": True, **self.authentication},
            "peers": [asdict(peer) for peer in self.peers],
            "targets": [target.as_json() for target in self.targets],
        }

    def write(self, output_dir: Path) -> Path:
        """Write ``report.json`` and ``report.md``; returns the path of the first."""
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / "report.json"
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(self.as_markdown() + "\n", encoding="utf-8")
        return path

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Headings and rows: figures, CPU, targets, batches, single blocks, authentication, peers."""
        return [
            self._figures(),
            self._cpu(),
            self._targets(),
            self._batches(),
            self._latencies(),
            self._authentication(),
            self._peers(),
        ]

    def as_markdown(self) -> str:
        return "\n\n".join(markdown_table(*table) for table in self.tables())

    def _figures(self) -> tuple[list[str], list[list[str]]]:
        peers = _peer_names(self.cases)
        rows = []
        for case in self.cases:
            limits = ", ".join(f"{_number(limit.figure)} {limit.name}" for limit in case.of(Role.LIMIT))
            row = [case.name, case.unit, _number(case.ours.figure), limits]
            rows.append(row + [_figure_of(case, name) for name in peers])
        return ["", "unit", "ours", "the machine's limit", *peers], rows

    def _cpu(self) -> tuple[list[str], list[list[str]]]:
        counted = [case for case in self.cases if case.ours.cpu is not None]
        peers = _peer_names(counted)
        rows = []
        for case in counted:
            contenders = [case.ours, *case.of(Role.LIMIT)[:1], *[case.find(name) for name in peers]]
            rows.append([case.name, *map(_cpu_of, contenders)])
        return ["CPU s/GB, client + server", "ours", "bare socket pair", *peers], rows

    def _targets(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for target in self.targets:
            figure = "-" if target.figure is None else f"{target.figure:.2f}"
            bound = f"{'<=' if target.at_most else '>='} {target.bound:g}"
            rows.append([target.name, figure, bound, target.verdict, target.note])
        return ["target", "figure", "bound", "", "note"], rows

    def _batches(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [f"{batch.keys:,}", batch.store, *map(_seconds, (batch.put_s, batch.exists_s, batch.get_s)), batch.failure]
            for batch in self.batches
        ]
        return ["keys of 4 KiB in one batch", "", "put s", "exists s", "get s", "failed"], rows

    def _latencies(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [f"{transport} {operation}", f"{figures['p50_ms']:.2f}", f"{figures['p99_ms']:.2f}"]
            for transport, by_operation in self.latency_ms.items()
            for operation, figures in by_operation.items()
        ]
        return ["1 MiB at a time", "p50 ms", "p99 ms"], rows

    def _authentication(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [name.rpartition("_")[0].replace("_", " "), f"{figure:.0f}", name.rpartition("_")[2]]
            for name, figure in self.authentication.items()
        ]
        return ["authentication", "", "unit"], rows

    def _peers(self) -> tuple[list[str], list[list[str]]]:
        return ["peer", "version, or why it did not run"], [
            [peer.name, peer.reason or peer.version] for peer in self.peers
        ]


def _case_json(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "unit": case.unit,
        "contenders": [_contender_json(case, contender) for contender in case.contenders],
    }


def _contender_json(case: Case, contender: Contender) -> dict[str, Any]:
    counted = contender.cpu is not None and contender.cpu.moved_bytes > 0
    return {
        "name": contender.name,
        "role": contender.role.value,
        "figure": contender.figure if contender.seen else None,
        "seen": contender.seen,
        "ours_to_it": case.ratio(contender) if contender.seen else None,
        "cpu_s_per_gb": {"client": contender.cpu.client_s_per_gb, "server": contender.cpu.server_s_per_gb}
        if counted and contender.cpu is not None
        else None,
        "failure": contender.failure,
    }


def _peer_names(cases: Sequence[Case]) -> list[str]:
    names = [contender.name for case in cases for contender in case.contenders if contender.role is Role.PEER]
    return list(dict.fromkeys(names))


def _figure_of(case: Case, name: str) -> str:
    contender = next((contender for contender in case.contenders if contender.name == name), None)
    if contender is None:
        return ""
    return _number(contender.figure) if contender.seen else "failed"


def _cpu_of(contender: Contender | None) -> str:
    if contender is None or contender.cpu is None or not contender.cpu.moved_bytes:
        return ""
    return f"{contender.cpu.s_per_gb:.2f}"


def _number(figure: float) -> str:
    return f"{figure:.2f}" if figure < 10 else f"{figure:.1f}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"
