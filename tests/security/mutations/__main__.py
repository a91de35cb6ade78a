"""``make threats``: every line of SECURITY.md's table is tried, by taking its answer away and looking who notices.

Each mutation is made in a copy of the checkout and the tests that are named for it run there; one that stays green is a
threat that nobody would notice, and the run fails. All tests run once before, in the copy as it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.security.mutations.copied import Copy, Outcome, copied
from tests.security.mutations.table import MUTATIONS
from tests.security.mutations.values import Mutation
from tests.security.threats import ROOT

#: What a run may end with; everything else is a finding.
_GOOD = (Outcome.RED, Outcome.NOT_HERE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.mutations", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="threats, tests and files whose name holds it")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts, for several runs at a time")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--rdma", action="store_true", help="those of RDMA too, in the guest of make test-rdma")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests unbroken before")
    arguments = parser.parse_args()
    part, _, parts = arguments.part.partition("/")
    chosen = [one for one in MUTATIONS if arguments.only in str(one)][int(part) - 1 :: int(parts)]
    if not chosen:
        parser.error(f"nothing holds {arguments.only!r}")
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.threat}: {', '.join(edit.path for edit in mutation.edits)}")
        return 0
    with copied(ROOT) as copy:
        if not arguments.no_baseline and not _is_green(copy, chosen, in_guest=arguments.rdma):
            return 1
        findings = sum(_try(copy, mutation, in_guest=arguments.rdma) not in _GOOD for mutation in chosen)
    print(f"{len(chosen)} mutations of {len({one.threat for one in chosen})} threats: {findings} findings")
    return 1 if findings else 0


def _is_green(copy: Copy, mutations: Sequence[Mutation], *, in_guest: bool) -> bool:
    """Whether the tests pass in the copy as long as nothing is broken."""
    guests = [test for one in mutations if one.in_rdma_guest and in_guest for test in one.tests]
    for test in dict.fromkeys(guests):
        outcome, detail = copy.run_in_guest(test)
        print(f"{'unbroken':<10} {test.rpartition('/')[2]}  {detail}", flush=True)
        if outcome is not Outcome.GREEN:
            return False
    tests = dict.fromkeys(test for one in mutations if not one.in_rdma_guest for test in one.tests)
    if not tests:
        return True
    began_s = time.monotonic()
    outcome, detail = copy.run(tuple(tests))
    print(f"{'unbroken':<10} {time.monotonic() - began_s:6.1f} s  {len(tests)} tests  {detail}", flush=True)
    return outcome is Outcome.GREEN


def _try(copy: Copy, mutation: Mutation, *, in_guest: bool = False) -> Outcome:
    """Break, run every test, mend; the worst outcome of any."""
    began_s = time.monotonic()
    outcomes: list[tuple[Outcome, str]] = []
    if mutation.in_rdma_guest and not in_guest:
        outcomes.append((Outcome.NOT_HERE, "runs in the guest of make test-rdma: --rdma"))
    else:
        with copy.broken(mutation.edits):
            for test in mutation.tests:
                outcomes.append(copy.run_in_guest(test) if mutation.in_rdma_guest else copy.run((test,)))
    worst = _worst([outcome for outcome, _ in outcomes])
    print(f"{worst.value:<10} {time.monotonic() - began_s:6.1f} s  {mutation.threat}", flush=True)
    for test, (outcome, detail) in zip(mutation.tests, outcomes, strict=False):
        print(f"    {outcome.value:<10} {test.rpartition('/')[2]}  {detail}", flush=True)
    return worst


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    return next((outcome for outcome in outcomes if outcome not in _GOOD), outcomes[0])


if __name__ == "__main__":
    sys.exit(main())
