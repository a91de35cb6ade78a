"""``python -m tests.faults``: kill, pause, cut and slow a node, a control plane and Postgres under load.

Prints a table and writes JSON: what was lost, and how long each fault was felt. With root's rights every process has a
network namespace of its own; without, lines cannot be cut, and that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.run import ALL, SHORT, FaultRun, Outcome
from tests.support.network import enter_private_network


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one fault of each part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--loopback", action="store_true", help="plain processes, even where namespaces can be made")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep what the processes said")
    parser.add_argument("--only", metavar="WORDS", help="faults whose name holds these words, such as 'postgres cut'")
    arguments = parser.parse_args()
    if not arguments.loopback:
        enter_private_network("tests.faults", sys.argv[1:])

    from tests.faults.deployment import running_deployment  # after the new start: it is slow to import

    chosen = [
        fault for fault in (SHORT if arguments.short else ALL) if not arguments.only or _is_named(fault, arguments.only)
    ]

    def run(say: Callable[[str], None]) -> tuple[list[Outcome], bool]:
        with running_deployment(arguments.log) as deployment:
            return FaultRun(deployment, say).run(chosen), deployment.can_cut

    return told(described(run), arguments.json)


def described(run: Callable[[Callable[[str], None]], tuple[list[Outcome], bool]]) -> dict[str, Any]:
    """Figures of what ``run`` did: it gets who prints a line, and returns its outcomes and whether lines were real."""
    began_s = time.monotonic()
    outcomes, has_namespaces = run(lambda line: print(line, file=sys.stderr, flush=True))
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "network": "namespaces" if has_namespaces else "loopback",
        "wall_s": round(time.monotonic() - began_s, 1),
        "faults": [outcome.to_json() for outcome in outcomes],
    }


def told(figures: dict[str, Any], file: Path | None) -> int:
    """Print the figures, and write them to ``file``; the exit status."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures, indent=2) + "\n")
    print(table(figures))
    return 1 if any(fault["violations"] for fault in figures["faults"]) else 0


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    head = f"{'fault':<24}{'held':>7}{'kind of work':>32}{'failed':>12}{'first-last':>12}{'longest gap':>13}"
    lines = [f"{figures['machine']}, {figures['network']}, {figures['wall_s']} s", "", head, "-" * len(head)]
    for fault in figures["faults"]:
        name = f"{fault['target']} {fault['way']}"
        if fault["skipped"]:
            lines.append(f"{name:<24}skipped: {fault['skipped']}")
            continue
        for kind, felt in fault["felt"].items():
            failed = f"{felt['failed']}/{felt['calls']}"
            lines.append(
                f"{name:<24}{fault['held_s']:>6.1f}s{kind:>32}{failed:>12}"
                f"{felt['first_to_last_failure_s']:>11.1f}s{felt['longest_gap_s']:>12.1f}s"
            )
            name = ""
        lines.append(f"{'':<24}{fault['lost']} of {fault['acknowledged']} acknowledged entries lost")
        lines += [f"{'':<24}VIOLATION: {violation}" for violation in fault["violations"]]
    return "\n".join(lines)


def _is_named(fault: tuple[str, str], words: str) -> bool:
    return all(word in " ".join(fault) for word in words.split())


if __name__ == "__main__":
    sys.exit(main())
