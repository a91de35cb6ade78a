"""What the core keeps for each tenant: its books, its eviction order, its partitions' indexes and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.core.budget import TierBudget
from dataplane.core.earning import EarningAccount
from dataplane.core.entry import Entry
from dataplane.core.eviction import EvictionOrder
from dataplane.core.partition import Partition
from dataplane.core.usage import TenantCounters
from saltern.keys import BlockKey
from saltern.names import TenantId
from tenants.quota import TierQuota


@dataclass(slots=True, eq=False)
class TenantCache:
    """Everything of one tenant. Nothing in here is ever reached from another tenant's partition (I2).

    Attributes:
        account: what its reservation earns; None under strict reservations, where nothing needs to be counted.
        in_policy: False once the policy no longer names the tenant; the record then only waits for held bytes.
        uid: of the tenant that is counted for; empty where the policy does not say.
    """

    tenant: TenantId
    order: EvictionOrder
    account: EarningAccount | None = None
    budget: TierBudget = field(default_factory=TierBudget)
    counters: TenantCounters = field(default_factory=TenantCounters)
    partitions: dict[Partition, PartitionIndex] = field(default_factory=dict)
    in_policy: bool = True
    uid: str = ""

    def set_uid(self, uid: str) -> None:
        """Count for this tenant from now on: what an earlier one of the same name did is not its own (I8)."""
        if self.uid and self.uid != uid:
            self.counters = TenantCounters()
        self.uid = uid

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


@dataclass(slots=True, eq=False)
class PartitionIndex:
    """The index of one partition.

    Attributes:
        entries: committed entries by key; an entry is in here exactly while it may be read (I7).
        writing: entries whose put has begun, by key; invisible to readers (I7).
        block_bytes: the largest entry that the namespace takes.
        is_writable: False for a salt epoch that is only readable any more.
        block_tokens: what a hit saves; 0 where the policy does not say.
    """

    partition: Partition
    owner: TenantCache
    block_bytes: int
    is_writable: bool
    entries: dict[BlockKey, Entry] = field(default_factory=dict)
    writing: dict[BlockKey, Entry] = field(default_factory=dict)
    block_tokens: int = 0
