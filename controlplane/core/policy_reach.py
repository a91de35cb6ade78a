"""How far a policy has come: which nodes go by it, which cannot go by an older one any more, and which are late.

A node counts as reached when it has acknowledged the version, and no earlier process of its name can be left that has
not; or when its lease has run out: it has then stopped growing and sharing by itself, and what renews the lease counts
for it only once it goes by the newest policy (:func:`controlplane.core.lease_terms.renewed`). Pure: times come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.lease_terms import LeaseTerms
from saltern.names import NodeId


@dataclass(frozen=True, slots=True)
class NodeReach:
    """What the registry says of one node.

    Attributes:
        applied_version: what its registered process has acknowledged; it goes by that also after a restart.
    """

    applied_version: int
    terms: LeaseTerms


@dataclass(frozen=True, slots=True)
class Reach:
    """Every node in one of three states, by id."""

    acknowledged: tuple[NodeId, ...]
    expired: tuple[NodeId, ...]
    late: tuple[NodeId, ...]


def reach(nodes: Mapping[NodeId, NodeReach], version: int, now_ms: int) -> Reach:
    """Where ``version`` has come to."""
    acknowledged, expired, late = [], [], []
    for node, known in nodes.items():
        terms = known.terms
        is_alone = terms.from_ms is None or now_ms >= terms.from_ms
        if known.applied_version >= version and is_alone:
            acknowledged.append(node)
        elif terms.has_run_out(now_ms):
            expired.append(node)
        else:
            late.append(node)
    return Reach(tuple(acknowledged), tuple(expired), tuple(late))
