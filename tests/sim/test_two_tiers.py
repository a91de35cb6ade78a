"""The two-tier world: some thousand steps here, and every fault planted into what joins the tiers is found."""

from __future__ import annotations

import pytest

from tests.sim.runner import TWO_TIERS, Run, run
from tests.sim.two_tier_plants import PLANTS, planted

STEPS = 500
SEEDS_MAX = 80
#: Where to begin to look for faults that need a rare chain of events; from 0 on it takes half a minute.
FIRST_SEEDS = {
    "the older record wins": 36,
    "forget records that no index has": 18,
    "never try a removal again": 30,
    "say that nothing was purged at a start": 24,
    "serve what was deleted meanwhile": 12,
    "ignore reservations on SSD": 11,
    "grow past a namespace's limit": 4,
    "grow past a namespace's limit on SSD": 4,
    "keep what is above a namespace's lowered limit": 4,
}


@pytest.mark.parametrize("seed", range(6))
def test_every_rule_holds_on_both_tiers_after_every_step(seed: int) -> None:
    result = run(seed, STEPS, TWO_TIERS)
    assert not result.failure, result.report()
    assert result.steps == STEPS


def test_a_few_seeds_reach_everything_that_can_happen() -> None:
    """A check of what never happens checks nothing."""
    wanted = {
        *("stored", "promoted", "written anew", "kill", "killed in mid-write", "lose_power", "stop_cleanly", "trimmed"),
        *("did: write a record", "did: write a tombstone", "did: seal a segment", "did: remove a segment"),
        *("did: destroy a key", "failed to do: write a tombstone", "segments taken from others", "entries recovered"),
        *("entries adopted after a restart", "bits rotten while stopped", "no staging memory", "read failed"),
        *("fault: a write failed", "fault: a write was torn", "fault: a sync failed", "fault: a footer was torn"),
        *("fault: the disk was full", "fault: a file could not be removed", "fault: a key could not be destroyed"),
    }
    for seed in range(200, 200 + SEEDS_MAX):
        wanted -= run(seed, STEPS, TWO_TIERS).done.keys()
        if not wanted:
            return
    raise AssertionError(f"these never happened: {wanted}")


def first_failure(first_seed: int) -> Run:
    for seed in range(first_seed, first_seed + SEEDS_MAX):
        result = run(seed, STEPS, TWO_TIERS)
        if result.failure:
            return result
    raise AssertionError(f"{SEEDS_MAX} seeds did not find the fault")


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    with planted(name):
        found = first_failure(FIRST_SEEDS.get(name, 0))
        again = run(found.seed, found.steps, TWO_TIERS)
    assert again == found, "the failing seed does not replay"
    assert "--world two-tiers" in found.report()
