"""A node with an SSD tier: the real core and tier over an arena and a model of the disk that fails, tears and crashes.

:mod:`tests.sim.world` looks at DRAM through batches, byte by byte of every transfer; this looks at what joins the two
tiers: demotion, promotion, reclaim, tombstones, seals, policies, kill -9, loss of power, and recovery from what was
durable. Every command is followed by :func:`tests.sim.two_tier_checks.check`.

::

    values <- state <- shell <- policy <- life <- endings <-+
                         ^----- clients <-------------------+- TwoTierWorld
"""

from __future__ import annotations

from tests.sim.two_tier_clients import Clients
from tests.sim.two_tier_endings import Endings
from tests.sim.two_tier_state import COMMANDS


class TwoTierWorld(Clients, Endings):
    """A node over the lives of its process; the disk outlives it. See :class:`TwoTierState`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for tenant in self.names:
            self.rules[tenant] = self._draw_rules()
        self._boot()

    def step(self) -> None:
        self.steps += 1
        self.now_ns += 1000
        self.losses = set()
        while True:
            command = self.rng.choices(tuple(COMMANDS), self.weights)[0]
            if getattr(self, command)():
                self.done[command] += 1
                return

    def finish(self) -> None:
        """Everything ends and every tenant is deleted: nothing may be left, on either tier (I8, I12)."""
        self.disk.fault_share = {}
        self.disk.device_bytes = self.ssd_bytes
        self.retry_removals()
        self.drain()
        self._end_transfers()
        self.drain()
        assert not self.queue and not self.readings
        self.check_files()
        self.rules.clear()
        self.push()
        self.drain()
        assert not self.core.usage().tenants, "I8: somebody is left in the books"
        assert not self.disk.files, "I8: an orphan file"
        assert not any(folder.has_key for folder in self.disk.folders.values()), "I12: a key was not destroyed"

    def close(self) -> None:
        self.arena.close()
