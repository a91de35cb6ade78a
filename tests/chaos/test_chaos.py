"""A few kills of real processes; ``make chaos KILLS=n`` does as many as one likes."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

import pytest

from tests.chaos.__main__ import summary, table
from tests.chaos.aim import Aim
from tests.chaos.deployment import running_deployment
from tests.chaos.plan import WAYS, draw_life
from tests.chaos.run import ChaosRun

KILLS = 6


@pytest.mark.timeout(900)
def test_i7_i8_i10_kill_9_under_load_loses_nothing_that_was_promised() -> None:
    lines: list[str] = []
    with ExitStack() as resources:
        deployment = resources.enter_context(running_deployment())
        totals = ChaosRun(deployment, 7, resources, lines.append).run(KILLS, dram_share=0.34)
    assert totals.violations == [], (deployment.folder, lines)
    assert totals.kills.total() >= KILLS
    assert totals.checked["flushed entries read back"] > 100
    assert totals.checked["books compared"] >= KILLS - 2
    assert totals.seen["hits"] > 100
    printed = table({"seed": 7, **summary(totals)})
    assert "violations: 0" in printed and len(lines) == 1


def test_a_seed_plans_the_same_lives_every_time() -> None:
    first, second = ([draw_life(Random(3), with_ssd=True) for _ in range(5)] for _ in range(2))
    assert first == second
    rng = Random(3)
    lives = [draw_life(rng, with_ssd=True) for _ in range(300)]
    assert {life.way for life in lives} == WAYS.keys()
    assert all(life.aim is None or Aim.parse(str(life.aim)) == life.aim for life in lives)
