"""A node's process in the simulator: the real core, the real reckoning of its lease, and the line's protocol.

What ``dataplane.control_client`` does over gRPC is done here with messages of the world; times are the process's own
clock, which started anywhere and runs a little fast or slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.core.admission import open_partition
from dataplane.core.cache import CacheCore
from dataplane.core.entry import PutTicket
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.in_touch import InTouch
from dataplane.core.lease import Lease
from dataplane.core.partition import Partition
from saltern.errors import FailedPreconditionError
from saltern.keys import BlockKey
from saltern.names import NamespaceId, NodeId, TenantId
from tenants import policy_delta
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.policy_delta import PolicyDelta
from tenants.quota import Tier, TierQuota
from tests.sim_leases.control import LEASE_MS, Delta, Rules, Snapshot

POLICY_AGE_MAX_MS = 90_000
_NAMESPACE, _GROUP = NamespaceId("ns"), "group"
_MS_NS = 1_000_000


@dataclass(slots=True)
class Folder:
    """A state folder: it outlives processes.

    Attributes:
        kept: the policy on disk.
        in_touch_ms: its modification time.
    """

    state_id: str
    kept: Snapshot | None = None
    in_touch_ms: float = 0.0


@dataclass(slots=True, eq=False)
class Process:
    """One process of one node.

    Attributes:
        clock_offset_ms, clock_rate: its clock shows ``offset + rate * true time``.
        is_cut_off: nothing travels between it and the control plane.
        is_paused: it does nothing at all, and its clock runs on (SIGSTOP).
        residue: what it held when its lease ran out, by tenant, until it has settled a policy with a lease again.
        group_sessions: of the sharing group, of whichever epoch they were opened for.
        stream: number of the policy stream it listens to; messages of an earlier one are lost.
        stalled_stream: of a stream that brings nothing any more, without having ended.
    """

    node: NodeId
    folder: Folder
    capacity_bytes: int
    clock_offset_ms: float
    clock_rate: float
    core: CacheCore = field(init=False)
    touch: InTouch = field(init=False)
    epoch: int = 0
    lease: Lease = field(default_factory=lambda: Lease(expires_ns=0))
    acknowledged_version: int = 0
    is_alive: bool = True
    is_cut_off: bool = False
    is_paused: bool = False
    stream: int = 0
    stalled_stream: int = -1
    residue: dict[str, int] = field(default_factory=dict)
    tickets: list[PutTicket] = field(default_factory=list)
    group_sessions: dict[Partition, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = CacheCore(self.capacity_bytes)
        self.touch = InTouch(0.0)

    def clock_ms(self, true_ms: float) -> float:
        return self.clock_offset_ms + self.clock_rate * true_ms

    # ---- the line

    def start(self, true_ms: float) -> None:
        """Begin without a control plane: by what was kept, as long as it may be served."""
        self.touch = InTouch(self.clock_ms(true_ms))
        age_ms = self.clock_ms(true_ms) - self.folder.in_touch_ms
        if self.folder.kept is not None and 0 <= age_ms <= POLICY_AGE_MAX_MS:
            self.apply(self.folder.kept, true_ms)
            self.touch = InTouch(self.folder.in_touch_ms)
            self.acknowledged_version = self.folder.kept.version
            self.renew(self.folder.in_touch_ms, 0, true_ms)

    def registered(self, sent_ms: float, epoch: int, lease_version: int, true_ms: float) -> None:
        self.epoch = epoch
        self.renew(sent_ms, lease_version, true_ms)

    def renew(self, sent_ms: float, lease_version: int, true_ms: float) -> None:
        """The control plane has answered what was sent at ``sent_ms`` of this process's clock."""
        expires_ns = max(self.lease.expires_ns, int((sent_ms + LEASE_MS) * _MS_NS))
        self.lease = Lease(expires_ns, max(self.lease.version, lease_version))
        self.core.renew(self.lease, self.now_ns(true_ms))

    def answered(self, sent_ms: float, lease_version: int, newest_version: int, true_ms: float) -> None:
        self.renew(sent_ms, lease_version, true_ms)
        is_in_touch = self.touch.answered(sent_ms, newest_version, self.core.policy.version)
        if is_in_touch and self.confirms(newest_version):
            self.folder.in_touch_ms = max(self.folder.in_touch_ms, self.touch.since_s)

    def confirms(self, newest_version: int) -> bool:
        """Whether what is on disk is as new as what it was in touch about."""
        return self.acknowledged_version >= newest_version

    def receive(self, push: Snapshot | Delta, true_ms: float) -> Snapshot | None:
        """A policy has come: apply it, keep what is returned, and only then acknowledge it; None if it is refused."""
        try:
            if isinstance(push, Delta):
                delta = PolicyDelta(push.base_version, push.version, rules_of(push.tenants))
                policy = policy_delta.apply_delta(self.core.policy, delta)
                self.core.apply_policy(policy, self.now_ns(true_ms), touched=delta.touched)
            else:
                self.apply(push, true_ms)
        except FailedPreconditionError:
            return None
        self.touch.applied(push.version)
        return Snapshot(push.version, self.rules)

    @property
    def rules(self) -> dict[str, Rules]:
        """What it goes by."""
        return {
            tenant: Rules(
                policy.tiers[Tier.DRAM].limit_bytes,
                policy.min_issue_time_s,
                *_sharing_of(policy.namespaces[_NAMESPACE]),
            )
            for tenant, policy in self.core.policy.tenants.items()
        }

    @property
    def versions(self) -> tuple[int, int]:
        """What it says that it goes by, and that it has settled."""
        return min(self.core.policy.version, self.acknowledged_version), self.settled_version

    def keep(self, snapshot: Snapshot) -> None:
        """The policy has reached the disk; the world calls it some time after :meth:`receive`."""
        if self.folder.kept is None or snapshot.version > self.folder.kept.version:
            self.folder.kept = snapshot
            self.folder.in_touch_ms = self.touch.since_s
        self.acknowledged_version = max(self.acknowledged_version, snapshot.version)

    @property
    def settled_version(self) -> int:
        """What it may say that it has settled: what is in force, is kept and is not exceeded by anybody."""
        return min(self.core.settled_version, self.acknowledged_version)

    def apply(self, snapshot: Snapshot, true_ms: float) -> None:
        self.core.apply_policy(NodePolicy(snapshot.version, rules_of(snapshot.tenants)), self.now_ns(true_ms))

    # ---- traffic

    def put_start(self, tenant: str, key: int, true_ms: float) -> bool:
        """Begin to store an entry of one granule; False if it was refused."""
        if TenantId(tenant) not in self.core.policy.tenants:
            return False
        partition = open_partition(
            self.core.policy,
            claims_tenant=TenantId(tenant),
            claims_namespace=_NAMESPACE,
            requested_namespace=_NAMESPACE,
            epoch=1,
        )
        started = self.core.put_start(partition, BlockKey(key.to_bytes(32, "big")), GRANULE_BYTES, self.now_ns(true_ms))
        if isinstance(started, PutTicket):
            self.tickets.append(started)
        return isinstance(started, PutTicket)

    def open_group(self, tenant: str, true_ms: float) -> None:
        """Open a session of the tenant's sharing group, if it is in one, and store something; sessions stay open."""
        rules = self.core.policy.tenants.get(TenantId(tenant))
        epochs = rules.namespaces[_NAMESPACE].epochs_of(_GROUP) if rules else ()
        if not epochs:
            return
        partition = open_partition(
            self.core.policy,
            claims_tenant=TenantId(tenant),
            claims_namespace=_NAMESPACE,
            requested_namespace=_NAMESPACE,
            epoch=epochs[-1],
            group_uid=_GROUP,
        )
        self.group_sessions[partition] = None
        started = self.core.put_start(partition, BlockKey(b"g" * 32), GRANULE_BYTES, self.now_ns(true_ms))
        if isinstance(started, PutTicket):
            self.core.put_commit(started, 0, self.now_ns(true_ms))

    def readers_of_peers(self, true_ms: float) -> set[str]:
        """Tenants of whose open sessions one would be given what a peer has stored, were it to ask now."""
        now_ns = self.now_ns(true_ms)
        return {
            partition.tenant
            for partition in self.group_sessions
            if self.core.check_access(partition) is None and len(self.core.sources(partition, now_ns)) > 1
        }

    def put_end(self, number: int, true_ms: float) -> None:
        """End one of the transfers in progress."""
        if self.tickets:
            self.core.put_commit(self.tickets.pop(number % len(self.tickets)), 0, self.now_ns(true_ms))

    def now_ns(self, true_ms: float) -> int:
        return int(self.clock_ms(true_ms) * _MS_NS)

    # ---- what the rules are about

    def is_serving(self, true_ms: float) -> bool:
        """Whether it answers anybody: it ends itself when its policy is too old (I9)."""
        return self.is_alive and self.core.policy.version > 0 and not self.is_too_old(true_ms)

    def is_too_old(self, true_ms: float) -> bool:
        return self.clock_ms(true_ms) - self.touch.since_s > POLICY_AGE_MAX_MS

    def may_grow(self, true_ms: float) -> bool:
        return self.is_serving(true_ms) and self.now_ns(true_ms) < self.lease.stops_ns(self.core.policy.version)

    def limit_bytes(self, tenant: str) -> int:
        rules = self.core.policy.tenants.get(TenantId(tenant))
        return 0 if rules is None else rules.tiers[Tier.DRAM].limit_bytes

    def used_bytes(self, tenant: str) -> int:
        owner = self.core._pool.tenants.get(TenantId(tenant))
        return 0 if owner is None else owner.budget.used_bytes


def rules_of(tenants: dict[str, Rules]) -> dict[TenantId, TenantPolicy]:
    return {
        TenantId(tenant): TenantPolicy(
            TenantState.ACTIVE,
            {Tier.DRAM: TierQuota(0, rules.share)},
            {_NAMESPACE: _namespace_of(tenant, rules)},
            min_issue_time_s=rules.min_issue_time_s,
        )
        for tenant, rules in tenants.items()
    }


def _namespace_of(tenant: str, rules: Rules) -> NamespacePolicy:
    peers = tuple(GroupPeer(TenantId(peer), _NAMESPACE, f"uid-{peer}") for peer in rules.peers)
    groups = {_GROUP: GroupPolicy((rules.group_epoch,), peers)} if rules.group_epoch else {}
    return NamespacePolicy(f"uid-{tenant}", GRANULE_BYTES, (1,), groups=groups)


def _sharing_of(namespace: NamespacePolicy) -> tuple[int, tuple[str, ...]]:
    group = namespace.groups.get(_GROUP)
    return (0, ()) if group is None else (group.epochs[-1], tuple(peer.tenant for peer in group.peers))
