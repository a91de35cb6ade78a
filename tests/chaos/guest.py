"""A tenant that nobody works as but the harness, which deletes it or its namespace, or rotates its salt (I12)."""

from __future__ import annotations

from random import Random

from saltern.keys import BlockKey
from tests.chaos.content import key_of
from tests.chaos.deployment import GUEST, Deployment

#: Entries that it stores before it is deleted, and how often a life of the node sees that.
ENTRIES, SHARE_OF_LIVES = 60, 0.4


class Guest:
    """Draws when it is deleted, and remembers which keys must not be found any more.

    Args:
        keys_max: how many keys it has; they are used in turn.
    """

    def __init__(self, seed: int, keys_max: int) -> None:
        self.deleted: set[BlockKey] = set()
        self._rng = Random(f"{seed}, and who is deleted")
        self._keys_max = keys_max
        self._next = 0

    def draw(self) -> str:
        """What is made anew in this life: ``tenant``, ``namespace``, ``salt``, or nothing."""
        return self._rng.choice(("tenant", "namespace", "salt")) if self._rng.random() < SHARE_OF_LIVES else ""

    def next_keys(self) -> list[BlockKey]:
        """Keys to store now."""
        numbers = range(self._next, self._next + ENTRIES)
        self._next += ENTRIES
        keys = [key_of(GUEST, number % self._keys_max) for number in numbers]
        self.deleted.difference_update(keys)
        return keys

    def renew(self, deployment: Deployment, what: str, stored: list[BlockKey]) -> None:
        """Delete ``what`` and make it anew under the same name; ``stored`` is gone from then on."""
        match what:
            case "tenant":
                deployment.renew_tenant()
            case "namespace":
                deployment.renew_namespace()
            case _:
                deployment.rotate_salt(GUEST, 0)
        self.deleted.update(stored)
