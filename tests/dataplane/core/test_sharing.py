"""Sharing groups in the core: whose entries are read, who pays, and what one member can do to another (I2, I4, I5, I7).

Two members, ``a`` and ``b``, of group ``g``; ``c`` is in none. Every command checks the books (I8).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dataplane.core.admission import open_partition, peer_partitions
from dataplane.core.entry import Pin, PutRefused
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.lease import Lease
from dataplane.core.loans import LENT_PARTS
from dataplane.core.partition import Partition, split_storage_uid
from dataplane.core.snapshot import ArenaIdentity, decode_snapshot
from saltern.errors import PermissionDeniedError
from saltern.names import NamespaceId, TenantId
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tests.support.cache_node import Node, key_of, reason_of

NS = NamespaceId("ns")
MEMBERS = ("a", "b")


def shared_policy(
    version: int,
    *,
    members: Sequence[str] = MEMBERS,
    epochs: tuple[int, ...] = (1,),
    named: Sequence[str] | None = None,
    deaf: Sequence[str] = (),
    tenants: Sequence[str] = ("a", "b", "c"),
    suspended: Sequence[str] = (),
    limit: int = 20,
    reserved: int = 0,
) -> NodePolicy:
    """A policy with one group; ``named``: only these tenants' rules name it; ``deaf``: without peers."""

    def groups(tenant: str) -> dict[str, GroupPolicy]:
        if tenant not in (members if named is None else named):
            return {}
        peers = [GroupPeer(TenantId(one), NS, f"uid-{one}") for one in members if one != tenant and tenant not in deaf]
        return {"g": GroupPolicy(epochs, tuple(peers))}

    return NodePolicy(
        version,
        {
            TenantId(tenant): TenantPolicy(
                TenantState.SUSPENDED if tenant in suspended else TenantState.ACTIVE,
                {Tier.DRAM: TierQuota(reserved * GRANULE_BYTES, limit * GRANULE_BYTES)},
                {NS: NamespacePolicy(f"uid-{tenant}", 1024 * GRANULE_BYTES, (1,), groups=groups(tenant))},
            )
            for tenant in tenants
        },
    )


class SharedNode(Node):
    """Partitions are those of the group, unless a test opens another."""

    def partition(self, tenant: str, epoch: int = 1, group: str = "g") -> Partition:
        return open_partition(
            self.core.policy,
            claims_tenant=TenantId(tenant),
            claims_namespace=NS,
            requested_namespace=NS,
            epoch=epoch,
            group_uid=group,
        )

    def get(self, tenant: str, *numbers: int, epoch: int = 1) -> list[Pin | None]:
        pins = self.core.get_start(self.partition(tenant, epoch), [key_of(n) for n in numbers], self.tick())
        self.core.check_invariants()
        return pins

    def end(self, pins: list[Pin | None]) -> None:
        self.core.get_end(pins)
        self.core.check_invariants()

    def reads(self, tenant: str, *numbers: int, epoch: int = 1) -> list[int]:
        """Which of the keys a get finds; a lookup must say the same."""
        pins = self.get(tenant, *numbers, epoch=epoch)
        found = [number for number, pin in zip(numbers, pins, strict=True) if pin is not None]
        assert all(pin is None or pin.checksum == number for number, pin in zip(numbers, pins, strict=True))
        self.end(pins)
        assert self.sees(tenant, *numbers, epoch=epoch) == found
        return found

    def sees(self, tenant: str, *numbers: int, epoch: int = 1) -> list[int]:
        partition = self.partition(tenant, epoch)
        _, there = self.core.lookup(partition, [key_of(n) for n in numbers], self.now_ns)
        return [number for number, is_there in zip(numbers, there, strict=True) if is_there]


def shared_node(capacity: int = 100, **options: object) -> SharedNode:
    return SharedNode(capacity, shared_policy(1, **options))  # type: ignore[arg-type]


def test_i2_members_read_each_others_entries_and_nobody_else_does() -> None:
    node = shared_node()
    assert node.put("a", 1) is None and node.put("b", 2) is None
    assert node.reads("a", 1, 2, 3) == [1, 2]
    assert node.reads("b", 1, 2, 3) == [1, 2]
    with pytest.raises(PermissionDeniedError) as refused:
        node.partition("c")
    with pytest.raises(PermissionDeniedError) as absent:
        node.partition("c", group="nowhere")
    assert str(refused.value) == str(absent.value) and refused.value.reason == "GROUP_NOT_AVAILABLE"
    # What is a member's alone is no peer's, and what is the group's is not in the member's own partition.
    own = node.partition("a", group="")
    assert node.core.put_start(own, key_of(9), GRANULE_BYTES, node.tick())
    assert node.sees("b", 9) == [] and node.sees("a", 9) == []
    assert node.core.lookup(own, [key_of(1), key_of(2)], node.now_ns)[1] == b"\0\0"


