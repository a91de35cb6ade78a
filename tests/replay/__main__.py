"""What the simulated replay must reproduce, on the traces themselves: ``python -m tests.replay TRACES_FOLDER``.

Golden rates of FIFO and LRU through the whole engine to 4 digits, and of OPT by :mod:`saltern.traces.hit_rates`; what
``fairness_reference.py`` and ``placement_reference.py`` print, for the rules that are the same, to 3 digits. Prints one
line for each; ends with 1 where one differs. ``--only`` names parts; all of them take some minutes of CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from dataplane.replay.engine import SimulatedEngine
from saltern.replay.results import Column, ColumnResult
from saltern.replay.setup import ReplaySetup, TenantQuota, Use
from saltern.traces.hit_rates import Policy, accesses_of, hit_rate
from saltern.traces.load import load_trace
from saltern.traces.request import Trace
from tests.replay import rules

TENANTS: Final = ("agent", "chat", "burst", "scan")
_FOUR: Final = "multitenant/four_tenants_15min.jsonl.gz"
_BLOCK_BYTES: Final = 4096
#: (trace, blocks): OPT finds more here than the golden file has, see docs/eviction.md.
_OPT_IS_BETTER: Final = {("mt_sample", 0.01), ("mt_sample", 0.02)}
#: Hours of CPU at each point: only where it is asked for by name.
_LONG: Final = ("weka_sample",)


class Check(NamedTuple):
    what: str
    expected: float
    found: float
    digits: int

    @property
    def holds(self) -> bool:
        return round(self.found, self.digits) == round(self.expected, self.digits)


def served(trace: Trace, capacity_blocks: int, *columns: Column, **more: Any) -> list[ColumnResult]:
    """Columns under the rule of reference rates, on machines that take no time."""
    setup = ReplaySetup(
        model=rules.MODEL,
        hardware=rules.INSTANT,
        node_bytes=capacity_blocks * _BLOCK_BYTES,
        use=Use.CHAIN,
        **more,
    )
    return list(SimulatedEngine().replay(trace, setup, columns, lambda column, requests: None))


def golden(folder: Path, names: list[str]) -> Iterator[Check]:
    """FIFO, LRU and OPT of every trace in the golden file, or of those named."""
    document = json.loads((folder / "golden_hit_rates.json").read_text())
    for name, entry in document["traces"].items():
        if name not in names and (names or name in _LONG):
            continue
        loaded = load_trace(folder / entry["file"])
        requests = list(loaded)
        # The golden file takes tenants' blocks for different ones, and all of them for one tenant's.
        trace = replace(loaded, opener=lambda requests=requests: iter(requests))
        accesses = accesses_of(trace)
        for point in entry["points"]:
            what = f"golden {name} {point['policy']} {point['capacity_blocks']:,} blocks"
            match point["policy"]:
                case "opt":
                    if (name, point["fraction"]) not in _OPT_IS_BETTER:
                        rate = hit_rate(accesses, Policy.OPT, point["capacity_blocks"])
                        yield Check(what, point["hit_rate"], rate, 4)
                case "fifo" | "lru":
                    (result,) = served(
                        _of_one_tenant(trace), point["capacity_blocks"], Column.SHARED, eviction=point["policy"]
                    )
                    yield Check(what, point["hit_rate"], result.hit_rate, 4)


def _of_one_tenant(trace: Trace) -> Trace:
    """The same requests of one tenant, whose blocks are told apart by who sent them."""
    numbers = {tenant: number for number, tenant in enumerate(sorted({request.tenant for request in trace}))}
    if len(numbers) == 1:
        return trace
    bits = 40

    def joined() -> Iterator[Any]:
        for request in trace:
            first = numbers[request.tenant] << bits
            ids = type(request.block_ids)("q", [first + block for block in request.block_ids])
            yield replace(request, tenant="", block_ids=ids)

    return replace(trace, tenants=(), opener=joined)


def fairness(folder: Path, _: list[str]) -> Iterator[Check]:
    """Static split, shared LRU and strict reservations; the gated rules are not the node's."""
    said = _printed(folder, "fairness_reference.py")
    trace = load_trace(folder / _FOUR)
    for capacity_blocks in (48_000, 24_000):
        reserved = TenantQuota(reserved_bytes=capacity_blocks // len(TENANTS) * _BLOCK_BYTES)
        cold, shared = served(trace, capacity_blocks, Column.COLD, Column.SHARED, eviction="lru")
        quotas = dict.fromkeys(TENANTS, reserved)
        (strict,) = served(trace, capacity_blocks, Column.SHARED, eviction="lru", quotas=quotas)
        lines = said[f"C={capacity_blocks}"]
        yield Check(f"fairness {capacity_blocks} static split", float(lines[0].split()[-1]), cold.hit_rate, 4)
        for line, result in zip(lines[1:3], (shared, strict), strict=True):
            name, _, rest = line.partition(" min rho ")
            rho, _, aggregate = rest.partition(" aggregate ")
            alone = {tenant: found.hit_rate for tenant, found in cold.tenants.items() if found.hit_rate > 0.001}
            least = min(result.tenants[tenant].hit_rate / rate for tenant, rate in alone.items())
            yield Check(f"fairness {capacity_blocks} {name.strip()}, least rho", float(rho), least, 3)
            yield Check(
                f"fairness {capacity_blocks} {name.strip()}, aggregate", float(aggregate.split()[0]), result.hit_rate, 3
            )


def placement(folder: Path, names: list[str]) -> Iterator[Check]:
    """Hit rates before and after losing one of eight nodes, for every rule that gives each block one place."""
    expected = {line.split()[0]: line.split()[1:3] for line in _output(folder, "placement_reference.py")[1:]}
    trace = replace(load_trace(folder / _FOUR), tenants=TENANTS)
    for name, anchor in rules.RULES.items():
        if names and name not in names:
            continue
        for loses, rate in zip((False, True), expected[name], strict=True):
            found = rules.hit_rate(
                trace,
                lambda nodes, anchor=anchor: rules.AnchoredPlacement(nodes, anchor),  # type: ignore[misc]
                loses=loses,
            )
            yield Check(f"placement {name}, {'one of 8 lost' if loses else 'all there'}", float(rate), found, 3)


def _output(folder: Path, script: str) -> list[str]:
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _printed(folder: Path, script: str) -> dict[str, list[str]]:
    """Lines by the heading (``C=48000``) that they stand under, heading first."""
    found: dict[str, list[str]] = {}
    for line in _output(folder, script):
        if not line.startswith(" "):
            lines = found[line.split()[0]] = []
        lines.append(line)
    return found


PARTS: Final[dict[str, Callable[[Path, list[str]], Iterator[Check]]]] = {
    "golden": golden,
    "fairness": fairness,
    "placement": placement,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--names", nargs="+", default=[], help="golden traces, or rules of placement")
    options = parser.parse_args()
    differ = checked = 0
    for part in options.only:
        for check in PARTS[part](options.folder, options.names):
            checked += 1
            differ += not check.holds
            said = "equal" if check.holds else f"DIFFERS from {check.expected}"
            print(f"{check.what}: {check.found:.{check.digits}f} {said}", flush=True)
    print(f"{checked} checked, {differ or 'none'} differ" if checked else "nothing of these names to check")
    return 0 if checked and not differ else 1


if __name__ == "__main__":
    sys.exit(main())
