"""A plain model of what the cache core may hold, for the stateful test: lists and sums, no cleverness, no victims.

The model predicts everything but the choice of victims. That it takes from the core, and judges: see
:meth:`CacheModel.judge_losses`. Where the eviction order is not by last use, or a reservation not protected in full, it
takes that from the core as well, as it was before a command: see :meth:`CacheModel.take_over`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.held import MARGIN_PARTS
from dataplane.core.partition import Partition
from dataplane.core.usage import EvictionCause, TenantCounters
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota


@dataclass(eq=False)
class ModelEntry:
    """An entry in any state: written, readable, or unreachable: held by a writer or readers, or yet to be freed."""

    partition: Partition
    key: BlockKey
    size_bytes: int
    offset: int
    state: str = "writing"
    pins: int = 0
    last_use: int = 0

    @property
    def tenant(self) -> TenantId:
        return self.partition.tenant

    @property
    def extent_bytes(self) -> int:
        return -(-self.size_bytes // GRANULE_BYTES) * GRANULE_BYTES

    @property
    def granules(self) -> range:
        return range(self.offset // GRANULE_BYTES, (self.offset + self.extent_bytes) // GRANULE_BYTES)

    @property
    def is_being_written(self) -> bool:
        return self.state in ("writing", "orphaned")

    @property
    def is_evictable(self) -> bool:
        return self.state in ("readable", "purged") and not self.pins


@dataclass
class ModelTenant:
    quota: TierQuota
    suspended: bool = False
    namespaces: dict[NamespaceId, NamespacePolicy] = field(default_factory=dict)


class CacheModel:
    """What should be there. ``live`` holds every entry that occupies memory; ``arena`` who wrote each granule last."""

    def __init__(self, capacity_bytes: int, *, is_lazy: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        #: What a policy leaves to do is done later: see :meth:`follow`.
        self.is_lazy = is_lazy
        #: Tenants above a lowered limit that the core is yet to evict down.
        self.lagging: set[TenantId] = set()
        self.tenants: dict[TenantId, ModelTenant] = {}
        self.counters: dict[TenantId, TenantCounters] = {}
        self.live: list[ModelEntry] = []
        self.arena: list[ModelEntry | None] = [None] * (capacity_bytes // GRANULE_BYTES)
        self.unlawful: list[str] = []
        self._uses = 0
        self._places: dict[tuple[Partition, BlockKey], int] | None = None
        self._protected: dict[TenantId, int] = {}

    def take_over(
        self,
        orders: Mapping[TenantId, Sequence[tuple[Partition, BlockKey]]] | None,
        protected_bytes: Mapping[TenantId, int],
    ) -> None:
        """What the core goes by in its next command.

        Args:
            orders: readable entries of each tenant from the next victim on; None if they are ordered by last use.
            protected_bytes: what of each tenant's reservation is protected; all of it where a tenant is missing.
        """
        if orders is not None:
            self._places = {entry: place for order in orders.values() for place, entry in enumerate(order)}
        self._protected = dict(protected_bytes)

    # ---- policy

    def policy(self, version: int) -> NodePolicy:
        return NodePolicy(
            version,
            {
                tenant: TenantPolicy(
                    TenantState.SUSPENDED if rules.suspended else TenantState.ACTIVE,
                    {Tier.DRAM: rules.quota},
                    dict(rules.namespaces),
                )
                for tenant, rules in self.tenants.items()
            },
        )

    def exists(self, partition: Partition) -> bool:
        """The policy names the partition, whether or not its tenant is suspended."""
        rules = self.tenants.get(partition.tenant)
        namespace = rules.namespaces.get(partition.namespace) if rules else None
        return namespace is not None and (
            namespace.uid == partition.namespace_uid and partition.epoch in namespace.epochs_of(partition.group_uid)
        )

    def is_open(self, partition: Partition) -> bool:
        return self.exists(partition) and not self.tenants[partition.tenant].suspended

    def namespace_of(self, partition: Partition) -> NamespacePolicy:
        return self.tenants[partition.tenant].namespaces[partition.namespace]

    def apply_policy(self) -> None:
        """What must follow from the policy as it is now: purges, then own evictions down to the limit."""
        for entry in [entry for entry in self.live if not self.exists(entry.partition)]:
            if entry.state == "writing":
                entry.state = "orphaned"
            elif entry.state == "readable" and self.is_lazy:
                entry.state = "purged"
            elif entry.state == "readable":
                self.remove(entry)
        for tenant in self.tenants:
            self.counters.setdefault(tenant, TenantCounters())
            if not self.is_lazy:
                self.shrink(tenant)
        self.forget()

    def follow(self, purged: Collection[tuple[Partition, BlockKey]], lagging: Iterable[TenantId]) -> None:
        """After a command: take out what was freed of the entries that nobody can reach any more (I12).

        Args:
            purged: those that the core has yet to free.
            lagging: tenants that it has yet to evict down.
        """
        for entry in [entry for entry in self.live if entry.state == "purged"]:
            if (entry.partition, entry.key) not in purged:
                self.remove(entry)
        self.forget()
        self.lagging = set(lagging)

    def judge_shrink(self, lost: list[ModelEntry]) -> None:
        """Note in ``unlawful`` what should not have gone for a lowered limit (I4); take it out."""
        for tenant in {entry.tenant for entry in lost}:
            mine = sorted((entry for entry in lost if entry.tenant == tenant), key=self._place)
            coldest = [entry for entry in self.coldest_first(tenant) if entry.is_evictable]
            if mine != coldest[: len(mine)]:
                self.unlawful.append(f"{tenant} was evicted down of other than its coldest")
            for entry in mine:
                if self.used(tenant) <= self.quota(tenant).limit_bytes:
                    self.unlawful.append(f"{tenant} was evicted down below its limit")
                self.evict(entry, EvictionCause.QUOTA)

    def may_lag(self, tenant: TenantId) -> bool:
        """Whether it may be above its limit with something to evict: what it must lose is on its way out (I4)."""
        return tenant in self.lagging or any(entry.state == "purged" for entry in self.of(tenant))

    # ---- sums

    def of(self, tenant: TenantId) -> list[ModelEntry]:
        return [entry for entry in self.live if entry.tenant == tenant]

    def used(self, tenant: TenantId) -> int:
        return sum(entry.extent_bytes for entry in self.of(tenant))

    def evictable(self, tenant: TenantId) -> int:
        return sum(entry.extent_bytes for entry in self.of(tenant) if entry.is_evictable)

    def quota(self, tenant: TenantId) -> TierQuota:
        return self.tenants[tenant].quota if tenant in self.tenants else TierQuota(0, 0)

    def protected(self, tenant: TenantId) -> int:
        """Bytes that nobody else may take from a tenant."""
        return self._protected.get(tenant, self.quota(tenant).reserved_bytes)

    def held(self, tenant: TenantId) -> int:
        """Bytes of a tenant that cannot be evicted now."""
        return sum(entry.extent_bytes for entry in self.of(tenant) if not entry.is_evictable)

    def reserved_bytes(self) -> int:
        return sum(rules.quota.reserved_bytes for rules in self.tenants.values())

    def idle_bytes(self) -> int:
        """What of all reservations is not used."""
        return sum(max(0, rules.quota.reserved_bytes - self.used(tenant)) for tenant, rules in self.tenants.items())

    def held_beyond(self) -> int:
        """What tenants hold beyond their reservations."""
        tenants = {entry.tenant for entry in self.live}
        return sum(max(0, self.held(tenant) - self.quota(tenant).reserved_bytes) for tenant in tenants)

    def may_hold(self, tenant: TenantId, extent_bytes: int, more: Iterable[ModelEntry] = ()) -> bool:
        """Whether a tenant that holds ``more`` besides may hold an entry of that size (I5)."""
        reserved_bytes = self.quota(tenant).reserved_bytes
        held_bytes = self.held(tenant)
        others_bytes = self.held_beyond() - max(0, held_bytes - reserved_bytes)
        held_bytes += sum(entry.extent_bytes for entry in more)
        after_bytes = max(0, held_bytes + extent_bytes - reserved_bytes)
        shared_bytes = self.capacity_bytes - self.reserved_bytes() + self.capacity_bytes // MARGIN_PARTS
        is_first = not others_bytes and held_bytes <= reserved_bytes
        return after_bytes == 0 or others_bytes + after_bytes <= shared_bytes or is_first

    def serve(self, partition: Partition, keys: Sequence[BlockKey]) -> list[ModelEntry | None]:
        """What a get of ``keys`` finds: the front of the batch, as far as it may be held; counts what is held back."""
        entries = [self.find(partition, key) for key in keys]
        taken: list[ModelEntry] = []
        for position, entry in enumerate(entries):
            if entry is None or entry.pins or entry in taken:
                continue
            if not self.may_hold(partition.tenant, entry.extent_bytes, taken):
                held_back = sum(entry is not None for entry in entries[position:])
                self.counters[partition.tenant].hits_held_back += held_back
                return [*entries[:position], *[None] * (len(keys) - position)]
            taken.append(entry)
        return entries

    def coldest_first(self, tenant: TenantId) -> list[ModelEntry]:
        """Readable entries from the next victim on."""
        return sorted((e for e in self.of(tenant) if e.state == "readable"), key=self._place)

    def _place(self, entry: ModelEntry) -> int:
        if self._places is None:
            return entry.last_use
        return self._places.get((entry.partition, entry.key), len(self._places))

    def find(self, partition: Partition, key: BlockKey, state: str = "readable") -> ModelEntry | None:
        """The entry of a key in an open partition."""
        for entry in self.live:
            if entry.state == state and entry.partition == partition and entry.key == key:
                return entry if self.is_open(partition) else None
        return None

    def longest_gap(self, blocked: Iterable[ModelEntry]) -> int:
        """Bytes of the longest run of granules that none of ``blocked`` occupies."""
        taken = {granule for entry in blocked for granule in entry.granules}
        longest = run = 0
        for granule in range(len(self.arena)):
            run = 0 if granule in taken else run + 1
            longest = max(longest, run)
        return longest * GRANULE_BYTES

    # ---- changes

    def use(self, entry: ModelEntry) -> None:
        self._uses += 1
        entry.last_use = self._uses

    def write(self, entry: ModelEntry) -> None:
        """An admitted entry scribbles over its memory at once: the worst that a writer may do."""
        self.live.append(entry)
        for granule in entry.granules:
            self.arena[granule] = entry

    def remove(self, entry: ModelEntry) -> None:
        if entry.pins:
            entry.state = "detached"
        else:
            self.live.remove(entry)

    def evict(self, entry: ModelEntry, cause: EvictionCause) -> None:
        self.counters[entry.tenant].evicted(entry.size_bytes, cause)
        self.remove(entry)

    def shrink(self, tenant: TenantId) -> None:
        for entry in self.coldest_first(tenant):
            if self.used(tenant) <= self.quota(tenant).limit_bytes:
                break
            if entry.is_evictable:
                self.evict(entry, EvictionCause.QUOTA)

    def unpin(self, entry: ModelEntry) -> None:
        entry.pins -= 1
        if entry.pins:
            return
        if entry.state == "detached":
            self.live.remove(entry)
        elif entry.tenant not in self.lagging:
            self.shrink(entry.tenant)
        self.forget()

    def forget(self) -> None:
        """Counters of a tenant that the policy does not name end with its last byte."""
        for tenant in [tenant for tenant in self.counters if tenant not in self.tenants and not self.used(tenant)]:
            del self.counters[tenant]

    # ---- judgement

    def judge_losses(self, requester: TenantId, extent_bytes: int, lost: list[ModelEntry]) -> None:
        """Note in ``unlawful`` what a put that was admitted may not have evicted (I4, I5, I7); then take it out."""
        quota = self.quota(requester)
        fits_limit = self.used(requester) + extent_bytes <= quota.limit_bytes
        if lost and fits_limit and self.longest_gap(self.live) >= extent_bytes:
            self.unlawful.append("evicted although there was room")
        idle = {entry.tenant for entry in self.live if entry.state == "purged" and not entry.pins}
        if (lost and fits_limit and idle) or (requester in idle and any(e.tenant == requester for e in lost)):
            self.unlawful.append("I6: evicted while memory waited that nobody can reach")
        is_within = self.used(requester) + extent_bytes <= self.protected(requester)
        if is_within and extent_bytes == GRANULE_BYTES and any(entry.tenant == requester for entry in lost):
            self._expect_nobody_else_has_spare(requester)
        within = self.used(requester) + extent_bytes - sum(e.extent_bytes for e in lost if e.tenant == requester)
        is_entitled = within <= quota.reserved_bytes
        for tenant in {entry.tenant for entry in lost} - {requester}:
            protected_bytes = self.protected(tenant)
            used_bytes = self.used(tenant)
            for entry in sorted((e for e in lost if e.tenant == tenant), key=self._place):
                if used_bytes <= protected_bytes:
                    self.unlawful.append(f"I5: {tenant} lost an entry at or below its reservation")
                used_bytes -= entry.extent_bytes
                if used_bytes < protected_bytes and not is_entitled:
                    self.unlawful.append(f"I5: {tenant} was taken below its reservation by a borrower")
        for entry in lost:
            if not entry.is_evictable:
                self.unlawful.append("I7: a held entry was evicted")
        self._evict_for(requester, extent_bytes, lost)
        if self.used(requester) + extent_bytes > quota.limit_bytes:
            self.unlawful.append("I4: admitted past the limit")

    def _evict_for(self, requester: TenantId, extent_bytes: int, lost: list[ModelEntry]) -> None:
        """Take out what a put displaced; its tenant's own coldest went for its limit, as far as that asked for it."""
        excess_bytes = self.used(requester) + extent_bytes - self.quota(requester).limit_bytes
        for entry in sorted((e for e in lost if e.tenant == requester), key=self._place):
            self.evict(entry, EvictionCause.OWN_LIMIT if excess_bytes > 0 else EvictionCause.OWN_PUT)
            excess_bytes -= entry.extent_bytes
        for entry in (e for e in lost if e.tenant != requester):
            self.evict(entry, EvictionCause.NEIGHBOUR)
            self.counters[requester].took(entry.size_bytes)

    def judge_trim(self, lost: list[ModelEntry], soft_mark_percent: int, *, is_complete: bool) -> None:
        """Note in ``unlawful`` what may not have gone in the background (I5, I7) and what was left; take it out.

        Args:
            is_complete: the core says that nothing is left to trim.
        """
        for tenant in list(self.tenants) if is_complete else {entry.tenant for entry in lost}:
            quota = self.quota(tenant)
            mark_bytes = max(quota.reserved_bytes, quota.limit_bytes * soft_mark_percent // 100)
            coldest = [entry for entry in self.coldest_first(tenant) if entry.is_evictable]
            mine = sorted((entry for entry in lost if entry.tenant == tenant), key=self._place)
            if mine != coldest[: len(mine)]:
                self.unlawful.append(f"{tenant} was trimmed of other than its coldest")
            for entry in mine:
                if self.used(tenant) <= mark_bytes:
                    self.unlawful.append(f"{tenant} was trimmed below its soft mark")
                self.evict(entry, EvictionCause.SOFT_MARK)
            if mine and self.used(tenant) < quota.reserved_bytes:
                self.unlawful.append(f"I5: {tenant} was trimmed below its reservation")
            left_bytes = self.used(tenant) - coldest[0].extent_bytes if coldest else 0
            if is_complete and coldest and self.used(tenant) > mark_bytes and left_bytes >= quota.reserved_bytes:
                self.unlawful.append(f"{tenant} is above its soft mark and was not trimmed")

    def judge_refusal(self, requester: TenantId, extent_bytes: int, reason: str) -> None:
        """Note in ``unlawful`` a put that was refused although evicting would have made room."""
        quota = self.quota(requester)
        excess_bytes = self.used(requester) + extent_bytes - quota.limit_bytes
        if reason == "QUOTA_EXCEEDED" and requester in self.lagging:
            if excess_bytes <= 0 and self.longest_gap(self.live) >= extent_bytes:
                self.unlawful.append("refused for a limit that was lowered, and is met")
            return
        if reason == "QUOTA_EXCEEDED":
            if excess_bytes <= self.evictable(requester):
                self.unlawful.append("refused for a quota that own evictions could have met")
            return
        if reason == "TRANSFERS_FULL":
            if self.may_hold(requester, extent_bytes):
                self.unlawful.append("refused for transfers that left room")
            return
        assert reason == "NODE_FULL", reason
        if excess_bytes > self.evictable(requester):
            self.unlawful.append("NODE_FULL although the quota refused it")
        if self.longest_gap(e for e in self.live if e.tenant != requester or not e.is_evictable) >= extent_bytes:
            self.unlawful.append("NODE_FULL although own evictions would have made room")
        if self.used(requester) + extent_bytes <= quota.reserved_bytes and extent_bytes == GRANULE_BYTES:
            self._expect_nobody_else_has_spare(requester)
            shared_bytes = self.capacity_bytes - self.reserved_bytes()
            if self.idle_bytes() + shared_bytes - self.held_beyond() >= extent_bytes and not self._protected:
                self.unlawful.append("I5: transfers kept an owner from its reservation beyond the margin")

    def _expect_nobody_else_has_spare(self, requester: TenantId) -> None:
        """For a put of one granule, for which any one victim is enough."""
        for tenant in {entry.tenant for entry in self.live} - {requester}:
            if self.used(tenant) > self.protected(tenant) and self.evictable(tenant):
                self.unlawful.append("I5: a lent reservation was not given back")
