"""Random walks of tenants that share, stop, lag, are suspended and deleted, against a model of who may read whom (I2).

The rules of each tenant arrive one tenant at a time, so that most of the time one side has heard and the other has not.
What a session sees must at every moment be what is in its own partition and in those of peers that both sides' rules
name, while the lease holds; nothing else of the core is modelled here (``tests/sim`` does), but its books are checked
after each step (I4, I7, I8). Faults planted on purpose must be found.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from dataplane.core import admission
from dataplane.core.cache import CacheCore
from dataplane.core.entry import Pin, PutRefused, PutTicket
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.lease import Lease
from dataplane.core.loans import LENT_PARTS, Loans
from dataplane.core.partition import Partition
from dataplane.core.policy_in_force import PolicyInForce
from saltern.errors import PermissionDeniedError
from saltern.names import NamespaceId, TenantId
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tests.support.cache_node import key_of

NS = NamespaceId("ns")
NAMES = [TenantId(name) for name in "abc"]
GROUPS = ("g", "h")
KEYS = 12
STEPS = 500
SEEDS = range(12)


class Rules:
    """What a node has been told of one tenant: a copy of the truth at that moment."""

    def __init__(self, uid: str, *, suspended: bool, groups: dict[str, tuple[int, tuple[TenantId, ...]]]) -> None:
        self.uid = uid
        self.suspended = suspended
        self.groups = groups


class Walk:
    """One core and what is true of its tenants."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now_ns, self.version, self.uids, self.sums = 1, 0, 0, 0
        self.core = CacheCore(60 * GRANULE_BYTES)
        self.members: dict[str, list[TenantId]] = {group: [] for group in GROUPS}
        self.epochs = dict.fromkeys(GROUPS, 1)
        self.suspended: set[TenantId] = set()
        self.uid_of: dict[TenantId, str] = {}
        self.told: dict[TenantId, Rules] = {}
        self.lease_until_ns = 2**62
        self.held: list[list[Pin | None]] = []
        self.tickets: list[tuple[PutTicket, int]] = []
        self.shared_hits = 0
        for tenant in NAMES:
            self.uid_of[tenant] = self._new_uid(tenant)
            self.tell(tenant)

    def _new_uid(self, tenant: TenantId) -> str:
        self.uids += 1
        return f"{tenant}-{self.uids}"

    # ---- what is true, and what the node is told of it

    def tell(self, tenant: TenantId) -> None:
        """The node hears how things are with one tenant; of the others it goes by what it heard before."""
        if tenant not in self.uid_of:
            self.told.pop(tenant, None)
        else:
            groups = {
                group: (self.epochs[group], tuple(one for one in members if one != tenant))
                for group, members in self.members.items()
                if tenant in members
            }
            self.told[tenant] = Rules(self.uid_of[tenant], suspended=tenant in self.suspended, groups=groups)
        self.version += 1
        self.core.apply_policy(self.policy(), self.tick())

    def policy(self) -> NodePolicy:
        return NodePolicy(self.version, {tenant: self._encode(rules) for tenant, rules in self.told.items()})

    def _encode(self, rules: Rules) -> TenantPolicy:
        groups = {
            group: GroupPolicy((epoch,), tuple(GroupPeer(one, NS, self.uid_of.get(one, "gone")) for one in peers))
            for group, (epoch, peers) in rules.groups.items()
        }
        state = TenantState.SUSPENDED if rules.suspended else TenantState.ACTIVE
        quota = TierQuota(4 * GRANULE_BYTES, 16 * GRANULE_BYTES)
        space = NamespacePolicy(rules.uid, 8 * GRANULE_BYTES, (1,), groups=groups)
        return TenantPolicy(state, {Tier.DRAM: quota}, {NS: space})

    def readable(self, tenant: TenantId, group: str) -> list[TenantId]:
        """Whose entries a session of ``group`` may read: its own, and of peers that name each other at one epoch."""
        mine = self.told[tenant].groups[group]
        found = [tenant]
        for peer in mine[1] if self.now_ns + 1 < self.lease_until_ns else ():
            its = self.told.get(peer)
            if its is None or its.suspended or its.uid != self.uid_of.get(peer) or group not in its.groups:
                continue
            is_mutual = its.groups[group][0] == mine[0] and tenant in its.groups[group][1]
            if is_mutual and self.told[tenant].uid == self.uid_of.get(tenant):
                found.append(peer)
        return found

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    # ---- steps

    def step(self) -> None:
        often = [self.put] * 6 + [self.finish_put] * 6 + [self.get] * 6 + [self.end_get] * 4 + [self.catch_up] * 4
        steps = [*often, self.delete, self.join, self.join, self.leave, self.suspend, self.replace, self.lease]
        self.rng.choice(steps)()
        self.check()

    def _session(self) -> tuple[TenantId, str, Partition] | None:
        """Any session that the node lets in."""
        tenant, group = self.rng.choice(NAMES), self.rng.choice(GROUPS)
        rules = self.told.get(tenant)
        epoch = rules.groups[group][0] if rules and group in rules.groups else self.epochs[group]
        try:
            partition = admission.open_partition(
                self.core.policy,
                claims_tenant=tenant,
                claims_namespace=NS,
                requested_namespace=NS,
                epoch=epoch,
                group_uid=group,
            )
        except PermissionDeniedError:
            assert rules is None or rules.suspended or group not in rules.groups, "I10: refused for nothing"
            return None
        assert rules is not None and group in rules.groups and not rules.suspended, "I2: a stranger was let in"
        return tenant, group, partition

    def put(self) -> None:
        session = self._session()
        if session is not None:
            size_bytes = self.rng.randint(1, 3) * GRANULE_BYTES
            outcome = self.core.put_start(session[2], key_of(self.rng.randrange(KEYS)), size_bytes, self.tick())
            if isinstance(outcome, PutTicket):
                self.sums += 1
                self.tickets.append((outcome, self.sums))

    def finish_put(self) -> None:
        if self.tickets:
            ticket, checksum = self.tickets.pop(self.rng.randrange(len(self.tickets)))
            assert isinstance(self.core.put_commit(ticket, checksum, self.tick()), PutRefused | None)

    def get(self) -> None:
        session = self._session()
        if session is None or len(self.held) > 8:
            return
        tenant, group, partition = session
        keys = [key_of(number) for number in self.rng.sample(range(KEYS), 8)]
        allowed = self.readable(tenant, group)
        there = self._there(allowed, group, partition.epoch)
        pins = self.core.get_start(partition, keys, self.tick())
        for key, pin in zip(keys, pins, strict=True):
            assert pin is None or key in there, "I2: a key was served that nobody has put for this session"
            if pin is not None:
                owner = pin.entry.index.partition
                assert owner.tenant in allowed and owner.group_uid == group, "I2: a stranger's entry was served"
                assert pin.is_loan == (owner.tenant != tenant)
                self.shared_hits += pin.is_loan
        self.held.append(pins)

    def end_get(self) -> None:
        if self.held:
            self.core.get_end(self.held.pop(self.rng.randrange(len(self.held))))

    def delete(self) -> None:
        session = self._session()
        if session is not None and self.rng.random() < 0.4:
            tenant, group, partition = session
            others = {one: self._there([one], group, partition.epoch) for one in self.readable(tenant, group)[1:]}
            self.core.delete(partition, [key_of(number) for number in self.rng.sample(range(KEYS), 5)])
            assert others == {one: self._there([one], group, partition.epoch) for one in others}, "I6: a peer's is gone"

    def join(self) -> None:
        tenant, group = self.rng.choice(NAMES), self.rng.choice(GROUPS)
        if tenant in self.uid_of and tenant not in self.members[group]:
            self.members[group].append(tenant)
            self.tell(tenant)

    def leave(self) -> None:
        group = self.rng.choice(GROUPS)
        if self.members[group] and self.rng.random() < 0.4:
            tenant = self.rng.choice(self.members[group])
            self.members[group].remove(tenant)
            self.epochs[group] += 1
            self.tell(self.rng.choice([tenant, *self.members[group]]))

    def catch_up(self) -> None:
        self.tell(self.rng.choice(NAMES))

    def suspend(self) -> None:
        tenant = self.rng.choice(NAMES)
        if tenant in self.suspended or self.rng.random() < 0.3:
            self.suspended ^= {tenant}
            self.tell(tenant)

    def replace(self) -> None:
        """A tenant is deleted, or made anew under its old name; its groups go on without it."""
        if self.rng.random() < 0.2:
            tenant = self.rng.choice(NAMES)
            for group, members in self.members.items():
                if tenant in members:
                    members.remove(tenant)
                    self.epochs[group] += 1
            if self.uid_of.pop(tenant, None) is None or self.rng.random() < 0.6:
                self.uid_of[tenant] = self._new_uid(tenant)
            self.tell(tenant)

    def lease(self) -> None:
        """It runs out, or is renewed."""
        self.lease_until_ns = self.now_ns + self.rng.choice([0, 3, 40, 10**6, 10**6, 10**6])
        self.core.renew(Lease(self.lease_until_ns), self.tick())

    # ---- what must hold

    def _there(self, tenants: list[TenantId], group: str, epoch: int) -> set[bytes]:
        """Keys in the partitions of ``tenants``, as the core holds them."""
        found: set[bytes] = set()
        for tenant in tenants:
            owner, rules = self.core._pool.tenants.get(tenant), self.told.get(tenant)
            for partition, index in owner.partitions.items() if owner and rules else ():
                if (partition.namespace_uid, partition.group_uid, partition.epoch) == (rules.uid, group, epoch):
                    found |= set(index.entries)
        return found

    def check(self) -> None:
        self.core.check_invariants()
        pool = self.core._pool
        for owner in pool.tenants.values():
            if owner.in_policy and not self.core.is_frozen:
                lent_bytes = pool.loans.lent_bytes(owner)
                assert lent_bytes * LENT_PARTS <= owner.budget.limit_bytes, "I5: too much of a tenant is lent"
        for tenant, rules in self.told.items():
            for group, (epoch, _) in rules.groups.items() if not rules.suspended else ():
                partition = admission.open_partition(
                    self.core.policy,
                    claims_tenant=tenant,
                    claims_namespace=NS,
                    requested_namespace=NS,
                    epoch=epoch,
                    group_uid=group,
                )
                there = self._there(self.readable(tenant, group), group, epoch)
                _, found = self.core.lookup(partition, [key_of(n) for n in range(KEYS)], self.now_ns + 1)
                expected = bytes(key_of(n) in there for n in range(KEYS))
                assert found == expected, f"I2: {tenant} sees in {group} what it may not, or not all"

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        for pins in self.held:
            self.core.get_end(pins)
        for ticket, _ in self.tickets:
            self.core.put_abort(ticket)
        for tenant in NAMES:
            self.uid_of.pop(tenant, None)
            self.tell(tenant)
        self.core.work_off(self.tick(), 2**40)
        assert not self.core.usage().tenants, "I8: something is left of somebody"


