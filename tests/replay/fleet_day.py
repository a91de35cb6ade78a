"""24 simulated hours of a fleet: ``python -m tests.replay.fleet_day TRACES_FOLDER [--tenants N] [--write FILE.yaml]``.

Recorded traces become the days of 100 tenants: a slice of a conversation or of tool calls is stretched to ten hours and
begins in the morning of one of three time zones, agents run in a sixtieth of their speed, documents are asked for as
they were on one day of a recorded week, and a few tenants scan all day long. They share nodes of the real core under
quotas of their own; then one node is lost for good after half of the requests. Prints hit rate over the day, who lost
what to whom, and what the books say; ends with 1 where a tenant was above its limit (I4) or books are not exact (I8).

Column ``cold`` (walls: each tenant has its reservation and no more) is what a tenant has alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dataplane.replay.engine import SimulatedEngine, client_placement
from dataplane.replay.fleet import Locator
from dataplane.replay.node import CacheNode
from saltern.replay.profiles import builtin_profiles
from saltern.replay.results import Column, ColumnResult, Series
from saltern.replay.room import Room
from saltern.replay.setup import ReplaySetup, TenantQuota
from saltern.traces.compositions import build, composition_from
from saltern.traces.request import Trace

DAY_S: Final = 86_400.0
BLOCK_TOKENS: Final = 512
COLUMNS: Final = (Column.COLD, Column.SHARED, Column.NODE_LOST)
_SLICE_S: Final = 200.0
_WORKING_DAY_S: Final = 36_000.0
#: When the morning is, in three time zones.
_MORNINGS_S: Final = (0.0, 25_200.0, 46_800.0)
_AGENTS: Final = ("miniswe_hash64", "magagent_hash64", "taubench_hash64")
_WEEK_DAYS: Final = 7


def composition(tenants: int, seed: int = 0) -> dict[str, Any]:
    """As YAML has it: of each ten tenants four chat, three call tools, two are agents, one asks documents; every
    fiftieth scans instead."""
    parts = {}
    for number in range(tenants):
        # Tenants of one time zone do not begin in the same minute.
        shift_s = _MORNINGS_S[number % 3] + 60.0 * (number * 7 % 60)
        part: dict[str, Any] = {"shift_s": shift_s}
        kind = number % 10
        if number % 50 == 49:
            name, part = "scan", {"scan": {"rate_per_s": 0.02, "duration_s": DAY_S, "input_tokens": 32_768}}
        elif kind < 7:
            name, file, slices = ("chat", "conversation", 17) if kind < 4 else ("tool", "synthetic", 5)
            start_s = _SLICE_S * (number * 11 % slices)
            part |= {
                "trace": f"mooncake/{file}_trace.jsonl.gz",
                "clip": {"start_s": start_s, "end_s": start_s + _SLICE_S},
                "scale_time": _WORKING_DAY_S / _SLICE_S,
            }
        elif kind < 9:
            name = "agent"
            part |= {"trace": f"lmcache_agent/{_AGENTS[number % 3]}.jsonl.gz", "scale_time": 60.0}
        else:
            day = number // 10 % _WEEK_DAYS
            name, part = "documents", {"trace": "ragpulse/0_trace.jsonl.gz"}
            part["clip"] = {"start_s": day * DAY_S, "end_s": (day + 1) * DAY_S}
        parts[f"{name}-{number:02}"] = part
    return {"seed": seed, "block_tokens": BLOCK_TOKENS, "clip": {"end_s": DAY_S}, "tenants": parts}


def held(trace: Trace) -> Trace:
    """The same with its requests in memory: reading a hundred files for every column takes longer than serving them."""
    requests = list(trace)
    return replace(trace, opener=lambda: iter(requests))


def setup_of(tenants: Sequence[str], *, nodes: int, node_bytes: int) -> ReplaySetup:
    """Half of the memory is reserved in equal parts; nobody may have more than eight times its part."""
    profiles = builtin_profiles()
    reserved_bytes = nodes * node_bytes // (2 * len(tenants))
    quota = TenantQuota(reserved_bytes=reserved_bytes, limit_bytes=min(8 * reserved_bytes, nodes * node_bytes))
    return ReplaySetup(
        model=profiles.model("llama-3-8b"),
        hardware=profiles.machine("1xh100"),
        nodes=nodes,
        node_bytes=node_bytes,
        engines=8,
        quotas=dict.fromkeys(tenants, quota),
    )


@dataclass(slots=True)
class Day:
    """What came of one.

    Attributes:
        columns: by name.
        broken: what must not be: tenants above a limit, books that are not exact.
    """

    columns: dict[Column, ColumnResult] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def rho(self, column: Column) -> dict[str, float]:
        """Hit rate over that behind walls, of every tenant that hits there."""
        alone = self.columns[Column.COLD].tenants
        found = self.columns[column].tenants
        return {name: found[name].hit_rate / one.hit_rate for name, one in alone.items() if one.hit_rate}

    def losses(self, column: Column) -> Counter[tuple[str, str]]:
        """Blocks by (whose they were, whose put made them go), where those are two."""
        tenants = self.columns[column].tenants
        return Counter(
            {
                (owner, taker): count
                for owner, tenant in tenants.items()
                for taker, count in tenant.evicted_by.items()
                if taker != owner and count
            }
        )


def serve(trace: Trace, setup: ReplaySetup) -> Day:
    """All columns, and what the books say after each and over time."""
    used: list[CacheNode] = []

    def placement(nodes: Sequence[CacheNode], block_tokens: int) -> Locator:
        used[:] = nodes
        return client_placement(nodes, block_tokens)

    day, room = Day(), Room.of(trace, setup)
    for result in SimulatedEngine(placement).replay(trace, setup, COLUMNS, lambda column, served: None):
        day.columns[result.column] = result
        shares = (room.walls if result.column is Column.COLD else room.shared)(setup, list(setup.quotas))
        limits = {name: share.limit_blocks * room.nodes * room.block_bytes for name, share in shares.items()}
        day.broken += above_limits(result, limits)
        for node in used:
            try:
                node.check_invariants()
            except AssertionError as error:
                day.broken.append(f"{result.column}: books of {node.node_id}: {error} (I8)")
    return day


def above_limits(result: ColumnResult, limit_bytes: Mapping[str, int]) -> list[str]:
    """Tenants that held more than they may, at the end or when the series was noted."""
    broken = []
    for name, may_bytes in limit_bytes.items():
        most_bytes = max([result.tenants[name].occupancy_bytes, *result.series.occupancy_bytes.get(name, ())])
        if most_bytes > may_bytes:
            broken.append(f"{result.column}: {name} had {most_bytes} bytes and may have {may_bytes} (I4)")
    return broken


def every_two_hours(series: Series) -> list[float | None]:
    """Mean hit rate over the bins of each two hours; None where nothing was asked for."""
    at_once = max(1, round(7200 / series.bin_s))
    parts = [series.hit_rate[first : first + at_once] for first in range(0, len(series.hit_rate), at_once)]
    asked = [[rate for rate in part if rate is not None] for part in parts]
    return [sum(rates) / len(rates) if rates else None for rates in asked]


def print_day(day: Day) -> None:
    for column, result in day.columns.items():
        print(f"\n{column}: {result.requests:,} requests, {result.block_accesses:,} block accesses")
        print(f"  hit rate {result.hit_rate:.4f}; simulated in {result.driver_cpu_s:.1f} s of CPU")
        print("  every two hours", *("-" if rate is None else f"{rate:.3f}" for rate in every_two_hours(result.series)))
        if column is Column.COLD:
            continue
        rho = day.rho(column)
        least = min(rho, key=rho.__getitem__)
        print(f"  least hit rate over that alone: {rho[least]:.3f} ({least}); mean {sum(rho.values()) / len(rho):.3f}")
        losses = day.losses(column)
        own = sum(tenant.evicted_by.get(name, 0) for name, tenant in result.tenants.items())
        print(f"  evicted by their own tenant {own:,}, by another {losses.total():,}; most:")
        for (owner, taker), count in losses.most_common(5):
            print(f"    {owner} lost {count:,} to {taker}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.replay.fleet_day")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--node-gib", type=int, default=1024)
    parser.add_argument(
        "--write", type=Path, help="write the composition here (JSON, which is YAML), and serve nothing"
    )
    options = parser.parse_args()
    wanted = composition(options.tenants)
    if options.write is not None:
        options.write.write_text(json.dumps(wanted, indent=2) + "\n")
        return
    began_s = time.process_time()
    trace = held(build(composition_from(wanted, "the fleet's day"), options.folder))
    read_s = time.process_time() - began_s
    print(f"{options.tenants} tenants, sha256 {trace.provenance.sha256}; read in {read_s:.1f} s of CPU")
    setup = setup_of(list(wanted["tenants"]), nodes=options.nodes, node_bytes=options.node_gib * 2**30)
    day = serve(trace, setup)
    print_day(day)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"\npeak memory {peak_mib:,} MiB; books {'exact, nobody above its limit' if not day.broken else 'BROKEN'}")
    for said in day.broken:
        print(f"  {said}")
    sys.exit(bool(day.broken))


if __name__ == "__main__":
    main()
