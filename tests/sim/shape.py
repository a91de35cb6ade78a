"""What the world of one seed looks like: every seed draws another mix, so that no mix is always the same ("swarm")."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dataplane.core.extents import GRANULE_BYTES as G
from dataplane.core.reaping import POLICY_SLICE_BYTES

#: Commands by how often they come in an average world; each seed multiplies them by 0 to 4.
COMMANDS = {
    "connect": 6.0,
    "begin_put": 16.0,
    "begin_get": 8.0,
    "advance": 90.0,
    "read_nearly_all": 1.5,
    "die": 1.5,
    "lookup": 1.0,
    "delete": 1.0,
    "rot": 0.3,
    "clock": 2.0,
    "trim": 1.0,
    "work_off": 2.0,
    "change_quota": 0.6,
    "rotate_epoch": 0.2,
    "retire_epoch": 0.2,
    "suspend_or_resume": 0.3,
    "recreate_namespace": 0.2,
    "delete_or_create_tenant": 0.2,
    "bad_policy": 0.2,
    "join_or_leave": 1.0,
    "name_one_side": 0.2,
}
#: Without these nothing ever moves.
_ALWAYS = ("connect", "begin_put", "advance")


@dataclass(frozen=True)
class Shape:
    """Sizes of a world and how often each command comes.

    Attributes:
        capacity_bytes: of the arena; small, so that it is nearly always full.
        tenants, keys: how many there are of each.
        sessions_max: open at the same time.
        sizes_bytes: lengths that entries have.
        block_bytes: of each namespace, by name.
        slice_bytes: of what a policy leaves to do, how much is done as it is applied; more than the arena for all.
        weights: relative frequency of each of COMMANDS.
    """

    capacity_bytes: int
    tenants: int
    keys: int
    sessions_max: int
    sizes_bytes: tuple[int, ...]
    block_bytes: dict[str, int]
    slice_bytes: int
    weights: tuple[float, ...]

    @classmethod
    def draw(cls, rng: Random) -> Shape:
        capacity_granules = rng.choice([10, 14, 20, 28, 40])
        sizes = [1, G - 1, G, G + 1, 2 * G, 3 * G - 5, 5 * G + 1, 6 * G, 6 * G + 1]
        mixed = (rng.choice(sizes[:4]), *rng.sample(sizes, rng.randint(1, 4)))
        return cls(
            capacity_bytes=capacity_granules * G,
            tenants=rng.randint(2, 5),
            keys=rng.choice([4, 8, 16, 40]),
            sessions_max=rng.randint(3, 10),
            sizes_bytes=mixed,
            block_bytes={"large": 6 * G, "small": 2 * G - 7},
            slice_bytes=rng.choice([0, 0, 3 * G, POLICY_SLICE_BYTES, POLICY_SLICE_BYTES]),
            weights=tuple(
                weight * rng.choice([0, 0.25, 1, 1, 4] if name not in _ALWAYS else [0.5, 1, 2])
                for name, weight in COMMANDS.items()
            ),
        )