@pytest.mark.parametrize("seed", SEEDS)
def test_i2_a_session_sees_its_own_and_its_peers_and_nothing_else(seed: int) -> None:
    walk = Walk(seed)
    walk.run()
    assert walk.shared_hits > 0, f"seed {seed} shared nothing"


def _ignore_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def peers(self: PolicyInForce, partition: Partition, now_ns: int) -> tuple[Partition, ...]:
        return admission.peer_partitions(self.policy, partition)

    monkeypatch.setattr(PolicyInForce, "peers", peers)


def _remember_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, known = PolicyInForce.peers, dict[Partition, tuple[Partition, ...]]()

    def peers(self: PolicyInForce, partition: Partition, now_ns: int) -> tuple[Partition, ...]:
        found = known.setdefault(partition, honest(self, partition, now_ns))
        return tuple(one for one in found if admission.check_partition(self.policy, one) is None)

    monkeypatch.setattr(PolicyInForce, "peers", peers)


def _believe_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def peers(self: PolicyInForce, partition: Partition, now_ns: int) -> tuple[Partition, ...]:
        if now_ns >= self.stops_ns or admission.check_partition(self.policy, partition) is not None:
            return ()
        group = self.policy.tenants[partition.tenant].namespaces[NS].groups.get(partition.group_uid)
        named = [] if group is None else group.peers
        wanted = [
            Partition(one.tenant, one.namespace, one.namespace_uid, partition.epoch, partition.group_uid)
            for one in named
        ]
        return tuple(one for one in wanted if admission.check_partition(self.policy, one) is None)

    monkeypatch.setattr(PolicyInForce, "peers", peers)


def _lend_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core.loans.LENT_PARTS", 1)


def _forget_to_end_a_loan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loans, "end", lambda self, entry: None)


def _delete_at_peers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CacheCore.delete

    def delete(self: CacheCore, partition: Partition, keys: list[bytes]) -> int:
        sources = self.sources(partition, 0)
        return sum(honest(self, source, keys) for source in sources)  # type: ignore[arg-type]

    monkeypatch.setattr(CacheCore, "delete", delete)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the lease is ignored": _ignore_the_lease,
    "peers are remembered over policies": _remember_peers,
    "one side's word is enough": _believe_one_side,
    "all of a tenant may be lent": _lend_without_end,
    "a loan never ends": _forget_to_end_a_loan,
    "a delete reaches the peers": _delete_at_peers_too,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[fault](monkeypatch)
    for seed in SEEDS:
        try:
            Walk(seed).run()
        except AssertionError:
            return
    raise AssertionError(f"{fault}: not found in {len(SEEDS)} walks")
