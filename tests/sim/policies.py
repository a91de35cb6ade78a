"""Commands that change the policy while traffic is under way, and policies that must be refused."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from dataplane.core.extents import GRANULE_BYTES
from saltern.errors import FailedPreconditionError
from saltern.names import NamespaceId, TenantId
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy
from tenants.quota import TierQuota
from tests.support.cache_model import ModelTenant

if TYPE_CHECKING:
    from dataplane.core.cache import CacheCore
    from tests.sim.model import SimEntry, SimModel
    from tests.sim.sessions import Session
    from tests.sim.shape import Shape

EPOCHS_MAX = 3
#: The one sharing group, and the name of the namespaces that may be members.
GROUP, SHARED = "group", NamespaceId("large")


class PolicyCommands:
    """Each command changes the model's policy, pushes it to the core and says what the core must answer."""

    rng: Random
    shape: Shape
    core: CacheCore
    model: SimModel
    names: list[TenantId]
    sessions: list[Session]
    version: int
    uids: int
    now_ns: int
    done: Counter[str]
    #: Members of the group, each with the uid of its namespace.
    members: dict[TenantId, str]
    group_epoch: int
    #: Whom members name without its word, or (False) who names them without theirs.
    one_sided: tuple[TenantId, bool] | None

    @abstractmethod
    def follow(self, visible: Collection[SimEntry] = ()) -> None:
        """Tell the model how far the core is with what policies left to do; ``visible`` could be read before."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Add a line to the transcript."""

    # ---- pushing

    def first_policy(self) -> None:
        for tenant in self.names:
            self.model.tenants[tenant] = rules = ModelTenant(
                self._draw_quota(tenant), namespaces=self._new_namespaces()
            )
            if self.rng.random() < 0.5:
                self.members[tenant] = rules.namespaces[SHARED].uid
        self.push()

    def push(self) -> None:
        """Apply the model's policy to core and model; the core must answer what that cost (I12, I4)."""
        model = self.model
        self._name_the_group()
        self.version += 1
        purged = sum(not model.exists(entry.partition) for entry in model.readable())
        evictions_before = {tenant: counters.evictions for tenant, counters in model.counters.items()}
        visible = model.readable()
        applied = self.core.apply_policy(model.policy(self.version), self.now_ns)
        model.apply_policy()
        self.follow(visible)
        evicted = sum(
            counters.evictions - evictions_before.get(tenant, 0)
            for tenant, counters in model.counters.items()
            if tenant in model.tenants
        )
        assert applied.purged_entries == purged, f"I12: {applied.purged_entries} entries purged instead of {purged}"
        assert applied.evicted_entries == evicted, f"I4: {applied.evicted_entries} evicted instead of {evicted}"
        self.say(f"  policy {self.version} in force: {purged} entries purged, {evicted} evicted")

    # ---- commands

    def change_quota(self) -> bool:
        tenant, rules = self._any_tenant()
        if rules is None:
            return False
        rules.quota = quota = self._draw_quota(tenant)
        self.say(
            f"quota of {tenant}: reserved {quota.reserved_bytes}, limit {quota.limit_bytes}, weight {quota.weight}"
        )
        self.push()
        return True

    def rotate_epoch(self) -> bool:
        tenant, rules = self._any_tenant()
        if rules is None:
            return False
        for name, space in rules.namespaces.items():
            epochs = (*space.epochs, space.epochs[-1] + 1)[-EPOCHS_MAX:]
            rules.namespaces[name] = replace(space, epochs=epochs)
        self.say(f"rotate the salt of {tenant}")
        self.push()
        return True

    def retire_epoch(self) -> bool:
        """The grace period of every older epoch ends (I12)."""
        tenant, rules = self._any_tenant()
        if rules is None or not any(len(space.epochs) > 1 for space in rules.namespaces.values()):
            return False
        for name, space in rules.namespaces.items():
            rules.namespaces[name] = replace(space, epochs=space.epochs[-1:])
        self.say(f"retire the older epochs of {tenant}")
        self.push()
        return True

    def suspend_or_resume(self) -> bool:
        tenant, rules = self._any_tenant()
        if rules is None or (not rules.suspended and self.rng.random() < 0.6):
            return False
        rules.suspended ^= True
        self.say(f"{'suspend' if rules.suspended else 'resume'} {tenant}")
        self.push()
        return True

    def recreate_namespace(self) -> bool:
        """Delete a namespace, and perhaps make another of the same name in the same breath (I12)."""
        tenant, rules = self._any_tenant()
        if rules is None:
            return False
        name = NamespaceId(self.rng.choice(list(self.shape.block_bytes)))
        if self.rng.random() < 0.3 and name in rules.namespaces:
            del rules.namespaces[name]
            self.say(f"delete {tenant}/{name}")
        else:
            rules.namespaces[name] = self._new_namespaces()[name]
            self.say(f"delete and create {tenant}/{name}")
        self.push()
        return True

    def delete_or_create_tenant(self) -> bool:
        tenant, rules = self._any_tenant()
        if rules is None:
            self.model.tenants[tenant] = ModelTenant(self._draw_quota(tenant), namespaces=self._new_namespaces())
            self.say(f"create {tenant}")
        elif self.rng.random() < 0.6:
            return False
        else:
            del self.model.tenants[tenant]
            self.say(f"delete {tenant}")
        self.push()
        return True

    def bad_policy(self) -> bool:
        """A policy that must be refused and change nothing: from the past, or promising more than there is (I5)."""
        tenant, rules = self._any_tenant()
        if rules is None:
            return False
        if self.rng.random() < 0.5:
            policy, expected = self.model.policy(self.version - 1), "POLICY_STALE"
        else:
            kept, capacity_bytes = rules.quota, self.shape.capacity_bytes
            others_bytes = self._reserved_by_others(tenant)
            reserved_bytes = capacity_bytes - others_bytes + GRANULE_BYTES
            rules.quota = TierQuota(reserved_bytes, capacity_bytes + GRANULE_BYTES)
            policy, expected = self.model.policy(self.version + 1), "RESERVATIONS_ABOVE_CAPACITY"
            rules.quota = kept
        try:
            self.core.apply_policy(policy, self.now_ns)
        except FailedPreconditionError as error:
            assert error.reason == expected
        else:
            raise AssertionError(f"I5: a policy was accepted that is {expected}")
        self.say(f"push a bad policy: {expected}")
        return True

    # ---- the sharing group, of namespaces of one name and so of one block size

    def join_or_leave(self) -> bool:
        """A tenant joins the group; or a member leaves, and the salt with it: what was shared is nobody's (I2, I12)."""
        tenant, rules = self._any_tenant()
        if rules is None or SHARED not in rules.namespaces:
            return False
        if tenant in self.members:
            if self.rng.random() < 0.8:
                return False
            del self.members[tenant]
            self.group_epoch += 1
            self.done["left the group"] += 1
            self.say(f"{tenant} leaves the group, whose epoch is {self.group_epoch} now")
        else:
            self.members[tenant] = rules.namespaces[SHARED].uid
            self.say(f"{tenant} joins the group at epoch {self.group_epoch}")
        self.push()
        return True

    def name_one_side(self) -> bool:
        """A policy in which only one side names the other: nothing is shared by it (I2)."""
        tenant, rules = self._any_tenant()
        if rules is None or tenant in self.members or SHARED not in rules.namespaces:
            return False
        self.one_sided = None if self.one_sided else (tenant, self.rng.random() < 0.5)
        self.say(f"named by one side: {self.one_sided}")
        self.push()
        return True

    def _name_the_group(self) -> None:
        """Write the group into the model's policy. A member whose namespace is gone has left."""
        spaces = {tenant: rules.namespaces.get(SHARED) for tenant, rules in self.model.tenants.items()}
        uids = {tenant: space.uid for tenant, space in spaces.items() if space is not None}
        gone = [tenant for tenant, uid in self.members.items() if uids.get(tenant) != uid]
        for tenant in gone:
            del self.members[tenant]
        self.group_epoch += bool(gone)
        guest, is_named = self.one_sided or (None, False)
        named = dict(self.members)
        if guest is not None and guest in uids and is_named:
            named[guest] = uids[guest]
        for tenant, space in spaces.items():
            if space is None:
                continue
            sees = named if tenant in self.members else self.members
            is_inside = tenant in self.members or (tenant == guest and not is_named)
            peers = tuple(GroupPeer(peer, SHARED, uid) for peer, uid in sees.items() if peer != tenant)
            groups = {GROUP: GroupPolicy((self.group_epoch,), peers)} if is_inside else {}
            self.model.tenants[tenant].namespaces[SHARED] = replace(space, groups=groups)

    # ---- helpers

    def _any_tenant(self) -> tuple[TenantId, ModelTenant | None]:
        """Any tenant, more often one that has a transfer under way."""
        busy = [session.partition.tenant for session in self.sessions if session.busy is not None]
        tenant = self.rng.choice(busy if busy and self.rng.random() < 0.5 else self.names)
        return tenant, self.model.tenants.get(tenant)

    def _new_namespaces(self) -> dict[NamespaceId, NamespacePolicy]:
        self.uids += 1
        return {
            NamespaceId(name): NamespacePolicy(f"u{self.uids}", size, (1,))
            for name, size in self.shape.block_bytes.items()
        }

    def _reserved_by_others(self, tenant: TenantId) -> int:
        return sum(rules.quota.reserved_bytes for other, rules in self.model.tenants.items() if other != tenant)

    def _draw_quota(self, tenant: TenantId) -> TierQuota:
        """Any quota whose reservation the arena can still promise; not always in whole granules."""
        rng, capacity_bytes = self.rng, self.shape.capacity_bytes
        limit_bytes = rng.choice([0, 0.1, 0.3, 0.4, 0.5, 0.5, 0.6, 0.75, 1, 1, 1.5]) * capacity_bytes
        spare_bytes = capacity_bytes - self._reserved_by_others(tenant)
        reserved_bytes = min(limit_bytes, spare_bytes, rng.choice([0, 0.1, 0.25, 0.4]) * capacity_bytes)
        return TierQuota(int(reserved_bytes), int(limit_bytes), rng.choice([1, 50, 100, 100, 100, 1000]))
