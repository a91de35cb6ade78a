"""What a policy leaves to do: gone and binding at once, freed and evicted later, with exact books all the while."""

from __future__ import annotations

from unittest.mock import patch

from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.policy_in_force import PolicyInForce
from dataplane.core.reaping import POLICY_SLICE_BYTES
from dataplane.core.usage import EvictionCause
from saltern.names import TenantId
from tests.support.cache_node import Node, Quota, key_of, make_policy, node_of, reason_of

G = GRANULE_BYTES
#: More than what is done as a policy is applied.
MANY = POLICY_SLICE_BYTES // G + 100


def large(**quotas: Quota) -> Node:
    """A node whose tenant ``a`` has more entries than one slice takes; the arena is full."""
    node = node_of(MANY, {"a": (0, MANY), **quotas})
    node.fill("a", range(MANY))
    return node


def work_off(node: Node, granules: int) -> None:
    node.core.work_off(node.tick(), granules * G)
    node.core.check_invariants()


def test_i12_a_deleted_tenant_is_unreachable_at_once_and_its_memory_follows() -> None:
    node = large()
    gone = node.partition("a")
    node.apply(make_policy(2, {}))
    assert node.core.lookup(gone, [key_of(MANY - 1), key_of(0)]) == (0, b"\0\0")
    assert node.core.get_start(gone, [key_of(0)], node.tick()) == [None]
    assert node.used("a") == 100, "charged until it is free (I8)"
    assert node.core.settled_version < 2
    work_off(node, 60)
    assert node.used("a") == 40
    work_off(node, 60)
    usage = node.core.usage()
    assert not usage.tenants and usage.free_bytes == usage.capacity_bytes
    assert node.core.settled_version == 2 and not node.core.has_arrears


def test_i4_a_lowered_limit_binds_at_once_and_the_coldest_follow() -> None:
    node = large()
    node.apply(make_policy(2, {"a": (0, 10)}))
    assert node.used("a") == 100
    assert node.core.settled_version < 2, "nobody else may be given what is still used here"
    assert reason_of(node.start("a", MANY)) == "QUOTA_EXCEEDED"
    assert node.used("a") == 100, "the refused put evicted nothing (I6)"
    work_off(node, 90)
    assert node.used("a") == 10 and node.core.settled_version == 2
    assert node.there("a", range(MANY)) == list(range(MANY - 10, MANY))
    counters = node.core.usage().tenants[TenantId("a")].counters
    assert counters.evictions_by_cause == {EvictionCause.QUOTA: MANY - 10}
    node.put("a", MANY)


def test_i6_a_put_has_purged_memory_freed_before_anybody_loses_an_entry() -> None:
    node = node_of(MANY + 50, {"a": (0, MANY), "b": (0, 80)})
    node.fill("a", range(MANY))
    node.fill("b", range(50))
    node.apply(make_policy(2, {"b": (0, 80)}))
    assert node.core.has_arrears
    node.fill("b", range(50, 80))  # the arena has only what the first slice has freed, and what these puts free
    work_off(node, MANY)
    assert node.there("b", range(80)) == list(range(80))
    assert not node.core.usage().tenants[TenantId("b")].counters.evictions


def test_i6_own_purged_memory_goes_before_own_entries_at_the_limit() -> None:
    node = large()
    node.apply(make_policy(2, {"a": (0, MANY)}, epochs=(2,)))
    assert node.used("a") == 100
    for number in range(MANY):
        assert node.put("a", number, epoch=2) is None
    assert node.there("a", range(MANY), epoch=2) == list(range(MANY))
    assert not node.core.has_arrears and not node.core.usage().tenants[TenantId("a")].counters.evictions


def test_i7_a_reader_keeps_what_was_purged_under_it() -> None:
    node = large()
    pins = node.core.get_start(node.partition("a"), [key_of(3)], node.tick())
    node.apply(make_policy(2, {}))
    work_off(node, MANY)
    assert node.used("a") == 1 and not node.core.has_arrears
    node.core.get_end(pins)
    node.core.check_invariants()
    assert not node.core.usage().tenants


def test_a_tenant_that_comes_back_does_not_find_its_old_entries() -> None:
    node = large()
    node.apply(make_policy(2, {}))
    node.apply(make_policy(3, {"a": (0, MANY)}, uid="uid-2"))
    assert node.core.lookup(node.partition("a"), [key_of(0), key_of(MANY - 1)]) == (0, b"\0\0")
    node.fill("a", range(MANY))
    assert node.there("a", range(MANY)) == list(range(MANY))


def test_tenants_that_a_policy_does_not_change_are_not_looked_at() -> None:
    quotas: dict[str, Quota] = {f"t{number}": (0, 5) for number in range(50)}
    node = node_of(256, quotas)
    with patch.object(PolicyInForce, "_apply_namespaces", autospec=True, side_effect=lambda *_: 0) as looked:
        node.apply(make_policy(2, {**quotas, "t7": (0, 6)}))
    assert [call.args[1].tenant for call in looked.call_args_list] == ["t7"]
