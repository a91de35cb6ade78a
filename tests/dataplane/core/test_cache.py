"""The commands of the core, one rule at a time; random sequences of them are in test_cache_model.py."""

from __future__ import annotations

import pytest

from dataplane.core.cache import CacheCore
from dataplane.core.entry import Pin, PutTicket
from dataplane.core.partition import Partition
from dataplane.core.usage import EvictionCause
from saltern.errors import (
    AlreadyExistsError,
    EntryTooLargeError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from saltern.names import NamespaceId, TenantId
from tenants.policy import NodePolicy
from tests.support.cache_node import Node, key_of, make_policy, node_of, reason_of

G = 4096


def read(node: Node, tenant: str, *numbers: int, epoch: int = 1) -> list[Pin | None]:
    pins = node.core.get_start(node.partition(tenant, epoch), [key_of(number) for number in numbers], node.tick())
    node.core.check_invariants()
    return pins


# ---- I2


def test_i2_same_key_in_two_partitions_is_two_entries() -> None:
    node = node_of(8, {"a": (0, 8), "b": (0, 8)})
    node.put("a", 1)
    assert read(node, "b", 1) == [None]
    assert node.there("b", range(3)) == []
    node.put("b", 1)
    (mine,), (theirs,) = read(node, "a", 1), read(node, "b", 1)
    assert mine is not None and theirs is not None and mine.offset != theirs.offset
    node.core.get_end([mine, theirs])
    assert node.core.delete(node.partition("b"), [key_of(1)]) == 1
    assert node.there("a", range(3)) == [1]


def test_i2_a_foreign_delete_or_drop_finds_nothing() -> None:
    node = node_of(8, {"a": (0, 8), "b": (0, 8)})
    node.put("a", 1)
    assert node.core.delete(node.partition("b"), [key_of(1)]) == 0
    assert not node.core.drop(node.partition("b"), key_of(1))
    assert node.there("a", range(3)) == [1]


# ---- I4


def test_i4_limit_holds_with_puts_in_flight() -> None:
    node = node_of(16, {"a": (0, 4)})
    tickets = [node.started("a", number) for number in range(4)]
    refused = node.start("a", 9)
    assert reason_of(refused) == "QUOTA_EXCEEDED"
    assert node.used("a") == 4
    node.core.put_abort(tickets.pop())
    assert node.put("a", 9) is None
    for ticket in tickets:
        assert node.core.put_commit(ticket, 0, node.tick()) is None
    assert node.used("a") == 4


def test_i4_slack_counts_against_the_limit() -> None:
    node = node_of(16, {"a": (0, 4)})
    for number in range(4):
        outcome = node.core.put_start(node.partition("a"), key_of(number), 1, node.tick())
        assert isinstance(outcome, PutTicket)
        node.core.put_commit(outcome, 0, node.tick())
    usage = node.core.usage().tenants[TenantId("a")]
    assert (usage.resident_bytes, usage.slack_bytes, usage.used_bytes) == (4, 4 * G - 4, 4 * G)
    assert node.put("a", 9) is None
    assert node.there("a", range(10)) == [1, 2, 3, 9]


def test_i4_a_lower_limit_evicts_own_coldest_at_once() -> None:
    node = node_of(16, {"a": (0, 8), "b": (0, 8)})
    node.fill("b", range(2))
    node.fill("a", range(6))
    node.core.get_end(read(node, "a", 0))
    applied = node.core.apply_policy(make_policy(2, {"a": (0, 3), "b": (0, 8)}), node.tick())
    assert applied.evicted_entries == 3
    assert node.there("a", range(6)) == [0, 4, 5]
    assert node.there("b", range(2)) == [0, 1]
    node.core.check_invariants()


def test_i4_a_lower_limit_converges_when_transfers_end() -> None:
    node = node_of(16, {"a": (0, 8)})
    node.fill("a", range(4))
    pins = read(node, "a", 0, 1, 2, 3)
    ticket = node.started("a", 9)
    node.apply(make_policy(2, {"a": (0, 2)}))
    assert node.used("a") == 5, "nothing in transfer can be taken away"
    assert reason_of(node.start("a", 10)) == "QUOTA_EXCEEDED"
    assert reason_of(node.core.put_commit(ticket, 0, node.tick())) == "QUOTA_EXCEEDED"
    assert node.used("a") == 4
    node.core.get_end(pins[:3])
    node.core.check_invariants()
    assert node.used("a") == 2
    node.core.get_end(pins[3:])
    assert node.used("a") == 2


# ---- I6


def test_i6_put_that_cannot_fit_evicts_nothing() -> None:
    node = node_of(16, {"a": (0, 4), "b": (0, 16)})
    node.fill("a", range(4))
    node.fill("b", range(4))
    refused = node.start("a", 9, granules=5)
    assert reason_of(refused) == "ENTRY_TOO_LARGE"
    assert node.evictions() == 0
    assert node.there("a", range(10)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("capacity", "limit", "block", "what"),
    [(16, 16, 2, "block size"), (16, 2, 16, "limit"), (2, 16, 16, "capacity"), (16, 0, 16, "limit")],
)
def test_i6_what_can_never_fit_says_which_bound(capacity: int, limit: int, block: int, what: str) -> None:
    node = Node(capacity, make_policy(1, {"a": (0, limit)}, block_granules=block))
    refused = node.start("a", 1, granules=3)
    assert reason_of(refused) == "ENTRY_TOO_LARGE"
    error = refused.error  # type: ignore[union-attr]
    assert isinstance(error, EntryTooLargeError) and what in error.message and error.retry_after_ms is None
    assert {"tenant", "tier", "used_bytes", "limit_bytes"} <= error.metadata.keys()


def test_i6_a_quota_held_by_transfers_refuses_and_evicts_nothing() -> None:
    node = node_of(16, {"a": (0, 4)})
    node.fill("a", range(4))
    pins = read(node, "a", 0, 1, 2)
    refused = node.start("a", 9, granules=2)
    assert reason_of(refused) == "QUOTA_EXCEEDED"
    error = refused.error  # type: ignore[union-attr]
    assert isinstance(error, ResourceExhaustedError) and error.retry_after_ms
    assert error.metadata == {"tenant": "a", "tier": "dram", "used_bytes": str(4 * G), "limit_bytes": str(4 * G)}
    assert node.there("a", range(4)) == [0, 1, 2, 3]
    node.core.get_end(pins)
    assert node.put("a", 9, granules=2) is None


def test_i6_a_pool_full_of_reservations_refuses_and_evicts_nothing() -> None:
    node = node_of(8, {"a": (8, 8), "b": (0, 8)})
    node.fill("a", range(8))
    refused = node.start("b", 1)
    assert reason_of(refused) == "NODE_FULL"
    assert refused.error.retry_after_ms  # type: ignore[union-attr]
    assert node.there("a", range(8)) == list(range(8))


def test_i6_a_committed_put_is_readable_at_once_with_its_sum() -> None:
    node = node_of(8, {"a": (0, 8)})
    ticket = node.started("a", 1, granules=2)
    assert node.core.put_commit(ticket, 77, node.tick()) is None
    (pin,) = read(node, "a", 1)
    assert pin is not None
    assert (pin.offset, pin.size_bytes, pin.checksum) == (ticket.offset, 2 * G, 77)
    node.core.get_end([pin])


# ---- I7


def test_i7_an_entry_is_invisible_until_committed() -> None:
    node = node_of(8, {"a": (0, 8)})
    ticket = node.started("a", 1)
    assert read(node, "a", 1) == [None] and node.there("a", range(2)) == []
    assert node.core.delete(node.partition("a"), [key_of(1)]) == 0
    node.core.put_commit(ticket, 0, node.tick())
    assert node.there("a", range(2)) == [1]


def test_i7_a_key_has_one_writer() -> None:
    node = node_of(8, {"a": (0, 8)})
    ticket = node.started("a", 1)
    second = node.start("a", 1)
    assert reason_of(second) == "WRITE_IN_PROGRESS"
    assert isinstance(second.error, UnavailableError) and second.error.retry_after_ms  # type: ignore[union-attr]
    node.core.put_abort(ticket)
    assert node.put("a", 1) is None
    third = node.start("a", 1)
    assert isinstance(third.error, AlreadyExistsError)  # type: ignore[union-attr]


def test_i7_an_aborted_put_leaves_no_trace() -> None:
    node = node_of(8, {"a": (0, 8)})
    node.core.put_abort(node.started("a", 1, granules=8))
    assert node.used("a") == 0 and node.there("a", range(2)) == []
    assert node.core.usage().largest_free_bytes == 8 * G


def test_i7_pinned_bytes_are_not_reused_after_a_delete() -> None:
    node = node_of(2, {"a": (0, 2)})
    node.fill("a", range(2))
    (pin, again) = read(node, "a", 0, 0)
    assert node.core.delete(node.partition("a"), [key_of(0)]) == 1
    assert node.there("a", range(2)) == [1]
    ticket = node.started("a", 0)
    assert pin is not None and ticket.offset != pin.offset
    assert node.used("a") == 2, "what a reader holds is still charged"
    node.core.get_end([pin])
    assert node.used("a") == 2
    node.core.get_end([again])
    assert node.used("a") == 1


@pytest.mark.parametrize("first", ["commit", "abort"])
@pytest.mark.parametrize("second", ["commit", "abort"])
def test_a_ticket_is_used_once(first: str, second: str) -> None:
    node = node_of(8, {"a": (0, 8)})
    ticket = node.started("a", 1)

    def use(how: str) -> None:
        if how == "commit":
            node.core.put_commit(ticket, 0, node.tick())
        else:
            node.core.put_abort(ticket)

    use(first)
    with pytest.raises(InternalError):
        use(second)
    node.core.check_invariants()


def test_a_pin_is_given_back_once() -> None:
    node = node_of(8, {"a": (0, 8)})
    node.put("a", 1)
    pins = read(node, "a", 1, 2, 1)
    node.core.get_end(pins)
    with pytest.raises(InternalError):
        node.core.get_end(pins)
    node.core.check_invariants()


# ---- I12


@pytest.mark.parametrize("how", ["tenant", "namespace", "epoch"])
def test_i12_what_the_policy_drops_is_unreachable_and_free_at_once(how: str) -> None:
    node = node_of(8, {"a": (0, 8), "b": (0, 8)})
    node.fill("a", range(3))
    node.fill("b", range(2))
    partition = node.partition("a")
    rest = make_policy(2, {"b": (0, 8)}).tenants
    changed = {
        "tenant": {},
        "namespace": make_policy(2, {"a": (0, 8)}, uid="uid-2").tenants,
        "epoch": make_policy(2, {"a": (0, 8)}, epochs=(2,)).tenants,
    }[how]
    applied = node.core.apply_policy(NodePolicy(2, {**changed, **rest}), node.tick())
    assert applied.purged_entries == 3
    assert node.core.get_start(partition, [key_of(0)], node.tick()) == [None]
    assert node.core.lookup(partition, [key_of(0)]) == (0, b"\0")
    assert isinstance(node.core.check_access(partition), PermissionDeniedError)
    refused = node.core.put_start(partition, key_of(7), G, node.tick())
    assert isinstance(refused.error, PermissionDeniedError)  # type: ignore[union-attr]
    assert node.core.usage().free_bytes == 6 * G
    assert node.there("b", range(2)) == [0, 1]
    node.core.check_invariants()


def test_i12_a_deleted_tenants_transfers_keep_their_memory_until_they_end() -> None:
    node = node_of(8, {"a": (0, 8), "b": (0, 8)})
    node.fill("a", range(2))
    pins = read(node, "a", 0)
    ticket = node.started("a", 5, granules=2)
    node.apply(make_policy(2, {"b": (0, 8)}))
    assert node.used("a") == 3
    assert node.core.usage().tenants[TenantId("a")].entries == 0
    node.fill("b", range(10))
    assert node.used("b") == 5, "held memory of the deleted tenant is not reused"
    refused = node.core.put_commit(ticket, 0, node.tick())
    assert refused is not None and isinstance(refused.error, PermissionDeniedError)
    node.core.check_invariants()
    node.core.get_end(pins)
    node.core.check_invariants()
    assert TenantId("a") not in node.core.usage().tenants
    assert node.core.usage().free_bytes == 3 * G


def test_i12_a_tenant_created_again_starts_empty_and_pays_for_what_is_still_held() -> None:
    node = node_of(8, {"a": (0, 8)})
    node.fill("a", range(2))
    pins = read(node, "a", 0)
    node.apply(make_policy(2, {}))
    node.apply(make_policy(3, {"a": (0, 8)}))
    assert node.there("a", range(2)) == [] and node.used("a") == 1
    node.fill("a", range(8))
    assert node.used("a") == 8 and len(node.there("a", range(8))) == 7
    node.core.get_end(pins)
    assert node.used("a") == 7


def test_i12_an_older_epoch_is_readable_but_not_writable() -> None:
    node = node_of(8, {"a": (0, 8)})
    node.put("a", 1)
    ticket = node.started("a", 2)
    node.apply(make_policy(2, {"a": (0, 8)}, epochs=(1, 2)))
    assert node.there("a", range(3)) == [1]
    assert reason_of(node.start("a", 3)) == "EPOCH_NOT_AVAILABLE"
    assert node.core.put_commit(ticket, 0, node.tick()) is None, "a put that began before the rotation may end"
    assert node.put("a", 3, epoch=2) is None
    assert node.there("a", range(4), epoch=2) == [3] and node.there("a", range(4)) == [1, 2]
    node.apply(make_policy(3, {"a": (0, 8)}, epochs=(2,)))
    assert node.used("a") == 1


# ---- policy


def test_a_suspended_tenant_is_refused_and_keeps_its_entries() -> None:
    node = node_of(8, {"a": (0, 8)})
    node.put("a", 1)
    ticket = node.started("a", 2)
    partition = node.partition("a")
    node.apply(make_policy(2, {"a": (0, 8)}, suspended=("a",)))
    assert node.core.get_start(partition, [key_of(1)], node.tick()) == [None]
    refused = node.core.put_start(partition, key_of(3), G, node.tick())
    assert reason_of(refused) == "TENANT_SUSPENDED"
    assert reason_of(node.core.put_commit(ticket, 0, node.tick())) == "TENANT_SUSPENDED"
    node.apply(make_policy(3, {"a": (0, 8)}))
    assert node.there("a", range(4)) == [1] and node.used("a") == 1


def test_an_unknown_tenant_is_refused() -> None:
    node = node_of(8, {"a": (0, 8)})
    stranger = Partition(TenantId("x"), NamespaceId("ns"), "uid-1", 1)
    assert reason_of(node.core.put_start(stranger, key_of(1), G, node.tick())) == "NAMESPACE_NOT_AVAILABLE"
    assert node.core.get_start(stranger, [key_of(1)], node.tick()) == [None]
    assert TenantId("x") not in node.core.usage().tenants


def test_before_the_first_policy_everything_is_refused() -> None:
    core = CacheCore(8 * G)
    partition = Partition(TenantId("a"), NamespaceId("ns"), "uid-1", 1)
    assert reason_of(core.put_start(partition, key_of(1), G, 0)) == "NAMESPACE_NOT_AVAILABLE"
    core.check_invariants()


def test_i5_reservations_above_the_capacity_are_refused_and_the_policy_in_force_stays() -> None:
    node = node_of(8, {"a": (4, 8), "b": (4, 8)})
    node.put("a", 1)
    with pytest.raises(FailedPreconditionError) as refusal:
        node.core.apply_policy(make_policy(2, {"a": (4, 8), "b": (5, 8)}), node.tick())
    assert refusal.value.reason == "RESERVATIONS_ABOVE_CAPACITY"
    assert node.core.policy.version == 1 and node.there("a", range(2)) == [1]


def test_an_older_policy_is_refused() -> None:
    node = node_of(8, {"a": (0, 8)})
    node.apply(make_policy(5, {"a": (0, 4)}))
    with pytest.raises(FailedPreconditionError) as refusal:
        node.core.apply_policy(make_policy(4, {"a": (0, 8)}), node.tick())
    assert refusal.value.reason == "POLICY_STALE"
    node.apply(make_policy(5, {"a": (0, 4)}))


# ---- the rest


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_an_empty_entry_is_refused(size_bytes: int) -> None:
    node = node_of(8, {"a": (0, 8)})
    refused = node.core.put_start(node.partition("a"), key_of(1), size_bytes, node.tick())
    assert isinstance(refused.error, InvalidArgumentError)  # type: ignore[union-attr]


def test_lookup_counts_the_prefix_and_touches_nothing() -> None:
    node = node_of(4, {"a": (0, 4)})
    node.fill("a", range(4))
    keys = [key_of(number) for number in (0, 1, 9, 3)]
    assert node.core.lookup(node.partition("a"), keys) == (2, b"\1\1\0\1")
    assert node.core.lookup(node.partition("a"), keys[:2]) == (2, b"\1\1")
    assert node.core.lookup(node.partition("a"), []) == (0, b"")
    node.put("a", 10)
    assert node.there("a", range(4)) == [1, 2, 3], "looked up, and still the coldest"


@pytest.mark.parametrize("how", ["get", "touch"])
def test_a_batch_is_touched_tail_first(how: str) -> None:
    node = node_of(4, {"a": (0, 4)})
    node.fill("a", range(4))
    keys = [key_of(number) for number in range(4)]
    if how == "get":
        node.core.get_end(node.core.get_start(node.partition("a"), keys, node.tick()))
    else:
        node.core.touch(node.partition("a"), keys, node.tick())
    node.fill("a", range(10, 13))
    assert node.there("a", range(4)) == [0], "the head of the chain outlives its tail"


def test_counters_tell_what_happened() -> None:
    node = node_of(4, {"a": (0, 4), "b": (0, 4)})
    node.fill("a", range(4))
    node.core.get_end(read(node, "a", 0, 1, 99))
    node.put("a", 4, granules=2)
    node.put("a", 5, granules=5)
    node.put("a", 0)
    counters = node.core.usage().tenants[TenantId("a")].counters
    assert (counters.get_hits, counters.get_misses, counters.get_bytes) == (2, 1, 2 * G)
    assert (counters.puts_stored, counters.put_bytes, counters.puts_refused) == (5, 6 * G, 1)
    assert (counters.evictions, counters.evicted_bytes) == (2, 2 * G)
    assert counters.evictions_by_cause == {EvictionCause.OWN_LIMIT: 2}
    assert counters.refused_by_reason == {"ENTRY_TOO_LARGE": 1}
    assert node.core.usage().tenants[TenantId("b")].counters.get_misses == 0


def test_i8_every_eviction_is_counted_by_its_cause() -> None:
    node = node_of(6, {"a": (2, 4), "b": (0, 6)})
    node.fill("b", range(6))
    node.fill("a", range(5))
    node.put("b", 6)
    node.apply(make_policy(2, {"a": (2, 3), "b": (0, 6)}))
    usage = node.core.usage().tenants
    a, b = usage[TenantId("a")], usage[TenantId("b")]
    assert a.counters.evictions_by_cause == {EvictionCause.OWN_LIMIT: 1, EvictionCause.QUOTA: 1}
    assert b.counters.evictions_by_cause == {EvictionCause.NEIGHBOUR: 4, EvictionCause.OWN_PUT: 1}
    assert (a.counters.taken_entries, a.counters.taken_bytes) == (4, 4 * G)
    assert (a.borrowed_bytes, a.lent_bytes, a.protected_bytes, a.weight) == (G, 0, 2 * G, 100)
    assert (b.borrowed_bytes, b.lent_bytes, b.protected_bytes) == (2 * G, 0, 0)


def test_a_clock_that_steps_back_does_no_harm() -> None:
    node = node_of(3, {"a": (0, 3), "b": (0, 3)})
    node.put("a", 1)
    node.put("b", 2)
    node.now_ns = -(10**12)
    node.put("a", 3)
    node.put("b", 4)
    assert node.there("a", range(5)) == [3] and node.there("b", range(5)) == [2, 4]
