"""A few kills of real processes; ``make chaos KILLS=n`` does as many as one likes."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

import pytest

from saltern.results import Stored
from tests.chaos.__main__ import summary, table
from tests.chaos.aim import Aim
from tests.chaos.content import content_of, key_of
from tests.chaos.deployment import LEFT, RIGHT, START_S, TURNING, running_deployment
from tests.chaos.epochs import GRACES_S, Turning
from tests.chaos.plan import WAYS, draw_life
from tests.chaos.run import ChaosRun
from tests.chaos.sharing import ENTRIES, GROUP, Pair
from tests.chaos.truth import SETTLE_S, Truth
from tests.support.waiting import wait_until

KILLS = 5


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
    assert any(totals.checked[f"salts rotated, grace {grace_s} s"] for grace_s in GRACES_S)
    assert totals.checked["groups formed"] > 0
    printed = table({"seed": 7, **summary(totals)})
    assert "violations: 0" in printed and len(lines) == 1


@pytest.mark.timeout(600)
def test_i2_i12_what_was_left_or_has_ended_is_asked_for_and_found_if_it_is_there() -> None:
    """The eyes of the run, without a kill: they see what is live, and would see what is not."""
    with ExitStack() as resources:
        deployment = resources.enter_context(running_deployment())
        turning, pair = Turning(deployment, TURNING, 1, 100), Pair(deployment, 1)
        for closing in (turning, pair):
            resources.callback(closing.close)
        truth = Truth(deployment, turning, pair, resources)
        node = deployment.start_node(with_ssd=True)
        resources.callback(node.kill)
        assert node.wait_ready()
        key = key_of(TURNING, 1)
        wait_until(lambda: isinstance(truth.reader(TURNING).put_many([(key, content_of(key))])[0], Stored), START_S)
        turning.rotate(24 * 3600)
        truth.forget(TURNING)
        wait_until(lambda: isinstance(truth.reader(TURNING).put_many([(key, content_of(key))])[0], Stored), START_S)
        assert turning.live == {1, 2} and turning.copies() == [key, key]
        assert sorted(turning.served({1, 2})) == [1, 2]

        steps = dict(pair.act())
        assert steps["groups formed"] == 1
        wait_until(lambda: dict(pair._visit()).get("entries read of the other one") == 1, START_S)
        former = pair.grants
        assert pair.found(LEFT) == pair.found(RIGHT) == {key for keys in pair.shared.values() for key in keys}
        assert pair.served(list(former.values())) == 2
        wait_until(lambda: truth.disagreements(node) == [], SETTLE_S)

        turning.rotate(0)
        pair._part()
        wait_until(lambda: truth.disagreements(node) == [], SETTLE_S)
        assert turning.live == {3} and turning.ended == {1, 2} and list(turning.served()) == []
        assert pair.served(pair.parted) == 0 and len(pair.gone) >= 2 * ENTRIES
        # What is believed to be over and is not, is told.
        turning.ended.add(3)
        pair.parted = [deployment.grant(LEFT, GROUP)]
        assert [told.split(":")[0] for told in truth.disagreements(node)] == ["I2", "I12"]


def test_a_seed_plans_the_same_lives_every_time() -> None:
    first, second = ([draw_life(Random(3), with_ssd=True) for _ in range(5)] for _ in range(2))
    assert first == second
    rng = Random(3)
    lives = [draw_life(rng, with_ssd=True) for _ in range(300)]
    assert {life.way for life in lives} == WAYS.keys()
    assert all(life.aim is None or Aim.parse(str(life.aim)) == life.aim for life in lives)
