"""What a seed decides: how each life of the node ends, and whom else it takes with it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.chaos.aim import MOMENTS, Aim

AT_RANDOM = "at a random moment"
RECOVERY = "during recovery"
CLEAN_STOP = "by a clean stop"
#: How often each way to end comes; a clean stop is no kill, and what it leaves must all be there again.
WAYS = {
    AT_RANDOM: 35,
    "during a demotion": 20,
    "at the seal of a segment": 14,
    "while a segment is reclaimed": 6,
    RECOVERY: 15,
    "while a policy is applied": 10,
    CLEAN_STOP: 8,
}
#: Without an SSD tier only these can happen.
DRAM_WAYS = (AT_RANDOM, "while a policy is applied", CLEAN_STOP)


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the node.

    Attributes:
        way: how it shall end.
        aim: the operation at which it kills itself; None: killed from outside after ``load_s``.
        load_s: how long clients work on it. An aim that does not come to pass in three times that, at least 2 s, is
            given up, and the node killed from outside.
        linger_s: how long clients go on with a dead node.
        books_are_checked: compare the books under load, before the end.
        client_dies, control_dies: kill those, too, in the middle.
    """

    way: str
    aim: Aim | None
    load_s: float
    linger_s: float
    books_are_checked: bool
    client_dies: bool
    control_dies: bool

    @property
    def aims_at_recovery(self) -> bool:
        """Calls count from the start of the process, not from when clients come."""
        return self.way == RECOVERY


def draw_life(rng: Random, *, with_ssd: bool) -> Life:
    """The next life; the same seed draws the same lives."""
    ways = WAYS if with_ssd else {way: WAYS[way] for way in DRAM_WAYS}
    way = rng.choices(tuple(ways), tuple(ways.values()))[0]
    return Life(
        way,
        _draw_aim(rng, way),
        load_s=rng.uniform(0.2, 2.0),
        linger_s=rng.uniform(0.0, 0.3),
        books_are_checked=rng.random() < 0.35,
        client_dies=rng.random() < 0.4,
        control_dies=rng.random() < 0.12,
    )


def _draw_aim(rng: Random, way: str) -> Aim | None:
    moment = rng.choice(MOMENTS)
    match way:
        case "during a demotion":
            return Aim("write_at", rng.randint(1, 120), moment)
        case "at the seal of a segment":
            return Aim(rng.choice(["truncate", "sync", "sync_folder"]), rng.randint(1, 5), moment)
        case "while a segment is reclaimed":
            return Aim("unlink", rng.randint(1, 4), moment)
        case "during recovery":
            operation = rng.choice(["open", "read_at", "read_at", "truncate"])
            return Aim(operation, 1 if operation == "truncate" else rng.randint(1, 12), moment)
        case "while a policy is applied":
            return Aim("evict_down_to_limit", rng.randint(4, 9), moment)
    return None
