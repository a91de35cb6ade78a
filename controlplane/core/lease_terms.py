"""The terms on which one node holds its leases: how long, from when, and by which policy. Pure: times come in.

::

    register ──> waits until no earlier process can hold leases ──> holds ── report: renewed ──> holds
                 (skipped where that one is known to be gone)         └── silent until it ran out ──> reclaimed

Times here are one clock's, the control plane's, in milliseconds. Only durations travel: a node counts its lease from
the moment it *sent* the report that was answered, and the control plane from when it came, with a margin on top; so the
node stops growing first, whatever its own clock shows, as long as clocks run within ``DRIFT`` of each other.

After a reclaim the node may still hold an old policy with old shares, so an answer alone must not bring them back to
life: ``lease_version`` goes with every renewal, and it counts only for who goes by that version or a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from saltern.names import NodeId

#: How long a node may grow without an answer of the control plane; tokens of clients last as long.
LEASE_DURATION_DEFAULT_S: Final = 600
#: Two clocks may run apart by one part in so many.
DRIFT: Final = 1000
#: What the clocks of two control planes may differ, and what a node may need between looking at its clock and acting.
MARGIN_MS: Final = 5_000


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Of one node.

    Attributes:
        state_id: of the state folder that the registered process has locked; empty if it did not say.
        settled_version: the newest policy with nothing left above its limits.
        lease_version: renewals count only for who goes by this policy or a later one.
        expire_ms: when whoever may hold leases of this node stops growing; None if nobody may.
        from_ms: until then an earlier process may hold them, and this one gets nothing; None if it has them.
    """

    state_id: str = ""
    settled_version: int = 0
    lease_version: int = 0
    expire_ms: int | None = None
    from_ms: int | None = None

    @property
    def takes_leases(self) -> bool:
        """Whether the node may be given something."""
        return self.expire_ms is not None

    def has_run_out(self, now_ms: int) -> bool:
        """Whether nobody grows by what was leased, so that it can be given to others once it is reclaimed."""
        return self.expire_ms is None or now_ms >= max(self.expire_ms, self.from_ms or 0)


@dataclass(frozen=True, slots=True)
class Standing:
    """One node at a look at all of them.

    Attributes:
        is_lost: it has been silent for too long.
        is_draining: its leases are to go to the others.
    """

    terms: LeaseTerms
    is_lost: bool
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Due:
    """What the time that has passed makes due: nodes whose wait is over, and nodes to take leases back from."""

    admit: tuple[NodeId, ...] = ()
    reclaim: tuple[NodeId, ...] = ()


def due(nodes: Mapping[NodeId, Standing], now_ms: int) -> Due:
    """Look at all nodes; to be asked again every second or so.

    A lost node keeps its leases past their end as long as there is nobody to give them to, so that a cluster that was
    cut off as a whole, or a single node, comes back to what it had.
    """
    heirs = {
        node
        for node, standing in nodes.items()
        if not standing.is_lost and standing.terms.takes_leases and not standing.is_draining
    }
    return Due(
        admit=tuple(
            node
            for node, standing in nodes.items()
            if standing.terms.from_ms is not None and now_ms >= standing.terms.from_ms
        ),
        reclaim=tuple(
            node
            for node, standing in nodes.items()
            if standing.is_lost
            and standing.terms.takes_leases
            and standing.terms.has_run_out(now_ms)
            and heirs - {node}
        ),
    )


def registered(before: LeaseTerms, state_id: str, now_ms: int, duration_ms: int, version: int) -> LeaseTerms:
    """A new process registers under the node's name.

    The process before is known to be gone if the new one has locked the same state folder; else it may live on, cut
    off, and nothing is granted twice: the new one waits until the other's lease has run out.

    Args:
        version: of the policy that carries the registration; an older policy, kept from before, counts no more.
    """
    waits_ms = before.from_ms if before.from_ms is not None and before.from_ms > now_ms else None
    is_successor = bool(state_id) and state_id == before.state_id
    if not is_successor and not before.has_run_out(now_ms):
        waits_ms = max(waits_ms or 0, before.expire_ms or 0)
    after = replace(
        before,
        state_id=state_id,
        lease_version=version,
        from_ms=waits_ms,
    )
    return renewed(after, now_ms, duration_ms, version)


def renewed(terms: LeaseTerms, now_ms: int, duration_ms: int, version: int) -> LeaseTerms:
    """The node is answered, and may count ``duration_ms`` from when it sent what is answered.

    Args:
        version: of the newest policy. A lease that had run out counts again only by this one or a later one: others
            may have been told meanwhile that nobody goes by what was before (:mod:`controlplane.core.policy_reach`).
    """
    expire_ms = now_ms + duration_ms + duration_ms // DRIFT + MARGIN_MS
    lease_version = max(terms.lease_version, version) if terms.has_run_out(now_ms) else terms.lease_version
    return replace(terms, expire_ms=max(expire_ms, terms.expire_ms or 0), lease_version=lease_version)


def settled(terms: LeaseTerms, version: int) -> LeaseTerms:
    """The registered process has settled a policy. While an earlier one may live, that says nothing of that one."""
    if terms.from_ms is not None:
        return terms
    return replace(terms, settled_version=max(terms.settled_version, version))


def admitted(terms: LeaseTerms, version: int) -> LeaseTerms:
    """The wait is over: the registered process gets what is the node's with policy ``version``."""
    return replace(terms, from_ms=None, lease_version=version)


def reclaimed(terms: LeaseTerms, version: int) -> LeaseTerms:
    """Everything leased to the node is taken back; it has run out before. Its return is a new beginning."""
    return replace(terms, lease_version=version, expire_ms=None, from_ms=None)
