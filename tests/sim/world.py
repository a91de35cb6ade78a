"""One node's world: a seed decides every command, and each is done to the core and to a plain model alike.

The core, the batches that the doors use and the arena are the real ones; sockets and clocks are not there. After every
command :func:`tests.sim.checks.check` compares the core with the model, rule by rule.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from random import Random

from dataplane.core.admission import open_partition
from dataplane.core.cache import CacheCore
from dataplane.core.eviction import Eviction
from dataplane.core.partition import Partition
from dataplane.io.arena import Arena
from dataplane.io.batches import Blocks
from dataplane.io.clock import Clock
from saltern.errors import PermissionDeniedError
from saltern.names import NamespaceId, TenantId
from tests.sim.model import SimModel
from tests.sim.policies import GROUP, SHARED, PolicyCommands
from tests.sim.sessions import Session, name_of
from tests.sim.shape import COMMANDS, Shape
from tests.sim.traffic import SOFT_MARK_PERCENT, TrafficCommands
from tests.support.cache_node import key_of

TRANSCRIPT_LINES = 60


class World(TrafficCommands, PolicyCommands):
    """A core, its model and its clients.

    Attributes:
        transcript: the last lines of what happened.
        done: how often each kind of thing happened, to see that a mix reaches everything.
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.shape = Shape.draw(self.rng)
        self.now_ns = 1
        self.core = CacheCore(
            self.shape.capacity_bytes,
            eviction=Eviction.LRU,
            soft_mark_percent=SOFT_MARK_PERCENT,
            slice_bytes=self.shape.slice_bytes,
        )
        self.arena = Arena(self.shape.capacity_bytes)
        self.blocks = Blocks(self.core, self.arena, Clock(monotonic_ns=lambda: self.now_ns, unix_s=lambda: 0.0))
        self.core.on_relocate(self.relocate)
        self.model = SimModel(self.shape.capacity_bytes, is_lazy=self.shape.slice_bytes < self.shape.capacity_bytes)
        self.keys = [key_of(number) for number in range(self.shape.keys)]
        self.names = [TenantId(f"t{number}") for number in range(self.shape.tenants)]
        self.sessions: list[Session] = []
        self.moved = []
        self.partitions: dict[Partition, None] = {}
        self.above: dict[TenantId, int] = {}
        self.transcript: deque[str] = deque(maxlen=TRANSCRIPT_LINES)
        self.done: Counter[str] = Counter()
        self.members = {}
        self.group_epoch, self.one_sided = 1, None
        self.version = self.steps = self.uids = self.offered = self.session_number = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.first_policy()

    def step(self) -> None:
        """Do one command, the next that makes sense in this state."""
        self.steps += 1
        while True:
            command = self.rng.choices(tuple(COMMANDS), self.shape.weights)[0]
            if getattr(self, command)():
                self.done[command] += 1
                return

    def finish(self) -> None:
        """Every client dies and every tenant is deleted: nothing may be left (I8, I12)."""
        for session in list(self.sessions):
            self.end(session)
        self.settle()
        for tenant, usage in self.core.usage().tenants.items():
            assert usage.held_bytes == usage.in_flight_bytes == 0, f"I8: {tenant} holds bytes that nobody uses"
            assert usage.used_bytes <= usage.limit_bytes, f"I4: {tenant} is above its limit with nothing in transfer"
        self.model.tenants.clear()
        self.push()
        self.settle()
        node = self.core.usage()
        assert not node.tenants, "I8: somebody is left in the books"
        assert node.largest_free_bytes == node.free_bytes == self.shape.capacity_bytes, "I8: memory has leaked"

    def close(self) -> None:
        self.arena.close()

    @property
    def digest(self) -> str:
        """Sum over the whole transcript: two runs of a seed that differ anywhere differ here."""
        return self._digest.hexdigest()

    def say(self, line: str) -> None:
        self.transcript.append(f"{self.steps:>6}  {line}")
        self._digest.update(line.encode())

    # ---- commands that are neither traffic nor policy

    def connect(self) -> bool:
        """A client opens a session: for a namespace of its tenant, or for something that it may not have."""
        if len(self.sessions) >= self.shape.sessions_max:
            return False
        rng = self.rng
        tenant = rng.choice(self.names)
        namespace = NamespaceId(rng.choice([*self.shape.block_bytes] * 8 + ["absent"]))
        if len(self.members) > 1 and rng.random() < 0.4:
            tenant, namespace = rng.choice([*self.members]), SHARED
        rules = self.model.tenants.get(tenant)
        known = rules.namespaces.get(namespace) if rules else None
        epoch = rng.randint(0, 3)
        if known and rng.random() < 0.95:
            epoch = known.epochs[-1] if rng.random() < 0.7 else rng.choice(known.epochs)
        group = ""
        if known and (rng.random() < 0.7 if known.groups else rng.random() < 0.05):
            group = GROUP
            epoch = self.group_epoch if rng.random() < 0.95 else rng.randint(0, self.group_epoch + 1)
        asked = f"{tenant}/{namespace}{'~' if group else ''}{group}@{epoch}"
        try:
            partition = open_partition(
                self.core.policy,
                claims_tenant=tenant,
                claims_namespace=namespace,
                requested_namespace=namespace,
                epoch=epoch,
                group_uid=group,
            )
        except PermissionDeniedError as error:
            expected = self.model.closed_because(Partition(tenant, namespace, known.uid if known else "", epoch, group))
            assert error.reason == expected, f"I10: a session was refused for {error.reason}, not {expected}"
            self.say(f"connect {asked}: {error.reason}")
            return True
        assert self.model.is_open(partition), "I10: the policy does not open this"
        self.session_number += 1
        self.partitions[partition] = None
        self.sessions.append(Session(self.session_number, partition))
        self.say(f"connect {asked}: s{self.session_number} on {name_of(partition)}")
        return True

    def clock(self) -> bool:
        """Time passes, or not, or goes back."""
        jump_ns = self.rng.choice([0, 1, 1_000, 10**9, 10**12, -1, -(10**9)])
        self.now_ns = max(0, self.now_ns + jump_ns)
        self.say(f"the clock moves by {jump_ns} ns")
        return True
