"""Running seeds: to the end, or to the first command after which a rule does not hold."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from dataclasses import dataclass

from tests.sim.checks import check
from tests.sim.two_tier_checks import Watch
from tests.sim.two_tiers import TwoTierWorld
from tests.sim.world import World

#: Of an object in a message: the only part of a run that is another one each time.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
DRAM, TWO_TIERS = "dram", "two-tiers"
WORLDS = (DRAM, TWO_TIERS)


@dataclass(frozen=True)
class Run:
    """What came of one seed.

    Attributes:
        kind: of the world, one of WORLDS.
        steps: commands done.
        digest: sum over the whole transcript; the same seed has the same.
        done: how often each kind of thing happened.
        failure: what did not hold, or empty.
        transcript: the last commands.
    """

    kind: str
    seed: int
    steps: int
    digest: str
    done: Counter[str]
    failure: str
    transcript: tuple[str, ...]

    def report(self) -> str:
        """The failure with what led to it, as text for people."""
        lines = [f"{self.kind} seed {self.seed} fails after {self.steps} steps; the last commands:", *self.transcript]
        replay = f"replay: python -m tests.sim --world {self.kind} --seed {self.seed} --steps {self.steps}"
        return "\n".join([*lines, "", self.failure, replay])


def run(seed: int, steps: int, kind: str = DRAM) -> Run:
    """Do ``steps`` commands of a seed's world, checking every rule after each."""
    world = World(seed) if kind == DRAM else TwoTierWorld(seed)
    failure = ""
    try:
        for _ in range(steps):
            watch = Watch(world) if isinstance(world, TwoTierWorld) else None
            world.step()
            if watch is not None and isinstance(world, TwoTierWorld):
                watch.check(world)
            elif isinstance(world, World):
                check(world)
        world.finish()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        told = _ADDRESS.sub("", str(error))
        failure = f"{type(error).__name__}: {told} ({at.filename.rsplit('/', 1)[-1]}:{at.lineno} {at.line})"
    finally:
        world.close()
    return Run(kind, seed, world.steps, world.digest, world.done, failure, tuple(world.transcript))
