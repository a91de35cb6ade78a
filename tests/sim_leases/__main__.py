"""``python -m tests.sim_leases``: run seeds; a failing one is printed with what had happened and replays."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.sim_leases.plants import PLANTS, planted
from tests.sim_leases.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim_leases", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many seeds (default 100)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K", help="the first of them (default 0)")
    parser.add_argument("--seed", type=int, default=None, help="replay this seed alone and print what happened")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="break a rule on purpose: it must be found")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    if arguments.seed is not None:
        seeds = range(arguments.seed, arguments.seed + 1)
    began_s, events, done = time.monotonic(), 0, Counter[str]()
    with planted(arguments.plant) if arguments.plant else nullcontext():
        for seed in seeds:
            result = World(seed).run()
            events += result.events
            done += result.done
            if result.failure or arguments.seed is not None:
                print("\n".join(result.transcript))
            if result.failure:
                print(f"{result.failure}\nreplay: python -m tests.sim_leases --seed {seed}")
                return 1
    elapsed_s = time.monotonic() - began_s
    print(f"{len(seeds)} seeds, {events} events in {elapsed_s:.1f} s: every rule held after every event")
    for what, count in sorted(done.items()):
        print(f"  {what:<24}{count:>12}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