def test_the_longest_prefix_goes_on_from_one_member_to_the_other() -> None:
    node = shared_node()
    for number, tenant in enumerate("abab"):
        assert node.put(tenant, number) is None
    keys = [key_of(number) for number in (0, 1, 2, 3, 4, 0)]
    for tenant in MEMBERS:
        assert node.core.lookup(node.partition(tenant), keys, node.now_ns) == (4, b"\1\1\1\1\0\1")


@pytest.mark.parametrize("named", [("a",), ("b",)])
def test_i2_half_of_a_policy_shares_nothing(named: Sequence[str]) -> None:
    node = shared_node(named=named)
    assert node.put(named[0], 1) is None
    assert peer_partitions(node.core.policy, node.partition(named[0])) == ()


@pytest.mark.parametrize("deaf", MEMBERS)
def test_i2_who_does_not_name_a_peer_is_not_read_by_it(deaf: str) -> None:
    node = shared_node(deaf=(deaf,))
    assert node.put("a", 1) is None and node.put("b", 2) is None
    assert node.reads("a", 1, 2) == [1] and node.reads("b", 1, 2) == [2]


def test_i2_nothing_is_shared_with_a_suspended_or_deleted_member() -> None:
    node = shared_node()
    assert node.put("a", 1) is None and node.put("b", 2) is None
    node.apply(shared_policy(2, suspended=("b",)))
    assert node.reads("a", 1, 2) == [1]
    node.apply(shared_policy(3))
    assert node.reads("a", 1, 2) == [1, 2]
    node.apply(shared_policy(4, tenants=("a", "c")))
    assert node.reads("a", 1, 2) == [1]
    assert TenantId("b") not in node.core.usage().tenants


def test_i12_a_new_epoch_ends_what_was_shared_before_for_every_member() -> None:
    node = shared_node()
    assert node.put("a", 1) is None and node.put("b", 2) is None
    node.apply(shared_policy(2, members=("a",), epochs=(2,)))  # b has left
    for tenant in MEMBERS:
        with pytest.raises(PermissionDeniedError):
            node.partition(tenant, epoch=1)
    assert node.reads("a", 1, 2, epoch=2) == []
    assert node.used("a") == node.used("b") == 0


def test_i2_a_node_that_is_out_of_touch_shares_nothing_and_serves_what_is_its_members_own() -> None:
    node = shared_node()
    assert node.put("a", 1) is None and node.put("b", 2) is None
    node.core.renew(Lease(node.now_ns + 10_000_000), node.now_ns)
    assert node.reads("a", 1, 2) == [1, 2]
    node.now_ns += 10_000_000
    assert node.reads("a", 1, 2) == [1]
    assert node.core.lookup(node.partition("a"), [key_of(2)])[1] == b"\0"  # nor where nobody says what time it is
    node.core.renew(Lease(node.now_ns + 10_000_000), node.now_ns)
    assert node.reads("a", 1, 2) == [1, 2]
    # A lease of a policy that the node does not have yet is none: the newer one may have ended the sharing.
    node.core.renew(Lease(version=2), node.now_ns)
    assert node.reads("a", 1, 2) == [1]
    node.apply(shared_policy(2))
    assert node.reads("a", 1, 2) == [1, 2]


def test_i4_each_pays_for_what_it_has_put_and_a_hit_is_the_readers() -> None:
    node = shared_node()
    assert node.put("a", 1, 3) is None
    node.reads("b", 1, 7)
    usage = node.core.usage().tenants
    a, b = usage[TenantId("a")].counters, usage[TenantId("b")].counters
    assert (node.used("a"), node.used("b")) == (3, 0)
    assert (b.get_hits, b.peer_hits, b.get_misses, b.get_bytes) == (1, 1, 1, 3 * GRANULE_BYTES)
    assert (a.get_hits, a.peer_hits, a.get_misses, a.get_bytes) == (0, 0, 0, 0)


def test_i6_a_put_of_what_a_peer_has_is_stored_for_oneself() -> None:
    """What is acknowledged must not go with somebody else's delete: each has a copy in its own budget."""
    node = shared_node()
    assert node.put("a", 1) is None
    assert node.put("b", 1) is None
    assert (node.used("a"), node.used("b")) == (1, 1)
    assert reason_of(node.put("b", 1)) == "ALREADY_EXISTS"
    assert node.core.delete(node.partition("a"), [key_of(1)]) == 1
    assert node.reads("b", 1) == [1] and node.reads("a", 1) == [1]  # a reads b's now
    assert node.core.delete(node.partition("a"), [key_of(1)]) == 0  # and cannot delete it
    assert node.reads("b", 1) == [1]


