"""When nobody can go by an older policy any more."""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import lease_terms
from controlplane.core.lease_terms import LeaseTerms
from controlplane.core.policy_reach import NodeReach, Reach, reach
from saltern.names import NodeId

A = NodeId("a")
LEASE_MS = 600_000
HELD = lease_terms.registered(LeaseTerms(), "home", 0, LEASE_MS, version=5)
END_MS = HELD.expire_ms or 0


def state(applied_version: int, terms: LeaseTerms, now_ms: int) -> str:
    where = reach({A: NodeReach(applied_version, terms)}, 9, now_ms)
    return next(name for name in Reach.__dataclass_fields__ if getattr(where, name) == (A,))


def test_a_node_is_reached_by_what_it_says_or_by_the_end_of_its_lease() -> None:
    assert state(8, HELD, 0) == "late"
    assert state(9, HELD, 0) == state(12, HELD, 0) == "acknowledged"
    assert state(8, HELD, END_MS - 1) == "late"
    assert state(8, HELD, END_MS) == "expired"
    assert state(8, replace(HELD, expire_ms=None), 0) == "expired", "it was taken back"


def test_a_process_of_the_same_name_may_be_left_that_has_not_heard() -> None:
    moved = lease_terms.registered(HELD, "elsewhere", 1000, LEASE_MS, version=6)
    assert state(9, moved, END_MS - 1) == "late"
    assert state(9, moved, END_MS) == "acknowledged"


def test_what_had_run_out_counts_again_by_the_newest_policy_only() -> None:
    """Else a wait could return because of the end of a lease, and the node go on by the old policy right after."""
    assert lease_terms.renewed(HELD, END_MS - 1, LEASE_MS, 9).lease_version == 5
    again = lease_terms.renewed(HELD, END_MS, LEASE_MS, 9)
    assert again.lease_version == 9
    assert not again.has_run_out(END_MS)
    assert lease_terms.renewed(replace(HELD, expire_ms=None), 1, LEASE_MS, 9).lease_version == 9
