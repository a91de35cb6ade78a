"""The simulator runs some thousand steps here; ``make sim SEEDS=n`` runs as many as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.plants import PLANTS, planted
from tests.sim.runner import WORLDS, Run, run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 700
SEEDS_MAX = 60
#: Where to begin for what takes long to be found from the first seed on.
FIRST_SEEDS = {"touch what is lent": 35, "lend past the bound": 21}


def simulate(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sim", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("seed", range(6))
def test_every_rule_holds_after_every_step(seed: int) -> None:
    result = run(seed, STEPS)
    assert not result.failure, result.report()
    assert result.steps == STEPS


def test_a_few_seeds_reach_everything_that_can_happen() -> None:
    """A check of what never happens checks nothing."""
    wanted = {
        *(
            "stored",
            "hits",
            "evicted for a put",
            "evicted from others",
            "moved",
            "dropped a corrupt entry",
            "delete",
            "clock",
            "trimmed",
            "worked off",
        ),
        *("died while putting", "died while getting", "rotate_epoch", "retire_epoch", "recreate_namespace"),
        *("join_or_leave", "left the group", "hits of a peer", "name_one_side", "refused as GROUP_NOT_AVAILABLE"),
        *("suspend_or_resume", "delete_or_create_tenant", "change_quota", "bad_policy", "read_nearly_all"),
        *("refused as NODE_FULL", "refused as QUOTA_EXCEEDED", "refused as ENTRY_TOO_LARGE"),
        *("refused as WRITE_IN_PROGRESS", "finished as CHECKSUM_MISMATCH", "finished as QUOTA_EXCEEDED"),
    }
    for seed in range(100, 100 + SEEDS_MAX):
        wanted -= run(seed, STEPS).done.keys()
        if not wanted:
            return
    raise AssertionError(f"these never happened: {wanted}")


def first_failure(first_seed: int = 0) -> Run:
    for seed in range(first_seed, first_seed + SEEDS_MAX):
        result = run(seed, STEPS)
        if result.failure:
            return result
    raise AssertionError(f"{SEEDS_MAX} seeds did not find the fault")


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    with planted(name):
        found = first_failure(FIRST_SEEDS.get(name, 0))
        again = run(found.seed, found.steps)
    assert again == found, "the failing seed does not replay"
    assert len(found.transcript) > 1 and str(found.seed) in found.report()


@pytest.mark.parametrize("kind", WORLDS)
def test_a_seed_is_the_same_in_every_process(kind: str) -> None:
    arguments = ("--world", kind, "--seed", "7", "--steps", "300")
    first, second = (simulate(*arguments, hash_seed=seed) for seed in ("1", "2"))
    assert first.returncode == 0 and first.stdout == second.stdout
    assert f"the same as {run(7, 300, kind).digest}" in first.stdout


def test_the_command_prints_a_failing_seed_with_its_last_commands() -> None:
    found = simulate("--seeds", "9", "--steps", "300", "--plant", "give out overlapping memory")
    assert found.returncode == 1
    assert "I7: " in found.stdout and "replay: python -m tests.sim --world dram --seed " in found.stdout
