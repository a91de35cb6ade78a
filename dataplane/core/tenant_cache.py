"""What the core keeps for each tenant: its books, its eviction order, its partitions' indexes and its counters; and for
each of its namespaces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dataplane.core.budget import TierBudget
from dataplane.core.earning import EarningAccount
from dataplane.core.entry import Entry
from dataplane.core.eviction import EvictionOrder
from dataplane.core.lru import LruOrder
from dataplane.core.partition import Partition
from dataplane.core.usage import TenantCounters
from saltern.keys import BlockKey
from saltern.names import TenantId
from tenants.quota import TierQuota

#: The limit of a namespace that has none: more than there is memory.
NO_LIMIT_BYTES: Final = 2**63 - 1
_NO_COUNTS: Final = TenantCounters()


@dataclass(slots=True, eq=False)
class TenantCache:
    """Everything of one tenant. Nothing in here is ever reached from another tenant's partition (I2).

    Attributes:
        account: what its reservation earns; None under strict reservations, where nothing needs to be counted.
        namespaces: by uid: those that were used and those that have a limit.
        in_policy: False once the policy no longer names the tenant; the record then only waits for held bytes.
        uid: of the tenant that is counted for; empty where the policy does not say.
    """

    tenant: TenantId
    order: EvictionOrder
    account: EarningAccount | None = None
    budget: TierBudget = field(default_factory=TierBudget)
    counters: TenantCounters = field(default_factory=TenantCounters)
    partitions: dict[Partition, PartitionIndex] = field(default_factory=dict)
    namespaces: dict[str, NamespaceBooks] = field(default_factory=dict)
    in_policy: bool = True
    uid: str = ""

    def set_uid(self, uid: str) -> None:
        """Count for this tenant from now on: what an earlier one of the same name did is not its own (I8)."""
        if self.uid and self.uid != uid:
            self.counters = TenantCounters()
        self.uid = uid

    @property
    def is_above_a_limit(self) -> bool:
        """Whether it uses more than its limit, or one of its namespaces more than that one's (I4)."""
        if self.budget.used_bytes > self.budget.limit_bytes:
            return True
        return any(namespace.is_above_limit for namespace in self.namespaces.values())

    @property
    def is_blank(self) -> bool:
        """Nothing is held or reserved, and nothing ever happened."""
        if self.partitions or self.namespaces or self.budget.used_bytes or self.budget.reserved_bytes:
            return False
        return self.counters == _NO_COUNTS

    @property
    def is_idle(self) -> bool:
        """Its account says that caching does not serve it: what it holds is the first to go."""
        return self.account is not None and not self.account.earns

    def set_quota(self, quota: TierQuota, soft_mark_percent: int = 100) -> None:
        """Take over a new quota in the books and in the account."""
        self.budget.set_quota(quota, soft_mark_percent)
        if self.account is not None:
            self.account.set_reserved(quota.reserved_bytes)
            self.budget.protected_bytes = self.account.protected_bytes

    def dissolve(self) -> None:
        """The record is forgotten, with nothing left in it: break its circles, or it would stay until a full pass of
        the collector, which a node that is always busy never makes (dataplane.io.garbage). Idempotent.
        """
        self.namespaces.clear()
        self.order = LruOrder()  # what merges the orders of namespaces knows those by their books

    def namespace(self, uid: str) -> NamespaceBooks:
        """The books of a namespace, made with the first use."""
        books = self.namespaces.get(uid)
        if books is None:
            books = self.namespaces[uid] = NamespaceBooks(self)
        return books


@dataclass(slots=True, eq=False)
class NamespaceBooks:
    """What one namespace holds of its tenant's bytes, all of its partitions together, and what it may (I4, I8).

    Attributes:
        limit_bytes: ``used_bytes`` never grows past it (I4); the tenant's own limit holds besides.
        used_bytes: the part of the tenant's ``used_bytes`` that is this namespace's.
        get_hits, get_misses: keys asked for and found, or not.
        order: in which its own entries leave; None as long as it never had a limit, since then nobody asks.
    """

    owner: TenantCache = field(repr=False)
    limit_bytes: int = NO_LIMIT_BYTES
    used_bytes: int = 0
    get_hits: int = 0
    get_misses: int = 0
    order: EvictionOrder | None = None

    @property
    def is_above_limit(self) -> bool:
        return self.used_bytes > self.limit_bytes


@dataclass(slots=True, eq=False)
class PartitionIndex:
    """The index of one partition.

    Attributes:
        entries: committed entries by key; an entry is in here exactly while it may be read (I7).
        writing: entries whose put has begun, by key; invisible to readers (I7).
        block_bytes: the largest entry that the namespace takes.
        is_writable: False for a salt epoch that is only readable any more.
        block_tokens: what a hit saves; 0 where the policy does not say.
        namespace: the books that its entries are charged to, beside the tenant's.
    """

    partition: Partition
    owner: TenantCache
    block_bytes: int
    is_writable: bool
    entries: dict[BlockKey, Entry] = field(default_factory=dict)
    writing: dict[BlockKey, Entry] = field(default_factory=dict)
    block_tokens: int = 0
    namespace: NamespaceBooks = field(init=False)

    def __post_init__(self) -> None:
        self.namespace = self.owner.namespace(self.partition.namespace_uid)

    def may_grow(self, extent_bytes: int) -> bool:
        """Whether so much more fits the limits of its tenant and of its namespace, as they are used now (I4)."""
        budget, namespace = self.owner.budget, self.namespace
        return (
            budget.used_bytes + extent_bytes <= budget.limit_bytes
            and namespace.used_bytes + extent_bytes <= namespace.limit_bytes
        )

    @property
    def is_within_limits(self) -> bool:
        """Whether neither its tenant nor its namespace is above the limit (I4)."""
        budget, namespace = self.owner.budget, self.namespace
        return budget.used_bytes <= budget.limit_bytes and namespace.used_bytes <= namespace.limit_bytes
