"""One cache node in virtual time: the core that a real node runs, its SSD tier, and a link that carries bytes.

A block is one granule of the core, whatever its real length: blocks of one replay are alike, so what fits, who gives
way and what is charged are the same, and a terabyte of cache takes the memory of its index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from dataplane.core.cache import CacheCore
from dataplane.core.entry import Entry, PutTicket
from dataplane.core.eviction import Eviction
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.reservations import Reservations
from dataplane.core.usage import TenantCounters
from dataplane.replay.link import Link
from dataplane.replay.ssd import NodeSsd
from saltern.keys import BlockKey
from saltern.names import TenantId
from saltern.replay.results import NodeResult
from tenants.policy import NodePolicy


class Counts(NamedTuple):
    """Entries evicted by cause, and puts refused by reason."""

    evicted: Counter[str]
    refused: Counter[str]

    @classmethod
    def of(cls, counters: TenantCounters) -> Self:
        causes = {str(cause): count for cause, count in counters.evictions_by_cause.items()}
        return cls(Counter(causes), Counter(counters.refused_by_reason))

    def __add__(self, other: tuple[object, ...]) -> Counts:
        assert isinstance(other, Counts)
        return Counts(self.evicted + other.evicted, self.refused + other.refused)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.evicted - other.evicted, self.refused - other.refused)


class CacheNode:
    """One node.

    Args:
        ssd: the tier below its memory; None for none.

    Attributes:
        away_until_s: it answers nobody before.
    """

    def __init__(
        self,
        node_id: str,
        capacity_blocks: int,
        policy: NodePolicy,
        *,
        eviction: Eviction,
        reservations: Reservations,
        link_bytes_per_s: float,
        ssd: NodeSsd | None = None,
    ) -> None:
        self.node_id: Final = node_id
        self.ssd: Final = ssd
        self._capacity_blocks = capacity_blocks
        self._policy = policy
        self._eviction, self._reservations = eviction, reservations
        self._counts_takers = len(policy.tenants) > 1
        self._putting: TenantId | None = None
        #: (whose entry was evicted, by whose put): how many.
        self._taken: Counter[tuple[TenantId, TenantId]] = Counter()
        self._link_bytes_per_s = link_bytes_per_s
        self._core = self._new_core()
        self.begin()

    def begin(self) -> None:
        """Begin a column with what is there: count from nothing, and time begins again."""
        self.out = Link(self._link_bytes_per_s)
        self.into = Link(self._link_bytes_per_s)
        self.away_until_s = 0.0
        self._taken.clear()
        if self.ssd is not None:
            self.ssd.begin()
        self._before = self._counts()
        self._lost: dict[TenantId, Counts] = {}

    def _new_core(self) -> CacheCore:
        core = CacheCore(
            self._capacity_blocks * GRANULE_BYTES,
            eviction=self._eviction,
            reservations=self._reservations,
            ssd=None if self.ssd is None else self.ssd.tier,
        )
        core.apply_policy(self._policy, 1)
        if self.ssd is not None:
            core.on_evict(self._note_and_demote)
        elif self._counts_takers:
            core.on_evict(self._note_taken)
        return core

    def _note_taken(self, entry: Entry) -> None:
        if self._putting is not None:
            self._taken[entry.index.owner.tenant, self._putting] += 1

    def _note_and_demote(self, entry: Entry) -> None:
        assert self.ssd is not None
        self._note_taken(entry)
        self.ssd.demote(entry)

    def lose_memory(self) -> None:
        """Begin again with what is on SSD; what was counted stays."""
        self._lost = self.counts()
        self._before = {}
        self._core = self._new_core()

    def lose_all(self) -> None:
        """Begin again with nothing; what was counted in memory stays."""
        if self.ssd is not None:
            self.ssd.lose_all()
        self.lose_memory()

    def lookup(self, partition: Partition, keys: Sequence[BlockKey]) -> tuple[int, bytes]:
        """(how many from the first on without a gap, a byte of 0 or 1 for each)."""
        return self._core.lookup(partition, keys)

    def read(self, partition: Partition, keys: Sequence[BlockKey], now_ns: int) -> int:
        """Touch keys as a get of them does, last key first; returns how many came from SSD."""
        core = self._core
        if self.ssd is not None:
            return self._read_both(self.ssd, partition, keys, now_ns)
        if self._reservations is Reservations.EARNING:
            core.get_end(core.get_start(partition, keys, now_ns))
        else:
            core.use_at_once(partition, keys[::-1], GRANULE_BYTES, now_ns)
        return 0

    def _read_both(self, ssd: NodeSsd, partition: Partition, keys: Sequence[BlockKey], now_ns: int) -> int:
        """As a node's get: what is in memory is pinned, and what is not is promoted into it from SSD."""
        core = self._core
        ssd.at(now_ns)
        self._putting = partition.tenant
        pins = core.get_start(partition, keys, now_ns, counts_misses=False)
        promoted = 0
        for key in [key for key, pin in zip(keys, pins, strict=True) if pin is None]:
            promotion = core.promote_start(partition, key, now_ns)
            if promotion is not None and core.promote_end(promotion, 0, now_ns):
                pins.append(core.promote_pin(partition, key, now_ns))
                promoted += 1
        core.get_end(pins)
        return promoted

    def store(self, partition: Partition, keys: Sequence[BlockKey], now_ns: int) -> None:
        """Put a batch as a client does: head first; then all of it is in order, tail first."""
        self._putting = partition.tenant
        if self.ssd is not None:
            self.ssd.at(now_ns)
        self._core.use_at_once(partition, keys, GRANULE_BYTES, now_ns, reads=False)
        self._core.touch(partition, keys, now_ns)

    def use_chain(self, partition: Partition, keys: Sequence[BlockKey], now_ns: int) -> None:
        """Touch or store every key, tail first: the rule of reference hit rates."""
        self._putting = partition.tenant
        core = self._core
        if self._reservations is not Reservations.EARNING:
            core.use_at_once(partition, keys[::-1], GRANULE_BYTES, now_ns)
            return
        pins = core.get_start(partition, keys, now_ns)
        core.get_end(pins)
        for key, pin in zip(keys[::-1], pins[::-1], strict=True):
            if pin is None and isinstance(ticket := core.put_start(partition, key, GRANULE_BYTES, now_ns), PutTicket):
                core.put_commit(ticket, 0, now_ns)
        core.touch(partition, keys, now_ns)

    # ---- what it tells

    def blocks_by_tenant(self) -> dict[TenantId, int]:
        usage = self._core.usage()
        return {tenant: books.used_bytes // GRANULE_BYTES for tenant, books in usage.tenants.items()}

    def _counts(self) -> dict[TenantId, Counts]:
        return {tenant: Counts.of(books.counters) for tenant, books in self._core.usage().tenants.items()}

    def counts(self) -> dict[TenantId, Counts]:
        """By tenant, since the column began, losses of all blocks or not."""
        now = self._counts()
        nothing = Counts.of(TenantCounters())
        return {
            tenant: counts - self._before.get(tenant, nothing) + self._lost.get(tenant, nothing)
            for tenant, counts in now.items()
        }

    @property
    def taken(self) -> Counter[tuple[TenantId, TenantId]]:
        """(whose entry was evicted, by whose put): how many; empty with one tenant, where it is always its own."""
        return self._taken

    def result(self, block_bytes: int) -> NodeResult:
        return NodeResult(
            read_bytes=self.out.moved_bytes,
            written_bytes=self.into.moved_bytes,
            resident_bytes=sum(self.blocks_by_tenant().values()) * block_bytes,
            busy_s=self.out.busy_s + self.into.busy_s,
        )

    def check_invariants(self) -> None:
        self._core.check_invariants()
