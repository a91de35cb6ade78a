"""Who evicts whom, of however many."""

from __future__ import annotations

from dataplane.core.displacements import Displacements
from saltern.names import TenantId
from tests.support.cache_node import node_of


def test_a_core_counts_what_each_displaces_of_each_and_nothing_of_ones_own() -> None:
    node = node_of(8, {"quiet": (0, 8), "flood": (0, 8), "owner": (4, 8)})
    node.fill("quiet", range(8))
    node.fill("flood", range(4))
    node.fill("owner", range(4))
    displaced = node.core.displaced_bytes()
    assert set(displaced) <= {("quiet", "flood"), ("quiet", "owner"), ("flood", "owner")}
    for taker in ("flood", "owner"):
        taken = node.core.usage().tenants[TenantId(taker)].counters.taken_bytes
        assert taken == sum(size_bytes for (_, by), size_bytes in displaced.items() if by == taker) > 0
    assert ("quiet", "quiet") not in displaced


def test_of_many_pairs_those_stay_to_which_it_happened_last() -> None:
    displaced = Displacements(pairs_max=3)
    tenants = [TenantId(f"t{number}") for number in range(6)]
    for round_number in range(4):
        for taker in tenants[1:]:
            displaced.add(tenants[0], tenants[5], 10)
            displaced.add(tenants[0], taker, 1)
            assert len(displaced.snapshot()) <= 3
        assert displaced.snapshot()[tenants[0], tenants[5]] == 51 * (round_number + 1)
