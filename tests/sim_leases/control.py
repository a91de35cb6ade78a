"""The control plane of the simulator: what its database holds, and one method for each of its transactions.

The decisions are those of :mod:`controlplane.core`; here they are only stored. Whichever replica runs a transaction
brings its own clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from controlplane.core import lease_terms, leases
from controlplane.core.lease_terms import LeaseTerms, Standing
from controlplane.core.leases import NOTHING, Holding, Member
from saltern.names import NodeId

LEASE_MS = 20_000
LOST_AFTER_MS = 6_000


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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A policy: the shares of one node by tenant."""

    version: int
    shares: dict[str, int]


@dataclass(slots=True)
class ControlPlane:
    """The database. ``quota_history``: for each tenant what its quota was from which version on."""

    quotas: dict[str, int]
    version: int = 1
    nodes: dict[NodeId, NodeRow] = field(default_factory=dict)
    holdings: dict[str, dict[NodeId, Holding]] = field(default_factory=dict)
    quota_history: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    version_times: dict[int, int] = field(default_factory=dict)
    true_now_ms: int = 0
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.version_times[self.version] = 0
        for tenant, quota in self.quotas.items():
            self.holdings[tenant] = {}
            self.quota_history[tenant] = [(self.version, quota)]

    def bump(self) -> int:
        self.version += 1
        self.version_times[self.version] = self.true_now_ms
        self.is_settled = False
        return self.version

    def register(self, node: NodeId, state_id: str, capacity_bytes: int, now_ms: int) -> tuple[int, int]:
        """Returns the fencing epoch and the lease's version."""
        row = self.nodes.setdefault(node, NodeRow(capacity_bytes))
        row.fencing_epoch += 1
        row.terms = lease_terms.registered(row.terms, state_id, now_ms, LEASE_MS, self.bump())
        row.last_report_ms = now_ms
        return row.fencing_epoch, row.terms.lease_version

    def report(self, node: NodeId, epoch: int, settled_version: int, now_ms: int) -> tuple[int, int]:
        """Returns the lease's version and the newest policy's."""
        row = self._current(node, epoch)
        row.terms = lease_terms.renewed(row.terms, now_ms, LEASE_MS, self.version)
        row.terms = lease_terms.settled(row.terms, settled_version)
        row.last_report_ms = now_ms
        self.is_settled = False
        return row.terms.lease_version, self.version

    def answer(self, node: NodeId, epoch: int, settled_version: int) -> None:
        row = self._current(node, epoch)
        row.terms = lease_terms.settled(row.terms, settled_version)
        self.is_settled = False

    def snapshot(self, node: NodeId, epoch: int) -> Snapshot:
        row = self._current(node, epoch)
        self.lease()
        waits = row.terms.from_ms is not None
        return Snapshot(
            self.version,
            {
                tenant: 0 if waits else min(self.quotas[tenant], held.get(node, NOTHING).granted_bytes)
                for tenant, held in self.holdings.items()
            },
        )

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        self.quotas[tenant] = quota_bytes
        self.quota_history[tenant].append((self.bump(), quota_bytes))

    def tick(self, now_ms: int) -> None:
        """What one replica does every second, under the lock that lets one do it."""
        standings = {
            node: Standing(row.terms, now_ms - row.last_report_ms > LOST_AFTER_MS, row.is_draining)
            for node, row in self.nodes.items()
        }
        work = lease_terms.due(standings, now_ms)
        if work.admit or work.reclaim:
            version = self.bump()
            for node in work.admit:
                self.nodes[node].terms = lease_terms.admitted(self.nodes[node].terms, version)
            for node in work.reclaim:
                self.nodes[node].terms = lease_terms.reclaimed(self.nodes[node].terms, version)
                for held in self.holdings.values():
                    held[node] = replace(NOTHING, version=version)
        self.lease()

    def lease(self) -> None:
        """One step of every tenant's quota; nothing where nothing has happened since the last."""
        if self.is_settled:
            return
        members = {
            node: Member(row.capacity_bytes, row.terms.settled_version, row.terms.takes_leases and not row.is_draining)
            for node, row in self.nodes.items()
        }
        changed = {
            tenant: leases.lease(quota, self.holdings[tenant], members, self.version + 1, {})
            for tenant, quota in self.quotas.items()
        }
        if any(changed.values()):
            self.bump()
            for tenant, new in changed.items():
                self.holdings[tenant].update(new)
        self.is_settled = True

    def believed_bytes(self, tenant: str, node: NodeId) -> int:
        row = self.nodes[node]
        holding = self.holdings[tenant].get(node, NOTHING)
        return leases.believed_bytes(holding, Member(row.capacity_bytes, row.terms.settled_version))

    def _current(self, node: NodeId, epoch: int) -> NodeRow:
        row = self.nodes.get(node)
        if row is None or row.fencing_epoch != epoch:
            raise FencedError
        return row
