"""The cache core for tests: a policy in one line, lengths in granules, keys by number, a clock that ticks."""

from __future__ import annotations

from dataplane.core.admission import open_partition
from dataplane.core.cache import CacheCore
from dataplane.core.entry import PutRefused, PutTicket
from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.reservations import DEFAULT_RESERVATIONS, Reservations
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota

#: (reserved, limit) or (reserved, limit, weight); reserved and limit in granules.
Quota = tuple[int, int] | tuple[int, int, int]


def make_policy(
    version: int,
    quotas: dict[str, Quota],
    *,
    epochs: tuple[int, ...] = (1,),
    uid: str = "uid-1",
    block_granules: int = 1024,
    suspended: tuple[str, ...] = (),
) -> NodePolicy:
    """A policy in which every tenant has one namespace, ``ns``."""
    return NodePolicy(
        version,
        {
            TenantId(tenant): TenantPolicy(
                TenantState.SUSPENDED if tenant in suspended else TenantState.ACTIVE,
                {Tier.DRAM: TierQuota(quota[0] * GRANULE_BYTES, quota[1] * GRANULE_BYTES, *quota[2:])},
                {NamespaceId("ns"): NamespacePolicy(uid, block_granules * GRANULE_BYTES, epochs)},
            )
            for tenant, quota in quotas.items()
        },
    )


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def reason_of(outcome: PutTicket | PutRefused | None) -> str:
    """Why a put was refused."""
    assert isinstance(outcome, PutRefused), outcome
    return outcome.error.reason


class Node:
    """A core with a clock that ticks once a command, and shorthands that speak in granules and key numbers."""

    def __init__(
        self,
        capacity_granules: int,
        policy: NodePolicy,
        eviction: Eviction = DEFAULT_EVICTION,
        reservations: Reservations = DEFAULT_RESERVATIONS,
        soft_mark_percent: int = 100,
    ) -> None:
        self.core = CacheCore(
            capacity_granules * GRANULE_BYTES,
            eviction=eviction,
            reservations=reservations,
            soft_mark_percent=soft_mark_percent,
        )
        self.now_ns = 0
        self.apply(policy)

    def tick(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns

    def apply(self, policy: NodePolicy) -> None:
        self.core.apply_policy(policy, self.tick())
        self.core.check_invariants()

    def partition(self, tenant: str, epoch: int = 1) -> Partition:
        namespace = NamespaceId("ns")
        return open_partition(
            self.core.policy,
            claims_tenant=TenantId(tenant),
            claims_namespace=namespace,
            requested_namespace=namespace,
            epoch=epoch,
        )

    def start(self, tenant: str, number: int, granules: int = 1, epoch: int = 1) -> PutTicket | PutRefused:
        outcome = self.core.put_start(
            self.partition(tenant, epoch), key_of(number), granules * GRANULE_BYTES, self.tick()
        )
        self.core.check_invariants()
        return outcome

    def started(self, tenant: str, number: int, granules: int = 1, epoch: int = 1) -> PutTicket:
        outcome = self.start(tenant, number, granules, epoch)
        assert isinstance(outcome, PutTicket), outcome
        return outcome

    def put(self, tenant: str, number: int, granules: int = 1, epoch: int = 1) -> PutRefused | None:
        """Put and commit; returns the refusal, if any. The checksum is the key number."""
        outcome = self.start(tenant, number, granules, epoch)
        if isinstance(outcome, PutRefused):
            return outcome
        refused = self.core.put_commit(outcome, number, self.tick())
        self.core.check_invariants()
        return refused

    def fill(self, tenant: str, numbers: range, granules: int = 1) -> None:
        for number in numbers:
            assert self.put(tenant, number, granules) is None

    def there(self, tenant: str, numbers: range, epoch: int = 1) -> list[int]:
        """Which of the key numbers can be read now; touches nothing."""
        found = self.core.lookup(self.partition(tenant, epoch), [key_of(n) for n in numbers])[1]
        return [number for number, is_there in zip(numbers, found, strict=True) if is_there]

    def used(self, tenant: str) -> int:
        """Granules charged to a tenant."""
        return self.core.usage().tenants[TenantId(tenant)].used_bytes // GRANULE_BYTES

    def evictions(self) -> int:
        return sum(usage.counters.evictions for usage in self.core.usage().tenants.values())


def node_of(
    capacity_granules: int,
    quotas: dict[str, Quota],
    eviction: Eviction = DEFAULT_EVICTION,
    reservations: Reservations = DEFAULT_RESERVATIONS,
    soft_mark_percent: int = 100,
) -> Node:
    """A core of that many granules with a first policy applied."""
    return Node(capacity_granules, make_policy(1, quotas), eviction, reservations, soft_mark_percent)
