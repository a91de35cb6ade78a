"""Limits of namespaces in the core: charged, refused, evicted and lowered as those of tenants (I4, I6, I8)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from dataplane.core.admission import open_partition
from dataplane.core.cache import CacheCore
from dataplane.core.entry import Pin, PutRefused, PutTicket
from dataplane.core.eviction import Eviction
from dataplane.core.extents import GRANULE_BYTES as G
from dataplane.core.lease import Lease
from dataplane.core.partition import Partition
from dataplane.core.reaping import POLICY_SLICE_BYTES
from dataplane.core.segments import BLOCK_BYTES
from dataplane.core.snapshot import ArenaIdentity, decode_snapshot
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.usage import EvictionCause, NamespaceUsage
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tests.support.cache_node import key_of, reason_of

ACME = TenantId("acme")
CHAT, BULK = NamespaceId("chat"), NamespaceId("bulk")
_ARENA = ArenaIdentity("node-1", "boot", "generation", 1, 0)


class Node:
    """A core with one tenant, ``acme``, and its namespaces ``chat`` and ``bulk``; sizes in granules."""

    def __init__(self, capacity: int = 1000, *, limit: int = 500, ssd: SsdTier | None = None, **limits: int) -> None:
        self.core = CacheCore(capacity * G, eviction=Eviction.LRU, ssd=ssd)
        self.now_ns = self.version = 0
        self.limit = limit
        self.apply(**limits)

    def tick(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns

    def apply(
        self, *, epochs: tuple[int, ...] = (1,), ssd_limit: int | None = None, uid: str = "u", **limits: int
    ) -> None:
        """A policy with limits for namespaces, by name; those that are not named have none."""
        self.version += 1
        on_ssd = {} if ssd_limit is None else {Tier.SSD: ssd_limit}
        namespaces = {
            name: NamespacePolicy(
                f"{uid}-{name}", 64 * G, epochs, tier_limits={Tier.DRAM: limits[name] * G} if name in limits else on_ssd
            )
            for name in (CHAT, BULK)
        }
        quotas = {Tier.DRAM: TierQuota(0, self.limit * G), Tier.SSD: TierQuota(0, 4000 * BLOCK_BYTES)}
        tenant = TenantPolicy(TenantState.ACTIVE, quotas, namespaces)
        self.core.apply_policy(NodePolicy(self.version, {ACME: tenant}), self.tick())
        self.core.check_invariants()

    def partition(self, name: NamespaceId, epoch: int = 1) -> Partition:
        return open_partition(
            self.core.policy, claims_tenant=ACME, claims_namespace=name, requested_namespace=name, epoch=epoch
        )

    def start(self, name: NamespaceId, number: int, granules: int = 1, epoch: int = 1) -> PutTicket | PutRefused:
        outcome = self.core.put_start(self.partition(name, epoch), key_of(number), granules * G, self.tick())
        self.core.check_invariants()
        return outcome

    def put(self, name: NamespaceId, number: int, granules: int = 1, epoch: int = 1) -> None:
        ticket = self.start(name, number, granules, epoch)
        assert isinstance(ticket, PutTicket), ticket
        assert self.core.put_commit(ticket, 1, self.tick()) is None

    def fill(self, name: NamespaceId, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.put(name, number)

    def hold(self, name: NamespaceId, numbers: Iterable[int]) -> list[Pin | None]:
        return self.core.get_start(self.partition(name), [key_of(number) for number in numbers], self.tick())

    def there(self, name: NamespaceId, numbers: Iterable[int], epoch: int = 1) -> list[int]:
        wanted = list(numbers)
        _, found = self.core.lookup(self.partition(name, epoch), [key_of(number) for number in wanted])
        return [number for number, is_there in zip(wanted, found, strict=True) if is_there]

    def usage(self, name: NamespaceId) -> NamespaceUsage:
        return self.core.usage().tenants[ACME].namespaces[name]


def test_i4_at_its_limit_a_namespace_evicts_its_own_coldest_whatever_is_colder_elsewhere() -> None:
    node = Node(chat=4)
    node.fill(BULK, range(10))
    node.fill(CHAT, range(4))
    node.put(CHAT, 4)
    assert node.there(CHAT, range(5)) == [1, 2, 3, 4] and node.there(BULK, range(10)) == list(range(10))
    assert node.usage(CHAT).used_bytes == 4 * G and node.usage(CHAT).limit_bytes == 4 * G
    assert node.usage(BULK).used_bytes == 10 * G and node.usage(BULK).limit_bytes is None
    counters = node.core.usage().tenants[ACME].counters
    assert counters.evictions_by_cause == {EvictionCause.NAMESPACE_LIMIT: 1}


def test_i4_puts_in_flight_count_and_a_refusal_says_what_was_used() -> None:
    node = Node(chat=4)
    tickets = [node.start(CHAT, number) for number in range(4)]
    refused = node.start(CHAT, 4)
    assert isinstance(refused, PutRefused)
    error = refused.error
    assert (error.reason, error.retry_after_ms) == ("NAMESPACE_LIMIT", 50)
    assert error.metadata == {
        "tenant": "acme",
        "namespace": "chat",
        "tier": "dram",
        "used_bytes": str(4 * G),
        "limit_bytes": str(4 * G),
    }
    assert isinstance(node.start(BULK, 0), PutTicket), "the others go on"
    ticket = tickets[0]
    assert isinstance(ticket, PutTicket)
    node.core.put_abort(ticket)
    assert isinstance(node.start(CHAT, 4), PutTicket)


def test_i6_a_put_that_cannot_fit_evicts_nothing() -> None:
    node = Node(chat=4)
    node.fill(CHAT, range(4))
    pins = node.hold(CHAT, range(2))
    assert reason_of(node.start(CHAT, 9, granules=3)) == "NAMESPACE_LIMIT"
    assert reason_of(node.start(CHAT, 9, granules=5)) == "ENTRY_TOO_LARGE"
    assert node.there(CHAT, range(4)) == [0, 1, 2, 3]
    node.core.get_end(pins)
    node.put(CHAT, 9, granules=3)
    assert node.there(CHAT, (*range(4), 9)) == [0, 9], "the head of what was read outlives its tail"


def test_i4_the_tenants_limit_holds_besides() -> None:
    node = Node(limit=6, chat=4)
    node.fill(CHAT, range(3))
    node.fill(BULK, range(3))
    node.put(CHAT, 3, granules=2)
    assert node.there(CHAT, range(4)) == [2, 3], "one went for the namespace, then the tenant's coldest for the tenant"
    assert node.there(BULK, range(3)) == [0, 1, 2]
    counters = node.core.usage().tenants[ACME].counters
    assert counters.evictions_by_cause == {EvictionCause.NAMESPACE_LIMIT: 1, EvictionCause.OWN_LIMIT: 1}


def test_i4_every_epoch_counts_and_purged_bytes_go_first() -> None:
    node = Node(chat=4)
    node.fill(CHAT, range(2))
    node.apply(chat=4, epochs=(1, 2))
    node.put(CHAT, 0, epoch=2)
    node.put(CHAT, 1, epoch=2)
    node.put(CHAT, 2, epoch=2)
    assert node.there(CHAT, range(2)) == [1] and node.usage(CHAT).used_bytes == 4 * G
    node.apply(chat=4, epochs=(2,))
    node.put(CHAT, 3, epoch=2)
    assert node.there(CHAT, range(4), epoch=2) == [0, 1, 2, 3]


def test_i4_a_lowered_limit_binds_at_once_and_is_worked_off_in_the_background() -> None:
    many = POLICY_SLICE_BYTES // G + 100
    node = Node(2000, limit=2000)
    node.fill(CHAT, range(many))
    node.fill(BULK, range(10))
    node.apply(chat=10)
    assert node.usage(CHAT).used_bytes == 100 * G and node.core.has_arrears
    assert node.core.settled_version < node.version, "another node may not have yet what is still used here"
    assert reason_of(node.start(CHAT, many)) == "NAMESPACE_LIMIT"
    assert node.usage(CHAT).used_bytes == 100 * G, "the refused put evicted nothing (I6)"
    node.core.work_off(node.tick(), 60 * G)
    node.core.check_invariants()
    assert node.usage(CHAT).used_bytes == 40 * G
    node.core.work_off(node.tick(), 60 * G)
    node.core.check_invariants()
    assert node.there(CHAT, range(many)) == list(range(many - 10, many))
    assert node.usage(BULK).used_bytes == 10 * G
    assert not node.core.has_arrears and node.core.settled_version == node.version


def test_i4_what_is_held_above_a_lowered_limit_leaves_as_its_readers_end() -> None:
    node = Node()
    node.fill(CHAT, range(8))
    pins = node.hold(CHAT, range(6))
    ticket = node.start(CHAT, 8)
    node.apply(chat=2)
    assert node.usage(CHAT).used_bytes == 7 * G and not node.core.has_arrears
    assert isinstance(ticket, PutTicket)
    refused = node.core.put_commit(ticket, 1, node.tick())
    assert refused is not None and refused.error.reason == "NAMESPACE_LIMIT", "arrived, and no longer fits"
    for pin in pins:
        node.core.get_end([pin])
        node.core.check_invariants()
    assert node.usage(CHAT).used_bytes == 2 * G and node.core.settled_version == node.version


def test_a_limit_is_lifted_and_set_again() -> None:
    node = Node(chat=2)
    node.fill(CHAT, range(2))
    node.apply()
    node.fill(CHAT, range(2, 6))
    assert node.usage(CHAT).limit_bytes is None and node.usage(CHAT).used_bytes == 6 * G
    node.apply(chat=3)
    assert node.there(CHAT, range(6)) == [3, 4, 5]


@pytest.mark.parametrize("eviction", list(Eviction))
def test_a_tenant_with_limits_loses_the_same_entries_in_the_same_order(eviction: Eviction) -> None:
    """Orders apart and merged: with LRU exactly one order; with the others every entry once."""

    def order(limits: dict[str, int]) -> list[int]:
        node = Node(limit=20, **limits)
        node.core = CacheCore(1000 * G, eviction=eviction)
        node.apply(**limits)
        for number in range(20):
            node.put(CHAT if number % 3 else BULK, number)
        node.core.get_end(node.hold(CHAT, (1, 2, 10)))
        node.core.get_end(node.hold(BULK, (3, 9)))
        left = list(node.core._pool.tenants[ACME].order)
        return [int.from_bytes(entry.key, "big") for entry in left]

    plain, split = order({}), order({"chat": 100})
    assert sorted(plain) == sorted(split) == list(range(20))
    if eviction is Eviction.LRU:
        assert plain == split


def test_i9_without_a_lease_a_namespace_does_not_grow() -> None:
    node = Node(chat=4)
    node.fill(CHAT, range(2))
    node.fill(BULK, range(3))
    node.core.renew(Lease(expires_ns=node.now_ns), node.tick())
    assert reason_of(node.start(CHAT, 9, granules=3)) == "LEASE_EXPIRED"
    node.put(CHAT, 9)
    assert node.usage(CHAT).used_bytes == 2 * G, "in place of an own one"


def test_i12_a_namespace_made_anew_owes_nothing() -> None:
    node = Node(chat=4)
    node.fill(CHAT, range(4))
    node.core.get_end(node.hold(CHAT, range(4)))
    node.apply(uid="v", chat=4)
    assert node.there(CHAT, range(4)) == []
    node.fill(CHAT, range(4))
    usage = node.usage(CHAT)
    assert (usage.uid, usage.used_bytes, usage.get_hits) == ("v-chat", 4 * G, 0)


def test_i8_hits_and_misses_are_counted_by_namespace() -> None:
    node = Node()
    node.fill(CHAT, range(3))
    node.core.get_end(node.hold(CHAT, range(5)))
    node.core.get_end(node.hold(BULK, range(2)))
    assert (node.usage(CHAT).get_hits, node.usage(CHAT).get_misses, node.usage(CHAT).entries) == (3, 2, 3)
    assert (node.usage(BULK).get_hits, node.usage(BULK).get_misses) == (0, 2)


def test_i4_a_warm_restart_keeps_within_a_limit_that_was_lowered_meanwhile() -> None:
    node = Node(chat=8)
    node.fill(CHAT, range(8))
    node.fill(BULK, range(4))
    saved = b"".join(node.core.snapshot(_ARENA))
    again = Node(chat=3)
    adopted = again.core.adopt(decode_snapshot(saved), lambda offset, size: 1, again.tick())
    again.core.check_invariants()
    assert (adopted.entries, adopted.evicted_entries) == (7, 5)
    assert again.there(CHAT, range(8)) == [5, 6, 7] and again.there(BULK, range(4)) == [0, 1, 2, 3]
    again.put(CHAT, 8)
    assert again.usage(CHAT).used_bytes == 3 * G


def appended(tier: SsdTier, partition: Partition, numbers: Iterable[int]) -> Iterator[bool]:
    """Write entries as the shell does, doing what the tier asks for as it asks."""
    for number in numbers:
        append = tier.append_start(partition, key_of(number), 8000, number)
        if append is not None:
            tier.append_end(append, written=True)
        yield append is not None
        while tier.actions:
            action = tier.actions.popleft()
            answer = {"Seal": "seal_end", "DropSegment": "drop_end", "Relocate": "relocate_end"}[type(action).__name__]
            flags = {"Seal": {"written": True}, "DropSegment": {"removed": True}}.get(type(action).__name__, {})
            getattr(tier, answer)(action, **flags)


def test_i4_on_ssd_a_namespace_keeps_its_limit_by_its_own_oldest_segments() -> None:
    tier = SsdTier(8000 * BLOCK_BYTES, segment_min_bytes=8 * BLOCK_BYTES)
    node = Node(ssd=tier, ssd_limit=40 * BLOCK_BYTES)
    chat, bulk = node.partition(CHAT), node.partition(BULK)
    assert all(appended(tier, bulk, range(5)))
    for _ in appended(tier, chat, range(40)):
        node.core.check_invariants()
        assert node.usage(CHAT).ssd_used_bytes <= 40 * BLOCK_BYTES
    usage = node.usage(CHAT)
    assert usage.ssd_limit_bytes == 40 * BLOCK_BYTES and 0 < usage.ssd_entries < 40
    assert tier.find(chat, key_of(39)) is not None and tier.find(chat, key_of(0)) is None
    assert node.usage(BULK).ssd_entries == 5, "nobody else lost anything"
    node.apply(ssd_limit=16 * BLOCK_BYTES)
    list(appended(tier, chat, ()))
    node.core.check_invariants()
    node.apply(ssd_limit=0)
    assert not tier.wants(chat, key_of(99)) and tier.find(chat, key_of(39)) is None
