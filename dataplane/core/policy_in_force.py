"""The policy that a node serves: what a new one does to tenants and partitions, and what the one in force opens.

Rules upheld here: I2 (an index is reached through a partition that the policy opens), I4 (a lowered limit binds at
once), I5 (no more is reserved than there is), I9 (nothing grows past a lease), I12 (what the policy no longer names is
unreachable when it is applied).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from dataplane.core.admission import check_partition, peer_partitions
from dataplane.core.earning import EarningAccount
from dataplane.core.eviction import Eviction, new_order
from dataplane.core.lease import NEVER_NS, Lease, without_growth
from dataplane.core.partition import Partition
from dataplane.core.pool import Pool
from dataplane.core.reaping import work_off
from dataplane.core.reservations import Reservations
from dataplane.core.split_order import SplitOrder
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.tenant_cache import NO_LIMIT_BYTES, PartitionIndex, TenantCache
from dataplane.core.usage import PolicyApplied
from saltern.errors import FailedPreconditionError
from saltern.names import TenantId
from tenants.policy import NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota, check_reservations

_NO_QUOTA: Final = TierQuota(reserved_bytes=0, limit_bytes=0)


def _reserved_bytes(rules: TenantPolicy | None, tier: Tier) -> int:
    return 0 if rules is None else rules.tiers.get(tier, _NO_QUOTA).reserved_bytes


class PolicyInForce:
    """The snapshot in force, version 0 without tenants before the first, and what it means for a pool.

    Attributes:
        policy: the snapshot.
        stops_ns: from then on nothing may grow: whoever would charge bytes looks at it first and freezes.
        is_frozen: limits are what was used when the lease ran out (I9).
    """

    def __init__(
        self,
        pool: Pool,
        eviction: Eviction,
        reservations: Reservations,
        ssd: SsdTier | None,
        *,
        soft_mark_percent: int,
        slice_bytes: int,
    ) -> None:
        self.policy = NodePolicy(version=0)
        self._pool = pool
        self._open = pool.open
        self._eviction = eviction
        self._reservations = reservations
        self._ssd = ssd
        self._soft_mark_percent = soft_mark_percent
        self._slice_bytes = slice_bytes
        self._lease = Lease()
        self.stops_ns = NEVER_NS
        self.is_frozen = False
        self._settled_version = 0
        #: Sums over the policy in force.
        self._reserved_bytes = dict.fromkeys(Tier, 0)
        #: Tenants that may be above their limits; None for any. Only a policy puts somebody there.
        self._above: set[TenantCache] | None = None
        #: Of partitions in sharing groups, as far as they have been asked for under this policy.
        self._peers: dict[Partition, tuple[Partition, ...]] = {}

    def renew(self, lease: Lease, now_ns: int) -> None:
        """Go by ``lease`` from now on: limits are those of the policy again, or frozen where it does not hold."""
        self._lease = lease
        self._follow_lease(now_ns)

    def freeze(self) -> None:
        """The lease has run out: what is used now is the most that will be (I9); idempotent."""
        if not self.is_frozen:
            self.is_frozen = True
            self._set_quotas()

    @property
    def settled_version(self) -> int:
        """The newest policy that was in force with nobody above a limit, on either tier (I4)."""
        if self._settled_version != self.policy.version:
            self._above = {
                owner
                for owner in (self._pool.tenants.values() if self._above is None else self._above)
                if owner.is_above_a_limit
            }
            if not self._above and (self._ssd is None or self._ssd.is_within_limits):
                self._settled_version = self.policy.version
        return self._settled_version

    def _follow_lease(self, now_ns: int) -> None:
        self.stops_ns = self._lease.stops_ns(self.policy.version)
        if now_ns >= self.stops_ns:
            self.freeze()
        elif self.is_frozen:
            self.is_frozen = False
            self._set_quotas()

    def _set_quotas(self) -> None:
        """Limits of the policy, or of what is there; which namespaces there are stays."""
        self._above = None
        for tenant, rules in self.policy.tenants.items():
            owner = self._pool.tenants[tenant]
            self._set_quota(owner, rules.tiers.get(Tier.DRAM, _NO_QUOTA))
            self._set_namespace_limits(owner, rules)
            self._pool.changed(owner)
        self._pool.held.set_reserved(
            sum(self._pool.tenants[tenant].budget.reserved_bytes for tenant in self.policy.tenants)
        )
        if self._ssd is not None:
            self._ssd.set_quotas(self.policy, is_frozen=self.is_frozen)

    def _set_quota(self, owner: TenantCache, quota: TierQuota) -> None:
        if self.is_frozen:
            # No soft mark: room is no use to who cannot fill it, and what is resident stays.
            owner.set_quota(without_growth(quota, owner.budget.used_bytes))
        else:
            owner.set_quota(quota, self._soft_mark_percent)

    def _set_namespace_limits(self, owner: TenantCache, rules: TenantPolicy) -> None:
        """Limits of the namespaces that have one, or had one (I4); a tenant without any costs one look at each."""
        for rule in rules.namespaces.values():
            limit_bytes = rule.tier_limits.get(Tier.DRAM)
            namespace = owner.namespaces.get(rule.uid)
            if limit_bytes is None:
                if namespace is not None and namespace.limit_bytes != NO_LIMIT_BYTES:
                    namespace.limit_bytes = NO_LIMIT_BYTES
                    self._pool.forget_limit(namespace)
                continue
            namespace = owner.namespace(rule.uid)
            namespace.limit_bytes = min(limit_bytes, namespace.used_bytes) if self.is_frozen else limit_bytes
            if namespace.order is None:
                if not isinstance(owner.order, SplitOrder):
                    owner.order = SplitOrder(owner.order)
                owner.order.split(namespace, new_order(self._eviction))
            self._pool.forget_limit(namespace)
            if namespace.is_above_limit:
                self._pool.namespaces_above[namespace] = None

    def _forget_namespaces(self, owner: TenantCache, rules: TenantPolicy) -> None:
        """Books of namespaces that are gone stay only as long as bytes are charged to them (I8)."""
        named = {rule.uid for rule in rules.namespaces.values()}
        for uid, namespace in list(owner.namespaces.items()):
            if uid in named:
                continue
            namespace.limit_bytes = NO_LIMIT_BYTES
            self._pool.forget_limit(namespace)
            if not namespace.used_bytes:
                del owner.namespaces[uid]
                if isinstance(owner.order, SplitOrder):
                    owner.order.forget(namespace)

    def recheck_limits(self) -> None:
        """Entries came from elsewhere than a put: anybody may be above a limit."""
        self._above = None

    def apply(self, policy: NodePolicy, now_ns: int, *, touched: Collection[TenantId] | None = None) -> PolicyApplied:
        """Replace the policy. What it no longer names is unreachable when this returns (I12).

        Tenants whose rules are the same object or equal cost no more than the comparison. Of what follows for memory,
        the first ``slice_bytes`` of work are done here, the rest by :func:`dataplane.core.reaping.work_off`.

        Args:
            touched: tenants that may differ from the policy in force; of the others the rules are the same objects,
                and they cost nothing. None for all.

        Raises:
            FailedPreconditionError: POLICY_STALE (older than the one in force) or RESERVATIONS_ABOVE_CAPACITY (I5);
                the policy in force stays.
        """
        if policy.version < self.policy.version:
            raise FailedPreconditionError(
                f"policy version {policy.version} is older than {self.policy.version}, which is in force",
                reason="POLICY_STALE",
                hint="push the newest policy",
            )
        pool = self._pool
        reserved_bytes = self._reserved_under(policy, touched)
        check_reservations((reserved_bytes[Tier.DRAM],), pool.extents.capacity_bytes, Tier.DRAM)
        if self._ssd is not None:
            check_reservations((reserved_bytes[Tier.SSD],), self._ssd.capacity_bytes, Tier.SSD)
        pool.advance(now_ns)
        before, self.policy = self.policy.tenants, policy
        self._peers.clear()
        self._reserved_bytes = reserved_bytes
        pool.held.set_reserved(reserved_bytes[Tier.DRAM])
        if self._ssd is not None:
            self._ssd.apply_policy(policy, touched)
        if touched is None:
            touched = dict.fromkeys((*pool.tenants, *policy.tenants))

        purged_entries = 0
        absent = [tenant for tenant in touched if tenant not in policy.tenants]
        for gone in [pool.tenants[tenant] for tenant in absent if tenant in pool.tenants]:
            gone.in_policy = False
            gone.set_quota(_NO_QUOTA)
            purged_entries += sum(pool.purge(index) for index in list(gone.partitions.values()))
            pool.above_limit.pop(gone, None)
            pool.changed(gone)
            pool.forget_if_empty(gone)
            self._suspect(gone)
        for tenant in touched:
            rules, known = policy.tenants.get(tenant), before.get(tenant)
            if rules is None or known is rules or known == rules:
                continue
            owner = pool.tenants.get(tenant)
            if owner is None:
                owner = pool.tenants[tenant] = self._new_tenant(tenant)
            owner.in_policy = True
            owner.set_uid(rules.uid)
            self._set_quota(owner, rules.tiers.get(Tier.DRAM, _NO_QUOTA))
            self._suspect(owner)
            purged_entries += self._apply_namespaces(owner, rules)
            self._forget_namespaces(owner, rules)
            self._set_namespace_limits(owner, rules)
            if owner.budget.used_bytes > owner.budget.limit_bytes:
                pool.above_limit[owner] = None
            else:
                pool.above_limit.pop(owner, None)
            pool.changed(owner)
        evicted_entries = work_off(pool, self._slice_bytes)
        if self.is_frozen:
            self._set_quotas()
        self._follow_lease(now_ns)  # the version decides whether the lease holds
        return PolicyApplied(version=policy.version, purged_entries=purged_entries, evicted_entries=evicted_entries)

    def _reserved_under(self, policy: NodePolicy, touched: Collection[TenantId] | None) -> dict[Tier, int]:
        """What ``policy`` reserves on each tier: counted anew, or from where those it touches were before."""
        if touched is None:
            return {tier: sum(_reserved_bytes(rules, tier) for rules in policy.tenants.values()) for tier in Tier}
        before = self.policy.tenants
        return {
            tier: reserved_bytes
            + sum(
                _reserved_bytes(policy.tenants.get(tenant), tier) - _reserved_bytes(before.get(tenant), tier)
                for tenant in touched
            )
            for tier, reserved_bytes in self._reserved_bytes.items()
        }

    def _suspect(self, owner: TenantCache) -> None:
        if self._above is not None:
            self._above.add(owner)

    def open_index(self, partition: Partition) -> PartitionIndex | None:
        """First use of a partition that the policy opens; None if it does not."""
        if check_partition(self.policy, partition) is not None:
            return None
        namespace = self.policy.tenants[partition.tenant].namespaces[partition.namespace]
        owner = self._pool.tenants[partition.tenant]
        newest = namespace.epochs_of(partition.group_uid)[-1]
        index = PartitionIndex(
            partition,
            owner,
            namespace.block_bytes,
            partition.epoch == newest,
            block_tokens=namespace.block_tokens,
        )
        owner.partitions[partition] = self._open[partition] = index
        return index

    def peers(self, partition: Partition, now_ns: int) -> tuple[Partition, ...]:
        """Whose entries a session of a sharing group may read besides its own (I2).

        Nobody's once the lease has run out: the control plane then counts this node as one that no longer shares, so a
        member that has left knows after that time that nobody is served its entries, whether the node heard or not.
        """
        if not partition.group_uid or now_ns >= self.stops_ns:
            return ()
        peers = self._peers.get(partition)
        if peers is None:
            peers = self._peers[partition] = peer_partitions(self.policy, partition)
        return peers

    def _new_tenant(self, tenant: TenantId) -> TenantCache:
        account = EarningAccount() if self._reservations is Reservations.EARNING else None
        return TenantCache(tenant=tenant, order=new_order(self._eviction), account=account)

    def _apply_namespaces(self, owner: TenantCache, rules: TenantPolicy) -> int:
        """Purge the partitions that are gone, close those of a suspended tenant, refresh the rest."""
        purged_entries = 0
        for partition, index in list(owner.partitions.items()):
            namespace = rules.namespaces.get(partition.namespace)
            epochs = () if namespace is None else namespace.epochs_of(partition.group_uid)
            if namespace is None or namespace.uid != partition.namespace_uid or partition.epoch not in epochs:
                purged_entries += self._pool.purge(index)
                continue
            index.block_bytes, index.block_tokens = namespace.block_bytes, namespace.block_tokens
            index.is_writable = partition.epoch == epochs[-1]
            if rules.state is TenantState.ACTIVE:
                self._open[partition] = index
            else:
                self._open.pop(partition, None)
        return purged_entries
