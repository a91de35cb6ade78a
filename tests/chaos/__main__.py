"""``python -m tests.chaos --kills 200 --seed 1``: kill a node again and again under load, and see what is lost.

The seed decides every life of the node: how it ends, at which call of which operation, who else dies. What the
processes make of that depends on their scheduling, so a failing seed replays as far as processes permit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tests.chaos.deployment import running_deployment
from tests.chaos.run import ChaosRun, Totals


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="of the node (default 200)")
    parser.add_argument("--seed", type=int, default=None, metavar="S", help="of the plan (default: a new one)")
    parser.add_argument("--dram-share", type=float, default=0.2, help="kills without an SSD tier (default 0.2)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, progress on standard error")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "big")

    def say(line: str) -> None:
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    say(f"seed {seed}: {arguments.kills} kills")
    began_s = time.monotonic()
    with ExitStack() as resources:
        deployment = resources.enter_context(running_deployment())
        totals = ChaosRun(deployment, seed, resources, say).run(arguments.kills, dram_share=arguments.dram_share)
    figures = {"seed": seed, "wall_s": round(time.monotonic() - began_s, 1), **summary(totals)}
    print(json.dumps(figures, indent=2) if arguments.json else table(figures))
    if totals.violations:
        say(f"replay: python -m tests.chaos --kills {arguments.kills} --seed {seed}")
    return 1 if totals.violations else 0


def summary(totals: Totals) -> dict[str, Any]:
    """The figures of a run, JSON-ready."""
    return {
        "kills": dict(totals.kills),
        "kills_of_others": dict(totals.kills_of_others),
        "checked": dict(totals.checked),
        "clients_saw": dict(totals.seen),
        "violations": totals.violations,
        "slowest_call_s": round(totals.slowest_s, 2),
        "restart_median_s": _median(totals.restart_s),
        "restart_max_s": round(max(totals.restart_s, default=0), 2),
        "node_resident_mib": _first_last(totals.node_resident_bytes, 1),
        "client_resident_mib": _first_last(totals.client_resident_bytes, 6),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures of a run for people."""
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines.append(name.replace("_", " "))
            lines += [f"  {what:<54}{count:>12}" for what, count in sorted(value.items())]
        elif isinstance(value, list) and name == "violations":
            lines += [f"violations: {len(value)}", *(f"  {told}" for told in value)]
        else:
            lines.append(f"{name.replace('_', ' '):<56}{value!s:>12}")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> float:
    return round(sorted(values)[len(values) // 2], 2) if values else 0.0


def _first_last(values: Sequence[int], per_look: int) -> dict[str, float]:
    """Mean of the first and the last fifth, in MiB: flat memory has them alike."""
    fifth = max(len(values) // 5, min(per_look, len(values)))
    if not fifth:
        return {}

    def mean(part: Sequence[int]) -> float:
        return round(sum(part) / len(part) / 2**20, 1)

    return {"first": mean(values[:fifth]), "last": mean(values[-fifth:]), "most": mean([max(values)])}


if __name__ == "__main__":
    sys.exit(main())
