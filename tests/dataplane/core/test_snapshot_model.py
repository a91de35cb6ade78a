"""Random commands with restarts between them: after each, a new core holds what the model says, in the same order."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.reservations import Reservations
from dataplane.core.snapshot import ArenaIdentity, decode_snapshot
from dataplane.core.usage import TenantCounters
from tests.dataplane.core.test_cache_model import CAPACITY, CacheMachine

ARENA = ArenaIdentity("node-1", "boot", "generation", 7, CAPACITY)


class RestartMachine(CacheMachine):
    """The machine of test_cache_model, whose core is now and then replaced by its successor."""

    @rule(idle_ns=st.integers(0, 10**12))
    def restart(self, idle_ns: int) -> None:
        """Transfers in progress do not end: what they held is left out."""
        before = self.core._pool.tenants
        data = b"".join(self.core.snapshot(ARENA))
        orders = {
            tenant: [(e.index.partition, e.key, e.is_proven) for e in owner.order if not e.pins]
            for tenant, owner in before.items()
        }
        counts = {tenant: owner.order.counts for tenant, owner in before.items() if orders[tenant]}

        self.core = self.new_core()
        self.now_ns = idle_ns  # another boot's clock, perhaps
        self.core.apply_policy(self.model.policy(self.version), self.now_ns)
        adopted = self.core.adopt(decode_snapshot(data), lambda offset, _: offset + 1, self.tick())
        self.core.check_invariants()
        self.tickets.clear()
        self.pins.clear()
        self.was_above.clear()
        self.model.live = [entry for entry in self.model.live if entry.state == "readable" and not entry.pins]
        self.model.counters = {tenant: TenantCounters() for tenant in self.model.tenants}

        assert (adopted.entries, adopted.purged_entries, adopted.evicted_entries) == (len(self.model.live), 0, 0)
        after = self.core._pool.tenants
        assert {
            tenant: [(e.index.partition, e.key, e.is_proven) for e in owner.order]
            for tenant, owner in after.items()
            if owner.budget.used_bytes
        } == {tenant: order for tenant, order in orders.items() if order}
        assert all(after[tenant].order.counts == one for tenant, one in counts.items())
        if len(orders) == len(after):  # else the order of tenants in the file may differ
            again = decode_snapshot(b"".join(self.core.snapshot(ARENA)))
            ages = [age for tenant in again.tenants for block in tenant.blocks() for age in block.ages_ns]
            old = decode_snapshot(data)
            assert ages == [age for tenant in old.tenants for block in tenant.blocks() for age in block.ages_ns]


class RestartWithDefaultOrder(RestartMachine):
    EVICTION: ClassVar = DEFAULT_EVICTION


class RestartWithFifo(RestartMachine):
    EVICTION: ClassVar = Eviction.FIFO


class RestartWithEarning(RestartMachine):
    EVICTION: ClassVar = DEFAULT_EVICTION
    RESERVATIONS: ClassVar = Reservations.EARNING


SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None)
RestartMachine.TestCase.settings = SETTINGS
RestartWithDefaultOrder.TestCase.settings = SETTINGS
RestartWithFifo.TestCase.settings = SETTINGS
RestartWithEarning.TestCase.settings = SETTINGS
TestRestartWithLru = RestartMachine.TestCase
TestRestartWithDefaultOrder = RestartWithDefaultOrder.TestCase
TestRestartWithFifo = RestartWithFifo.TestCase
TestRestartWithEarning = RestartWithEarning.TestCase
