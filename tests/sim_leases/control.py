"""The control plane of the simulator: what its database holds, and one method for each of its transactions.

The decisions are those of :mod:`controlplane.core`; here they are only stored. Whichever replica runs a transaction
brings its own clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from controlplane.core import lease_terms, leases, policy_reach
from controlplane.core.lease_terms import LeaseTerms, Standing
from controlplane.core.leases import NOTHING, Holding, Member
from controlplane.core.policy_reach import NodeReach
from saltern.names import NodeId

LEASE_MS = 20_000
LOST_AFTER_MS = 6_000
#: In the place of a tenant: the change is nobody's part of the policy, and leases follow by themselves.
NOBODY = ""


class FencedError(Exception):
    """The fencing epoch is not the current one."""


@dataclass(slots=True)
class NodeRow:
    """One row of the registry."""

    capacity_bytes: int
    terms: LeaseTerms = field(default_factory=LeaseTerms)
    fencing_epoch: int = 0
    last_report_ms: int = 0
    is_draining: bool = False
    applied_version: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What a policy says of one tenant: its share on one node, which of its tokens are good, with whom it shares.

    Attributes:
        group_epoch: of the sharing group that it is a member of; 0 for none.
        peers: the other members.
    """

    share: int
    min_issue_time_s: int
    group_epoch: int = 0
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A policy: the rules of one node by tenant."""

    version: int
    tenants: dict[str, Rules]


@dataclass(frozen=True, slots=True)
class Delta:
    """What turns the policy of ``base_version`` into that of ``version``."""

    base_version: int
    version: int
    tenants: dict[str, Rules]


@dataclass(slots=True)
class ControlPlane:
    """The database.

    Attributes:
        quota_history: for each tenant what its quota was from which version on.
        changes: which tenant each version changed; ``NOBODY``; None for any.
        followed_version: leases of tenants that were changed by name have followed up to here.
        min_issue_times_s: by tenant; each revocation raises one.
        composed: every policy that there was, by node and version.
        members: of the one sharing group that there is, the owner first; nobody shares with itself alone.
        group_epoch: of that group's salt; whoever leaves ends it.
        shared: from which version on two or more were in the group, and from which on no more.
        waited_version: of the newest change of which somebody was told that it is in force everywhere.
    """

    quotas: dict[str, int]
    version: int = 1
    nodes: dict[NodeId, NodeRow] = field(default_factory=dict)
    holdings: dict[str, dict[NodeId, Holding]] = field(default_factory=dict)
    quota_history: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    version_times: dict[int, int] = field(default_factory=dict)
    changes: dict[int, str | None] = field(default_factory=dict)
    min_issue_times_s: dict[str, int] = field(default_factory=dict)
    composed: dict[tuple[NodeId, int], dict[str, Rules]] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    group_epoch: int = 1
    shared: list[tuple[int, bool]] = field(default_factory=list)
    waited_version: int = 0
    true_now_ms: int = 0
    followed_version: int = 1
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.version_times[self.version] = 0
        for tenant, quota in self.quotas.items():
            self.holdings[tenant] = {}
            self.quota_history[tenant] = [(self.version, quota)]

    def bump(self, tenant: str | None = None) -> int:
        self.version += 1
        self.changes[self.version] = tenant
        self.version_times[self.version] = self.true_now_ms
        self.is_settled = False
        return self.version

    def register(self, node: NodeId, state_id: str, capacity_bytes: int, now_ms: int) -> tuple[int, int]:
        """Returns the fencing epoch and the lease's version."""
        row = self.nodes.setdefault(node, NodeRow(capacity_bytes))
        row.fencing_epoch += 1
        row.applied_version = 0
        row.terms = lease_terms.registered(row.terms, state_id, now_ms, LEASE_MS, self.bump(NOBODY))
        row.last_report_ms = now_ms
        return row.fencing_epoch, row.terms.lease_version

    def report(self, node: NodeId, epoch: int, versions: tuple[int, int], now_ms: int) -> tuple[int, int]:
        """Takes what is applied and what is settled; returns the lease's version and the newest policy's."""
        row = self._current(node, epoch)
        row.applied_version, settled_version = versions
        row.terms = lease_terms.renewed(row.terms, now_ms, LEASE_MS, self.version)
        row.terms = lease_terms.settled(row.terms, settled_version)
        row.last_report_ms = now_ms
        self.is_settled = False
        return row.terms.lease_version, self.version

    def answer(self, node: NodeId, epoch: int, versions: tuple[int, int]) -> None:
        row = self._current(node, epoch)
        row.applied_version, settled_version = versions
        row.terms = lease_terms.settled(row.terms, settled_version)
        self.is_settled = False

    def push(self, node: NodeId, epoch: int, base_version: int | None) -> Snapshot | Delta:
        """The newest policy of a node, or what changed in it since ``base_version``."""
        row = self._current(node, epoch)
        if base_version is not None and row.terms.lease_version > base_version:
            base_version = None  # its lease began anew: what it has of every tenant may be another
        # Whoever was changed by name is looked at before the policy is composed; for the others it is early enough
        # when their turn comes, which is here with the first policy of a stream and each second (see ``tick``).
        self.lease(only_changed=base_version is not None)
        waits = row.terms.from_ms is not None
        tenants = {
            tenant: Rules(
                0 if waits else min(self.quotas[tenant], held.get(node, NOTHING).granted_bytes),
                self.min_issue_times_s.get(tenant, 0),
                self.group_epoch if tenant in self.members else 0,
                tuple(member for member in self.members if tenant in self.members and member != tenant),
            )
            for tenant, held in self.holdings.items()
        }
        before = self.composed.setdefault((node, self.version), tenants)
        assert before == tenants, f"version {self.version} of {node} was {before}, and is {tenants} now"
        changed = None if base_version is None else self.changed_since(base_version)
        if changed is None or base_version is None:
            return Snapshot(self.version, tenants)
        return Delta(base_version, self.version, {tenant: tenants[tenant] for tenant in changed})

    def changed_since(self, base_version: int) -> set[str] | None:
        changed = {self.changes[version] for version in range(base_version + 1, self.version + 1)}
        return None if None in changed else {tenant for tenant in changed if tenant}

    def revoke(self, tenant: str) -> int:
        """End the tenant's tokens; returns the version to wait for."""
        version = self.bump(tenant)
        self.min_issue_times_s[tenant] = version
        return version

    def join(self, tenant: str) -> None:
        """The tenant accepts: from this version on it and those who are in the group read each other."""
        self.members = (*self.members, tenant)
        self._group_changed(self.members)

    def leave(self, tenant: str) -> int:
        """The tenant leaves, and the group's salt with it; returns the version to wait for."""
        before, self.members = self.members, tuple(member for member in self.members if member != tenant)
        self.group_epoch += 1
        return self._group_changed(before)

    def _group_changed(self, concerned: tuple[str, ...]) -> int:
        """One transaction, which names each tenant whose part of the policy it changes."""
        for tenant in concerned:
            self.bump(tenant)
        self.shared.append((self.version, len(self.members) > 1))
        return self.version

    def was_shared_since(self, version: int) -> bool:
        """Whether two were in the group when ``version`` was the newest, or at any time since."""
        before = [is_shared for at, is_shared in self.shared if at <= version][-1:]
        return any(before) or any(is_shared for at, is_shared in self.shared if at > version)

    def is_everywhere(self, version: int, now_ms: int) -> bool:
        """Whether a wait for ``version`` returns."""
        nodes = {node: NodeReach(row.applied_version, row.terms) for node, row in self.nodes.items()}
        return not policy_reach.reach(nodes, version, now_ms).late

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        self.quotas[tenant] = quota_bytes
        self.quota_history[tenant].append((self.bump(tenant), quota_bytes))

    def tick(self, now_ms: int) -> None:
        """What one replica does every second, under the lock that lets one do it."""
        standings = {
            node: Standing(row.terms, now_ms - row.last_report_ms > LOST_AFTER_MS, row.is_draining)
            for node, row in self.nodes.items()
        }
        work = lease_terms.due(standings, now_ms)
        if work.admit or work.reclaim:
            version = self.bump(NOBODY)
            for node in work.admit:
                self.nodes[node].terms = lease_terms.admitted(self.nodes[node].terms, version)
            for node in work.reclaim:
                self.nodes[node].terms = lease_terms.reclaimed(self.nodes[node].terms, version)
                for held in self.holdings.values():
                    held[node] = replace(NOTHING, version=version)
        self.lease()

    def lease(self, *, only_changed: bool = False) -> None:
        """One step of every tenant's quota, where anything has happened since the last; or of those changed by name."""
        tenants = set(self.quotas)
        if only_changed:
            tenants &= {self.changes[version] for version in range(self.followed_version + 1, self.version + 1)}
        elif self.is_settled:
            return
        members = {
            node: Member(row.capacity_bytes, row.terms.settled_version, row.terms.takes_leases and not row.is_draining)
            for node, row in self.nodes.items()
        }
        changed = {
            tenant: leases.lease(quota, self.holdings[tenant], members, self.version + 1, {})
            for tenant, quota in self.quotas.items()
            if tenant in tenants
        }
        planned = self.version + 1
        for tenant in [tenant for tenant, new in changed.items() if new]:
            self.bump(tenant)
        for tenant, new in changed.items():
            self.holdings[tenant].update(
                (node, replace(holding, version=self.version) if holding.version == planned else holding)
                for node, holding in new.items()
            )
        self.followed_version = self.version
        self.is_settled |= not only_changed

    def believed_bytes(self, tenant: str, node: NodeId) -> int:
        row = self.nodes[node]
        holding = self.holdings[tenant].get(node, NOTHING)
        return leases.believed_bytes(holding, Member(row.capacity_bytes, row.terms.settled_version))

    def _current(self, node: NodeId, epoch: int) -> NodeRow:
        row = self.nodes.get(node)
        if row is None or row.fencing_epoch != epoch:
            raise FencedError
        return row
