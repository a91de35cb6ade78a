"""``python -m tests.sim``: run seeds; a failing one is printed with its last commands and replays."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.sim import plants, two_tier_plants
from tests.sim.runner import DRAM, TWO_TIERS, WORLDS, run

EPILOG = "planted faults: " + ", ".join([*plants.PLANTS, *two_tier_plants.PLANTS])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__, epilog=EPILOG)
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many seeds (default 100)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K", help="the first of them (default 0)")
    parser.add_argument("--steps", type=int, default=1000, metavar="M", help="commands of each seed (default 1000)")
    parser.add_argument("--minutes", type=float, default=None, help="stop after this time, whatever --seeds says")
    parser.add_argument("--seed", type=int, default=None, help="replay this seed alone and print its last commands")
    parser.add_argument("--world", choices=WORLDS, default=None, help="which kind of node (default: each seed, both)")
    parser.add_argument(
        "--plant", choices=[*plants.PLANTS, *two_tier_plants.PLANTS], help="break the core on purpose: it must be found"
    )
    arguments = parser.parse_args()

    if arguments.plant:
        arguments.world = DRAM if arguments.plant in plants.PLANTS else TWO_TIERS
    planted = plants.planted if arguments.world == DRAM else two_tier_plants.planted
    with planted(arguments.plant) if arguments.plant else nullcontext():
        if arguments.seed is not None:
            result = run(arguments.seed, arguments.steps, arguments.world or WORLDS[0])
            print(result.report() if result.failure else "\n".join(result.transcript))
            print(f"every replay is the same as {result.digest}")
            return bool(result.failure)
        return _run_seeds(arguments)


def _run_seeds(arguments: argparse.Namespace) -> int:
    began_s = time.monotonic()
    end_s = began_s + arguments.minutes * 60 if arguments.minutes else None
    seeds = steps = 0
    kinds = [arguments.world] if arguments.world else list(WORLDS)
    done: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        if end_s is not None and time.monotonic() >= end_s:
            break
        seeds += 1
        for kind in kinds:
            result = run(seed, arguments.steps, kind)
            steps += result.steps
            done[kind] += result.done
            if result.failure:
                print(result.report())
                return 1
    elapsed_s = time.monotonic() - began_s
    print(f"{seeds} seeds, {steps} steps in {elapsed_s:.1f} s: every rule held after every step")
    for kind, counts in done.items():
        print(f"{kind}, and how often each thing happened:")
        for what, count in sorted(counts.items()):
            print(f"  {what:<34}{count:>12}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