@pytest.mark.parametrize("ends", ["delete", "evict", "tenant", "epoch", "suspend"])
def test_i7_what_a_peer_reads_stays_until_it_has_left_whatever_becomes_of_its_owner(ends: str) -> None:
    node = shared_node(10, limit=4)
    assert node.put("a", 1, 2) is None
    pins = node.get("b", 1)
    assert pins[0] is not None and pins[0].is_loan
    if ends == "delete":
        assert node.core.delete(node.partition("a"), [key_of(1)]) == 1
    elif ends == "evict":
        for number in range(10, 20):
            assert node.put("a", number) is None
        assert node.reads("a", 1) == [1]  # its bytes are held: others go
    elif ends == "tenant":
        node.apply(shared_policy(2, tenants=("b", "c"), limit=4))
    elif ends == "epoch":
        node.apply(shared_policy(2, epochs=(2,), limit=4))
    else:
        node.apply(shared_policy(2, suspended=("a",), limit=4))
    # No byte of it is handed out anew, although somebody asks for all that there is.
    own = node.partition("c", group="")
    for number in range(100, 106):
        ticket = node.core.put_start(own, key_of(number), GRANULE_BYTES, node.tick())
        if not isinstance(ticket, PutRefused):
            assert not pins[0].offset <= ticket.offset < pins[0].offset + pins[0].size_bytes
            assert node.core.put_commit(ticket, number, node.tick()) is None
        node.core.check_invariants()
    held = node.core.usage().tenants[TenantId("a")]
    assert held.used_bytes >= pins[0].size_bytes  # charged to its owner for as long as it is there (I4, I8)
    node.end(pins)
    if ends in ("delete", "epoch"):
        assert node.used("a") == 0
    elif ends == "tenant":
        assert TenantId("a") not in node.core.usage().tenants


def test_i5_loans_hold_at_most_half_of_their_owner_whose_puts_go_on() -> None:
    node = shared_node(limit=8)
    node.fill("a", range(8))
    pins = node.get("b", *range(8))
    assert sum(pin is not None for pin in pins) == 8 // LENT_PARTS
    assert node.core.usage().tenants[TenantId("b")].counters.hits_held_back == 4
    again = node.get("b", *range(4))  # the same entries once more hold nothing more
    assert all(again)
    for number in range(100, 120):
        assert node.put("a", number) is None
    node.end(pins)
    node.end(again)
    assert node.core._pool.loans.lent_bytes(node.core._pool.tenants[TenantId("a")]) == 0


def test_i5_a_peers_reads_do_not_choose_what_its_owner_keeps() -> None:
    """The owner's own order alone says who goes: else a neighbour's interest would push out what the owner uses."""
    node, alone = shared_node(limit=4), shared_node(limit=4)
    for one in (node, alone):
        one.fill("a", range(4))
    for _ in range(5):
        node.reads("b", 0)
    for number in range(10, 13):
        assert node.put("a", number) is None and alone.put("a", number) is None
    numbers = [*range(4), *range(10, 13)]
    assert node.sees("a", *numbers) == alone.sees("a", *numbers)


def test_i5_a_members_churn_leaves_the_others_reservation_alone() -> None:
    node = shared_node(20, limit=20, reserved=6)
    node.fill("a", range(6))
    for number in range(1000, 1100):
        node.put("b", number)
    assert node.reads("a", *range(6)) == list(range(6))
    assert node.reads("b", 0, 1) == [0, 1]


def test_i4_a_put_in_flight_when_the_group_ends_is_refused_and_freed() -> None:
    node = shared_node()
    ticket = node.started("a", 1)
    node.apply(shared_policy(2, members=("b",)))
    refused = node.core.put_commit(ticket, 1, node.tick())
    assert isinstance(refused, PutRefused) and refused.error.reason == "GROUP_NOT_AVAILABLE"
    node.core.check_invariants()
    assert node.used("a") == 0


def test_two_namespaces_of_one_name_are_told_apart_where_they_are_stored() -> None:
    node = shared_node()
    partition = node.partition("a")
    assert split_storage_uid(partition.storage_uid) == ("uid-a", "g")
    assert node.partition("a", group="").storage_uid == "uid-a"


def test_i12_a_warm_restart_takes_over_what_is_still_shared_and_no_more() -> None:
    arena = ArenaIdentity("node-1", "boot", "generation", 1, 100 * GRANULE_BYTES)
    node = shared_node()
    assert node.put("a", 1) is None and node.put("b", 2) is None
    own = node.partition("a", group="")
    ticket = node.core.put_start(own, key_of(3), GRANULE_BYTES, node.tick())
    assert not isinstance(ticket, PutRefused)
    assert node.core.put_commit(ticket, 3, node.tick()) is None
    saved = b"".join(node.core.snapshot(arena))
    offsets = {ticket.offset: 3}
    for tenant, number in (("a", 1), ("b", 2)):
        (pin,) = node.get(tenant, number)
        assert pin is not None
        offsets[pin.offset] = number
        node.end([pin])

    warm = shared_node()
    adopted = warm.core.adopt(decode_snapshot(saved), lambda offset, _: offsets[offset], warm.tick())
    assert adopted.entries == 3
    assert warm.reads("a", 1, 2, 3) == [1, 2]
    assert warm.core.lookup(own, [key_of(3)])[1] == b"\1"

    cold = SharedNode(100, shared_policy(1, epochs=(2,)))
    assert cold.core.adopt(decode_snapshot(saved), lambda offset, _: offsets[offset], cold.tick()).entries == 1
    assert cold.reads("a", 1, 2, epoch=2) == []
