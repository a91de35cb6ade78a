"""Random commands in random order against a plain model; every invariant is checked after every command.

Once with LRU inside each tenant, where the model predicts the order of eviction too; once with the default order, whose
own order the model goes by; once where reservations protect what earns, and I5 is about that part of them alone; once
where all that a policy leaves to do is done later, in slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.core.admission import open_partition
from dataplane.core.cache import CacheCore
from dataplane.core.entry import Pin, PutTicket
from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.reaping import POLICY_SLICE_BYTES
from dataplane.core.reservations import Reservations
from saltern.errors import FailedPreconditionError
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy
from tenants.quota import TierQuota
from tests.support.cache_model import CacheModel, ModelEntry, ModelTenant
from tests.support.cache_node import key_of

G = GRANULE_BYTES
CAPACITY = 14 * G
TENANTS = [TenantId(name) for name in ("a", "b", "c")]
NAMESPACES = {NamespaceId("large"): 6 * G, NamespaceId("small"): 2 * G - 7}
KEYS = [key_of(number) for number in range(8)]
SIZES = [1, G - 1, G, G, G, G + 1, 2 * G, 3 * G, 5 * G + 1, 6 * G, 6 * G + 1]

SOFT_MARK_PERCENT = 70

anything = st.integers(0, 10**6)  # an index, taken modulo the number of choices there are
keys = st.sampled_from(KEYS)
batches = st.lists(keys, min_size=1, max_size=5)
reservations = st.sampled_from([0, 0, 2, 3, 4, 5, 7])
limits = st.sampled_from([0, 1, 3, 5, 7, 9, 14, 20])
weights = st.sampled_from([1, 50, 100, 100, 100, 1000])


@dataclass(eq=False)
class HeldPin:
    pin: Pin
    entry: ModelEntry


class CacheMachine(RuleBasedStateMachine):
    EVICTION: ClassVar = Eviction.LRU
    RESERVATIONS: ClassVar = Reservations.STRICT
    SLICE_BYTES: ClassVar = POLICY_SLICE_BYTES  # more than the arena: all is done as a policy is applied

    def __init__(self) -> None:
        super().__init__()
        self.core = self.new_core()
        self.model = CacheModel(CAPACITY, is_lazy=self.SLICE_BYTES < CAPACITY)
        self.version = 0
        self.uids = 0
        self.now_ns = 0
        self.partitions: list[Partition] = []
        self.tickets: list[tuple[PutTicket, ModelEntry]] = []
        self.pins: list[HeldPin] = []
        self.was_above: dict[TenantId, int] = {}
        for tenant in TENANTS:
            self.model.tenants[tenant] = ModelTenant(TierQuota(3 * G, 9 * G), namespaces=self.new_namespaces())
        self.push()

    def new_core(self) -> CacheCore:
        return CacheCore(
            CAPACITY,
            eviction=self.EVICTION,
            reservations=self.RESERVATIONS,
            soft_mark_percent=SOFT_MARK_PERCENT,
            slice_bytes=self.SLICE_BYTES,
        )

    # ---- policy

    def new_namespaces(self) -> dict[NamespaceId, NamespacePolicy]:
        self.uids += 1
        return {name: NamespacePolicy(f"u{self.uids}", size, (1,)) for name, size in NAMESPACES.items()}

    def push(self) -> None:
        """Apply the model's policy to the core, and remember a partition for everything that it opens."""
        self.version += 1
        self.look_ahead()
        policy = self.model.policy(self.version)
        visible = self.readable()
        self.core.apply_policy(policy, self.now_ns)
        self.model.apply_policy()
        self.follow(visible)
        for tenant, rules in self.model.tenants.items():
            for name, namespace in rules.namespaces.items():
                for epoch in namespace.epochs if not rules.suspended else ():
                    partition = open_partition(
                        policy, claims_tenant=tenant, claims_namespace=name, requested_namespace=name, epoch=epoch
                    )
                    if partition not in self.partitions:
                        self.partitions.append(partition)

    @rule(tenant=st.sampled_from(TENANTS), reserved=reservations, limit=limits, weight=weights)
    def change_quota(self, tenant: TenantId, reserved: int, limit: int, weight: int) -> None:
        rules = self.model.tenants.get(tenant)
        if rules is None:
            return
        before, rules.quota = rules.quota, TierQuota(min(reserved, limit) * G, limit * G, weight)
        if sum(other.quota.reserved_bytes for other in self.model.tenants.values()) > CAPACITY:
            try:
                self.core.apply_policy(self.model.policy(self.version + 1), self.now_ns)
            except FailedPreconditionError:
                rules.quota = before
                return
            raise AssertionError("I5: reservations above the capacity were accepted")
        self.push()

    @rule(tenant=st.sampled_from(TENANTS), change=st.sampled_from(["rotate", "suspend", "replace", "delete"]))
    def change_tenant(self, tenant: TenantId, change: str) -> None:
        """One rule for all that empties a tenant, or the cache would seldom fill."""
        rules = self.model.tenants.get(tenant)
        if rules is None:
            self.model.tenants[tenant] = ModelTenant(TierQuota(0, 9 * G), namespaces=self.new_namespaces())
        elif rules.suspended or change == "suspend":
            rules.suspended ^= True
        elif change == "rotate":
            # The new epoch is written from now on; the one before stays readable, older ones are gone (I12).
            for name, namespace in rules.namespaces.items():
                newest = namespace.epochs[-1]
                rules.namespaces[name] = NamespacePolicy(namespace.uid, namespace.block_bytes, (newest, newest + 1))
        elif change == "replace":
            rules.namespaces = self.new_namespaces()
        else:
            del self.model.tenants[tenant]
        self.push()

    # ---- put

    @rule(where=anything, key=keys, size_bytes=st.sampled_from(SIZES))
    def put_start(self, where: int, key: BlockKey, size_bytes: int) -> None:
        self.start(self.partition(where), key, size_bytes)

    @rule(where=anything, batch=st.lists(st.tuples(keys, st.sampled_from(SIZES)), min_size=1, max_size=6))
    def put_batch(self, where: int, batch: list[tuple[BlockKey, int]]) -> None:
        """As the traffic does: entries in one go, into a partition that is open."""
        choices = [p for p in self.partitions if self.model.is_open(p) and self.is_newest(p)]
        for key, size_bytes in batch if choices else ():
            if self.start(choices[where % len(choices)], key, size_bytes):
                self.finish(len(self.tickets) - 1)

    @precondition(lambda self: len(self.pins) < 12)
    @rule(tenant=st.sampled_from(TENANTS), spare=st.integers(0, 2))
    def read_all_but_the_coldest(self, tenant: TenantId, spare: int) -> None:
        """A slow reader of nearly everything: what can be evicted is then scarce."""
        self.look_ahead()
        for entry in self.model.coldest_first(tenant)[spare:]:
            self.read(entry.partition, [entry.key])

    def start(self, partition: Partition, key: BlockKey, size_bytes: int) -> bool:
        model = self.model
        visible = self.readable()
        self.look_ahead()
        outcome = self.core.put_start(partition, key, size_bytes, self.tick())
        expected = self.expected_refusal(partition, key, size_bytes)
        tenant = partition.tenant
        self.follow()
        if isinstance(outcome, PutTicket):
            assert expected is None, expected
            entry = ModelEntry(partition, key, size_bytes, outcome.offset)
            lost = [e for e in visible if not self.sees(e)]
            model.judge_losses(tenant, entry.extent_bytes, lost)
            assert not {g for e in model.live for g in e.granules} & set(entry.granules), "I7: memory in use was given"
            model.write(entry)
            self.tickets.append((outcome, entry))
            return True
        reason = outcome.error.reason
        if expected is None:
            model.judge_refusal(tenant, -(-size_bytes // G) * G, reason)
        else:
            assert reason == expected
        if reason != "ALREADY_EXISTS" and tenant in model.counters:
            model.counters[tenant].refused(reason)
        if any(not self.sees(entry) for entry in visible):
            model.unlawful.append("I6: a refused put evicted something")
        return False

    def expected_refusal(self, partition: Partition, key: BlockKey, size_bytes: int) -> str | None:
        """What refuses a put whatever is evicted; None if it depends on that."""
        model = self.model
        if not model.exists(partition):
            rules = model.tenants.get(partition.tenant)
            namespace = rules.namespaces.get(partition.namespace) if rules else None
            if rules is None or namespace is None or namespace.uid != partition.namespace_uid:
                return "NAMESPACE_NOT_AVAILABLE"
            return "TENANT_SUSPENDED" if rules.suspended else "EPOCH_NOT_AVAILABLE"
        if not model.is_open(partition):
            return "TENANT_SUSPENDED"
        if model.find(partition, key):
            return "ALREADY_EXISTS"
        if model.find(partition, key, "writing"):
            return "WRITE_IN_PROGRESS"
        if not self.is_newest(partition):
            return "EPOCH_NOT_AVAILABLE"
        extent_bytes = -(-size_bytes // G) * G
        limit_bytes = min(model.quota(partition.tenant).limit_bytes, CAPACITY)
        if size_bytes > model.namespace_of(partition).block_bytes or extent_bytes > limit_bytes:
            return "ENTRY_TOO_LARGE"
        return None

    @precondition(lambda self: self.tickets)
    @rule(which=anything)
    def put_commit(self, which: int) -> None:
        self.finish(which % len(self.tickets))

    def finish(self, position: int) -> None:
        model = self.model
        ticket, entry = self.tickets.pop(position)
        tenant = entry.tenant
        is_open = entry.state == "writing" and model.is_open(entry.partition)
        fits = model.used(tenant) <= model.quota(tenant).limit_bytes
        refused = self.core.put_commit(ticket, ticket.offset + 1, self.tick())
        assert (refused is None) == (is_open and fits)
        if refused is None:
            entry.state = "readable"
            model.use(entry)
            model.counters[tenant].puts_stored += 1
            model.counters[tenant].put_bytes += entry.size_bytes
            assert self.sees(entry), "I6: acknowledged and not readable"
        else:
            model.counters[tenant].refused(refused.error.reason)
            model.live.remove(entry)
            model.forget()

    @precondition(lambda self: self.tickets)
    @rule(which=anything)
    def put_abort(self, which: int) -> None:
        ticket, entry = self.tickets.pop(which % len(self.tickets))
        self.core.put_abort(ticket)
        self.model.live.remove(entry)
        self.model.forget()

    # ---- get

    @rule(where=anything, batch=batches)
    def get_start(self, where: int, batch: list[BlockKey]) -> None:
        self.read(self.partition(where), batch)

    def read(self, partition: Partition, wanted: list[BlockKey]) -> None:
        entries = self.model.serve(partition, wanted)
        pins = self.core.get_start(partition, wanted, self.tick())
        assert [pin is not None for pin in pins] == [entry is not None for entry in entries]
        for pin, entry in list(zip(pins, entries, strict=True))[::-1]:
            if pin is not None and entry is not None:
                assert (pin.offset, pin.size_bytes) == (entry.offset, entry.size_bytes)
                assert pin.checksum == entry.offset + 1
                entry.pins += 1
                self.model.use(entry)
                self.pins.append(HeldPin(pin, entry))
        if self.model.is_open(partition):
            counters = self.model.counters[partition.tenant]
            hits = [entry for entry in entries if entry is not None]
            counters.get_hits += len(hits)
            counters.get_misses += len(entries) - len(hits)
            counters.get_bytes += sum(entry.size_bytes for entry in hits)

    @precondition(lambda self: self.pins)
    @rule(which=anything, count=st.integers(1, 6))
    def get_end(self, which: int, count: int) -> None:
        start = which % len(self.pins)
        ended, self.pins[start : start + count] = self.pins[start : start + count], []
        self.look_ahead()
        self.core.get_end([held.pin for held in ended])
        for held in ended:
            self.model.unpin(held.entry)

    @rule(where=anything, batch=batches)
    def touch(self, where: int, batch: list[BlockKey]) -> None:
        partition = self.partition(where)
        self.core.touch(partition, batch, self.tick())
        for key in reversed(batch):
            entry = self.model.find(partition, key)
            if entry is not None:
                self.model.use(entry)

    # ---- in the background

    @precondition(lambda self: self.core.has_arrears)
    @rule(budget=st.integers(1, 6))
    def work_off(self, budget: int) -> None:
        self.look_ahead()
        visible, live = self.readable(), len(self.model.live)
        self.core.work_off(self.tick(), budget * G)
        self.follow(visible)
        assert live - len(self.model.live) <= budget

    @precondition(lambda self: not self.core.has_arrears)
    @rule(budget=st.integers(0, 6))
    def trim(self, budget: int) -> None:
        self.look_ahead()
        visible = self.readable()
        evicted_bytes = self.core.trim(self.tick(), budget * G)
        lost = [entry for entry in visible if not self.sees(entry)]
        assert evicted_bytes == sum(entry.extent_bytes for entry in lost)
        assert evicted_bytes <= budget * G or len(lost) == 1
        self.model.judge_trim(lost, SOFT_MARK_PERCENT, is_complete=evicted_bytes == 0 < budget)

    # ---- removal

    @rule(where=anything, batch=batches)
    def delete(self, where: int, batch: list[BlockKey]) -> None:
        partition = self.partition(where)
        entries = {entry for key in batch if (entry := self.model.find(partition, key))}
        assert self.core.delete(partition, batch) == len(entries)
        for entry in entries:
            self.model.remove(entry)

    @rule(where=anything, key=keys)
    def drop(self, where: int, key: BlockKey) -> None:
        partition = self.partition(where)
        entry = self.model.find(partition, key)
        assert self.core.drop(partition, key) == (entry is not None)
        if entry is not None:
            self.model.remove(entry)

    # ---- helpers

    def follow(self, visible: list[ModelEntry] | None = None) -> None:
        """Tell the model how far the core is with what policies left to do; ``visible`` were readable before."""
        pool = self.core._pool
        purged = {(index.partition, key) for index in pool.purged for key in index.entries}
        lagging = [owner.tenant for owner in pool.above_limit]
        if not self.model.is_lazy:
            assert not purged and not lagging, "a small slice of work was left to do"
            return
        self.model.follow(purged, lagging)
        self.model.judge_shrink([e for e in visible or () if e.state == "readable" and not self.sees(e)])
        self.model.forget()

    def look_ahead(self) -> None:
        """Before a command that may evict: tell the model what it cannot predict."""
        owners = self.core._pool.tenants
        orders = {tenant: [(e.index.partition, e.key) for e in owner.order] for tenant, owner in owners.items()}
        is_strict = self.RESERVATIONS is Reservations.STRICT
        self.model.take_over(
            None if self.EVICTION is Eviction.LRU else orders,
            {} if is_strict else {tenant: owner.budget.protected_bytes for tenant, owner in owners.items()},
        )

    def tick(self) -> int:
        self.now_ns += 1_000
        return self.now_ns

    def partition(self, where: int) -> Partition:
        """Any partition that was ever open: sessions outlive policies. Recent ones are drawn more often."""
        recent = self.partitions[-12:] if where % 4 else self.partitions
        return recent[where % len(recent)]

    def is_newest(self, partition: Partition) -> bool:
        return partition.epoch == self.model.namespace_of(partition).epochs[-1]

    def readable(self) -> list[ModelEntry]:
        return [entry for entry in self.model.live if entry.state == "readable"]

    def sees(self, entry: ModelEntry) -> bool:
        """Whether the core still has a readable entry, in a suspended tenant's partition too."""
        index = self.core._pool.tenants[entry.tenant].partitions.get(entry.partition)
        return index is not None and entry.key in index.entries

    # ---- invariants

    @invariant()
    def i2_each_partition_shows_its_own_keys_and_no_others(self) -> None:
        for partition in self.partitions:
            expected = [self.model.find(partition, key) is not None for key in KEYS]
            prefix, found = self.core.lookup(partition, KEYS)
            assert list(found) == expected
            assert prefix == (expected.index(False) if False in expected else len(expected))

    @invariant()
    def i4_nothing_grows_past_a_limit(self) -> None:
        """Only a lowered limit leaves use above it; then nothing is left to evict, and use only falls."""
        for tenant in TENANTS:
            used_bytes, limit_bytes = self.model.used(tenant), self.model.quota(tenant).limit_bytes
            if used_bytes <= limit_bytes:
                self.was_above.pop(tenant, None)
                continue
            assert self.model.evictable(tenant) == 0 or self.model.may_lag(tenant)
            if tenant in self.was_above:
                assert used_bytes <= self.was_above[tenant]
            self.was_above[tenant] = used_bytes

    @invariant()
    def i5_i6_every_eviction_and_every_refusal_was_lawful(self) -> None:
        assert self.model.unlawful == []

    @invariant()
    def i6_every_acknowledged_entry_is_there_until_something_lawful_removes_it(self) -> None:
        assert all(self.sees(entry) for entry in self.readable())
        total = sum(usage.entries for usage in self.core.usage().tenants.values())
        assert total == len(self.readable())

    @invariant()
    def i7_what_is_being_written_is_invisible(self) -> None:
        for _, entry in self.tickets:
            index = self.core._pool.open.get(entry.partition)
            assert index is None or index.entries.get(entry.key) is None

    @invariant()
    def i7_memory_that_is_read_or_written_is_nobody_elses(self) -> None:
        for entry in self.model.live:
            assert all(self.model.arena[granule] is entry for granule in entry.granules)

    @invariant()
    def i8_books_equal_the_sum_of_what_is_there(self) -> None:
        usages = self.core.usage().tenants
        for tenant, usage in usages.items():
            entries = self.model.of(tenant)
            assert usage.used_bytes == sum(e.extent_bytes for e in entries)
            assert usage.in_flight_bytes == sum(e.size_bytes for e in entries if e.is_being_written)
            assert usage.resident_bytes == sum(e.size_bytes for e in entries if not e.is_being_written)
            assert usage.slack_bytes == usage.used_bytes - usage.resident_bytes - usage.in_flight_bytes
            assert usage.held_bytes == sum(e.extent_bytes for e in entries if not e.is_evictable)

    @invariant()
    def i8_who_has_books_is_in_the_policy_or_holds_bytes(self) -> None:
        expected = set(self.model.tenants) | {entry.tenant for entry in self.model.live}
        assert set(self.core.usage().tenants) == expected

    @invariant()
    def i8_free_and_used_bytes_add_up_to_the_capacity(self) -> None:
        usage = self.core.usage()
        assert usage.free_bytes + sum(t.used_bytes for t in usage.tenants.values()) == CAPACITY
        assert usage.largest_free_bytes == self.model.longest_gap(self.model.live)

    @invariant()
    def extents_are_disjoint_and_inside_the_arena(self) -> None:
        granules = [granule for entry in self.model.live for granule in entry.granules]
        assert len(granules) == len(set(granules))
        assert all(0 <= granule < CAPACITY // G for granule in granules)

    @invariant()
    def each_tenants_lru_order_is_by_last_use(self) -> None:
        for tenant, owner in self.core._pool.tenants.items() if self.EVICTION is Eviction.LRU else ():
            gone = self.core._pool.purged
            order = [(entry.index.partition, entry.key) for entry in owner.order if entry.index not in gone]
            assert order == [(entry.partition, entry.key) for entry in self.model.coldest_first(tenant)]

    @invariant()
    def i12_a_closed_partition_has_no_entry(self) -> None:
        for partition in self.partitions:
            assert (self.core.check_access(partition) is None) == self.model.is_open(partition)
            owner = self.core._pool.tenants.get(partition.tenant)
            if not self.model.exists(partition) and owner is not None:
                assert partition not in owner.partitions

    @invariant()
    def counters_tell_what_happened(self) -> None:
        usages = self.core.usage().tenants
        assert {tenant: usage.counters for tenant, usage in usages.items()} == self.model.counters

    @invariant()
    def the_core_finds_itself_consistent(self) -> None:
        self.core.check_invariants()

    def teardown(self) -> None:
        """When every transfer has ended, nothing is held; when every tenant is gone, the arena is one free extent."""
        for ticket, entry in self.tickets:
            self.core.put_abort(ticket)
            self.model.live.remove(entry)
        self.core.get_end([held.pin for held in self.pins])
        self.settle()
        for usage in self.core.usage().tenants.values():
            assert usage.held_bytes == usage.in_flight_bytes == 0 and usage.used_bytes <= usage.limit_bytes
        self.model.tenants.clear()
        self.core.apply_policy(self.model.policy(self.version + 1), self.now_ns)
        self.settle()
        node = self.core.usage()
        assert node.largest_free_bytes == node.free_bytes == CAPACITY and not node.tenants

    def settle(self) -> None:
        while self.core.has_arrears:
            self.core.work_off(self.tick(), G)
            self.core.check_invariants()


class LazyMachine(CacheMachine):
    SLICE_BYTES = 0


class LazyDefaultOrderMachine(LazyMachine):
    EVICTION = DEFAULT_EVICTION


class DefaultOrderMachine(CacheMachine):
    EVICTION = DEFAULT_EVICTION


class EarningMachine(CacheMachine):
    EVICTION = DEFAULT_EVICTION
    RESERVATIONS = Reservations.EARNING


TestCacheAgainstModel = CacheMachine.TestCase
TestCacheAgainstModel.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestLazyAgainstModel = LazyMachine.TestCase
TestLazyAgainstModel.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestLazyDefaultOrderAgainstModel = LazyDefaultOrderMachine.TestCase
TestLazyDefaultOrderAgainstModel.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestDefaultOrderAgainstModel = DefaultOrderMachine.TestCase
TestDefaultOrderAgainstModel.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestEarningAgainstModel = EarningMachine.TestCase
TestEarningAgainstModel.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
