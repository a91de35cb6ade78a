"""``python -m tests.fuzz --seconds 600 --seed 7``: every RPC in every wrong way, over a real control plane and a node.

The seed decides every call; which of them meet in the server is up to the scheduling. A fault is printed with the bytes
that brought it about.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from tests.conftest import SessionPostgres, _reachable_folder
from tests.fuzz.calls import Outcome
from tests.fuzz.checks import check_control
from tests.fuzz.control import ControlFuzz
from tests.fuzz.node import TENANTS, fuzz_node
from tests.fuzz.world import control_process, world_on
from tests.support.control import migrate
from tests.support.static_node import MIB, StaticNode, static_node

SECONDS_MAX = 6 * 3600


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="how long, up to 6 h (default 60)")
    parser.add_argument("--seed", type=int, default=None, metavar="S", help="of every call (default: a new one)")
    parser.add_argument("--only", default="", metavar="WORD", help="methods of the control plane whose path holds it")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "big")
    seconds = min(arguments.seconds, SECONDS_MAX)
    print(f"seed {seed}: {seconds} s", flush=True)
    began_s = time.monotonic()
    with static_node(TENANTS, dram_bytes=32 * MIB) as node:
        control, cache, sessions = asyncio.run(fuzz_both(node, seed, seconds, arguments.only))
    print(f"control plane, node and {sessions} sessions of the wire protocol: {time.monotonic() - began_s:.0f} s")
    print(table(control), table(cache), sep="\n")
    is_wrong = bool(control.faults or cache.faults)
    if is_wrong:
        print(f"replay: make fuzz SECONDS={seconds} SEED={seed}", file=sys.stderr)
    return 1 if is_wrong else 0


async def fuzz_both(node: StaticNode, seed: int, seconds: float, only: str) -> tuple[Outcome, Outcome, int]:
    control, (cache, sessions) = await asyncio.gather(fuzz_control(seed, seconds, only), fuzz_node(node, seed, seconds))
    return control, cache, sessions


async def fuzz_control(seed: int, seconds: float, only: str) -> Outcome:
    from controlplane.postgres import EmbeddedPostgres, PostgresConfig

    with _reachable_folder() as folder, EmbeddedPostgres(PostgresConfig(folder / "postgres")) as server:
        with SessionPostgres(server).fresh_database(migrate) as urls:
            state = Path(folder) / "control"
            state.mkdir()
            with control_process(urls, state) as control:
                async with world_on(control) as world:
                    outcome = await ControlFuzz(world, seed, only).run(seconds)
                    outcome.faults += await check_control(world, urls, outcome)
    return outcome


def table(outcome: Outcome) -> str:
    lines = [f"{outcome.calls} calls, seed {outcome.seed}"]
    by_code: dict[str, int] = {}
    for (_, code), count in outcome.codes.items():
        by_code[code] = by_code.get(code, 0) + count
    lines += [f"  {code:<24}{count:>9}" for code, count in sorted(by_code.items())]
    if outcome.descriptors:
        lines.append(f"resident MiB: {[size >> 20 for size in outcome.resident_bytes[::30]]}")
        lines.append(f"descriptors: {outcome.descriptors[::30]}")
    lines.append(f"faults: {len(outcome.faults)}")
    lines += outcome.faults[:200]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
