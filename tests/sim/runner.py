"""Running seeds: to the end, or to the first command after which a rule does not hold."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass

from tests.sim.checks import check
from tests.sim.world import World


@dataclass(frozen=True)
class Run:
    """What came of one seed.

    Attributes:
        steps: commands done.
        digest: sum over the whole transcript; the same seed has the same.
        done: how often each kind of thing happened.
        failure: what did not hold, or empty.
        transcript: the last commands.
    """

    seed: int
    steps: int
    digest: str
    done: Counter[str]
    failure: str
    transcript: tuple[str, ...]

    def report(self) -> str:
        """The failure with what led to it, as text for people."""
        lines = [f"seed {self.seed} fails after {self.steps} steps; the last commands:", *self.transcript]
        return "\n".join(
            [*lines, "", self.failure, f"replay: python -m tests.sim --seed {self.seed} --steps {self.steps}"]
        )


def run(seed: int, steps: int) -> Run:
    """Do ``steps`` commands of a seed's world, checking every rule after each."""
    world = World(seed)
    failure = ""
    try:
        for _ in range(steps):
            world.step()
            check(world)
        world.finish()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__}: {error} ({at.filename.rsplit('/', 1)[-1]}:{at.lineno} {at.line})"
    finally:
        world.close()
    return Run(seed, world.steps, world.digest, world.done, failure, tuple(world.transcript))
