"""How long leases hold, and who gets them after whom."""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import lease_terms
from controlplane.core.lease_terms import MARGIN_MS, LeaseTerms, Standing
from saltern.names import NodeId

A, B = NodeId("a"), NodeId("b")
LEASE_MS = 600_000


def joined(state_id: str = "home", now_ms: int = 0) -> LeaseTerms:
    return lease_terms.registered(LeaseTerms(), state_id, now_ms, LEASE_MS, version=1)


def test_a_lease_ends_for_the_control_plane_later_than_for_the_node() -> None:
    terms = lease_terms.renewed(joined(), 1000, LEASE_MS, 9)
    assert terms.expire_ms is not None and terms.expire_ms >= 1000 + LEASE_MS + MARGIN_MS
    assert not terms.has_run_out(1000 + LEASE_MS)
    assert terms.has_run_out(terms.expire_ms)
    assert lease_terms.renewed(terms, 0, LEASE_MS, 9) == terms, "a late report shortens nothing"


def test_a_successor_in_the_same_folder_has_its_leases_at_once() -> None:
    again = lease_terms.registered(joined(), "home", 1000, LEASE_MS, version=9)
    assert (again.lease_version, again.from_ms) == (9, None)


def test_i4_a_process_elsewhere_waits_until_the_other_cannot_grow_any_more() -> None:
    first = joined()
    second = lease_terms.registered(first, "elsewhere", 1000, LEASE_MS, version=9)
    assert second.from_ms == first.expire_ms
    assert lease_terms.settled(second, 9).settled_version == 0, "what it says is not said of the one before"
    third = lease_terms.registered(second, "elsewhere", 2000, LEASE_MS, version=10)
    assert third.from_ms == first.expire_ms, "the first may still live"
    assert first.expire_ms is not None
    nodes = {A: Standing(third, is_lost=False)}
    assert lease_terms.due(nodes, first.expire_ms - 1).admit == ()
    assert lease_terms.due(nodes, first.expire_ms).admit == (A,)
    admitted = lease_terms.admitted(third, 11)
    assert (admitted.from_ms, admitted.lease_version) == (None, 11)
    assert lease_terms.settled(admitted, 12).settled_version == 12


def test_a_process_that_says_nothing_of_its_folder_waits() -> None:
    assert lease_terms.registered(joined(""), "", 1000, LEASE_MS, version=2).from_ms is not None
    assert lease_terms.registered(joined(""), "", 10 * LEASE_MS, LEASE_MS, version=2).from_ms is None


def test_i4_leases_are_taken_back_from_who_is_lost_and_has_run_out_alone() -> None:
    terms, heir = joined(), Standing(joined(), is_lost=False)
    end_ms = terms.expire_ms or 0

    def reclaimed(standing: Standing, other: Standing = heir, now_ms: int = end_ms) -> bool:
        return lease_terms.due({A: standing, B: other}, now_ms).reclaim == (A,)

    assert reclaimed(Standing(terms, is_lost=True))
    assert not reclaimed(Standing(terms, is_lost=True), now_ms=end_ms - 1)
    assert not reclaimed(Standing(terms, is_lost=False))
    assert not reclaimed(Standing(terms, is_lost=True), replace(heir, is_lost=True))
    assert not reclaimed(Standing(terms, is_lost=True), replace(heir, is_draining=True))
    after = lease_terms.reclaimed(terms, 20)
    assert not after.takes_leases
    assert after.lease_version == 20, "an answer to who goes by an older policy brings nothing back"
    assert lease_terms.registered(after, "elsewhere", end_ms, LEASE_MS, version=21).from_ms is None
