"""The pushed snapshot: taken whole or refused whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.clock import utc_now
from controlplane.node.policy_encode import encode_policy
from dataplane.core.usage import (
    DropReason,
    EvictionCause,
    NamespaceUsage,
    NodeUsage,
    SsdCounters,
    SsdUsage,
    TenantCounters,
    TenantUsage,
)
from dataplane.policy_codec import SnapshotDecoder, decode_snapshot, encode_usage
from saltern.admin.v1 import quotas_pb2, usage_pb2
from saltern.errors import InvalidArgumentError
from saltern.names import NamespaceId, TenantId
from saltern.node.v1 import node_pb2
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import RATE_MAX, RateLimits, Tier, TierQuota
from tenants.tokens import KeySet
from tests.support.snapshots import KEY, snapshot


def test_a_snapshot_decodes_to_a_policy() -> None:
    policy, key_set = decode_snapshot(snapshot())
    assert policy == NodePolicy(
        7,
        {
            TenantId("acme"): TenantPolicy(
                TenantState.ACTIVE,
                {Tier.DRAM: TierQuota(1, 2, 100)},
                {NamespaceId("chat"): NamespacePolicy("u", 4096, (1, 2))},
                min_issue_time_s=101,  # rounded up (I10)
                rates=RateLimits(operations_per_s=3, bytes_per_s=4),
            )
        },
    )
    assert key_set == KeySet("saltern-1", {"k1": KEY})


def test_a_tenant_that_is_as_in_the_snapshot_before_is_the_same_object_and_no_other_is() -> None:
    decoder = SnapshotDecoder()
    first = node_pb2.PolicySnapshot()
    first.CopyFrom(snapshot())
    blue = first.tenants.add()
    blue.CopyFrom(first.tenants[0])
    blue.tenant_id = "blue"
    before, _ = decoder.decode(first)
    second = node_pb2.PolicySnapshot()
    second.CopyFrom(first)
    second.version += 1
    second.tenants[1].tiers[0].limit_bytes += 1
    after, _ = decoder.decode(second)
    assert after == decode_snapshot(second)[0]
    assert after.tenants[TenantId("acme")] is before.tenants[TenantId("acme")]
    assert after.tenants[TenantId("blue")] != before.tenants[TenantId("blue")]
    second.tenants[1].state = 99
    with pytest.raises(InvalidArgumentError):
        decoder.decode(second)
    again, _ = decoder.decode(first)
    assert again == before and again.tenants[TenantId("acme")] is before.tenants[TenantId("acme")]


def test_what_the_control_plane_encodes_the_node_decodes() -> None:
    policy, key_set = decode_snapshot(snapshot())
    assert decode_snapshot(encode_policy(policy, key_set, utc_now())) == (policy, key_set)


def test_limits_of_namespaces_arrive_as_they_were_sent_and_their_books_go_back() -> None:
    policy, key_set = decode_snapshot(snapshot())
    tenant = policy.tenants[TenantId("acme")]
    chat = replace(tenant.namespaces[NamespaceId("chat")], tier_limits={Tier.DRAM: 7, Tier.SSD: 0})
    limited = NodePolicy(7, {TenantId("acme"): replace(tenant, namespaces={NamespaceId("chat"): chat})})
    assert decode_snapshot(encode_policy(limited, key_set, utc_now()))[0] == limited

    part = NamespaceUsage("u", 1, 2, 3, 4, limit_bytes=7, ssd_used_bytes=5, ssd_entries=6)
    books = TenantUsage(0, 0, 0, 0, 0, 0, 0, 0, counters=TenantCounters(), namespaces={NamespaceId("chat"): part})
    [told] = encode_usage(NodeUsage(1, 0, 0, 0, {TenantId("acme"): books}))[0].namespaces
    assert (told.namespace_id, told.uid, told.get_hits, told.get_misses) == ("chat", "u", 3, 4)
    dram, ssd = told.tiers
    assert (dram.tier, dram.used_bytes, dram.entries, dram.limit_bytes) == (quotas_pb2.TIER_DRAM, 1, 2, 7)
    assert (ssd.tier, ssd.used_bytes, ssd.entries) == (quotas_pb2.TIER_SSD, 5, 6) and not ssd.HasField("limit_bytes")


@pytest.mark.parametrize(
    "limits",
    [
        [node_pb2.TierLimit(limit_bytes=1)],
        [node_pb2.TierLimit(tier=quotas_pb2.TIER_DRAM, limit_bytes=-1)],
        [node_pb2.TierLimit(tier=quotas_pb2.TIER_DRAM, limit_bytes=2**53 + 1)],
        [node_pb2.TierLimit(tier=quotas_pb2.TIER_DRAM)] * 2,
    ],
)
def test_i4_a_limit_that_makes_no_sense_refuses_the_policy(limits: list[node_pb2.TierLimit]) -> None:
    message = snapshot()
    message.tenants[0].namespaces[0].tier_limits.extend(limits)
    with pytest.raises(InvalidArgumentError) as caught:
        decode_snapshot(message)
    assert caught.value.reason == "POLICY_MALFORMED"


def test_a_control_plane_that_knows_no_rates_sets_none() -> None:
    message = snapshot()
    message.tenants[0].ClearField("rates")
    assert decode_snapshot(message)[0].tenants[TenantId("acme")].rates == RateLimits()


def _group(message: node_pb2.PolicySnapshot) -> node_pb2.GroupPolicy:
    """A sharing group, added to the namespace."""
    group = message.tenants[0].namespaces[0].groups.add(uid="g", epochs=[1, 2])
    group.peers.add(tenant_id="blue", namespace_id="chat", namespace_uid="v")
    return group


def _group_of(message: node_pb2.PolicySnapshot) -> node_pb2.GroupPolicy:
    """The group that is there, or else one that is added."""
    groups = message.tenants[0].namespaces[0].groups
    return groups[0] if groups else _group(message)


def test_sharing_groups_arrive_as_they_were_sent() -> None:
    message = snapshot()
    _group(message)
    policy, key_set = decode_snapshot(message)
    peer = GroupPeer(TenantId("blue"), NamespaceId("chat"), "v")
    assert policy.tenants[TenantId("acme")].namespaces[NamespaceId("chat")].groups == {
        "g": GroupPolicy((1, 2), (peer,))
    }
    assert decode_snapshot(encode_policy(policy, key_set, utc_now())) == (policy, key_set)


MALFORMED: dict[str, Callable[[node_pb2.PolicySnapshot], object]] = {
    "no version": lambda s: s.ClearField("version"),
    "no issuer": lambda s: s.key_set.ClearField("issuer"),
    "a key that is not base64url": lambda s: setattr(s.key_set.keys[0], "x", "***"),
    "a key of another curve": lambda s: setattr(s.key_set.keys[0], "crv", "X25519"),
    "a key without a name": lambda s: setattr(s.key_set.keys[0], "kid", ""),
    "a key twice": lambda s: s.key_set.keys.add().CopyFrom(s.key_set.keys[0]),
    "a tenant twice": lambda s: s.tenants.add().CopyFrom(s.tenants[0]),
    "a tenant without a state": lambda s: s.tenants[0].ClearField("state"),
    "a tenant of an unknown state": lambda s: setattr(s.tenants[0], "state", 77),
    "a tenant's name with a slash": lambda s: setattr(s.tenants[0], "tenant_id", "a/b"),
    "the platform as a tenant": lambda s: setattr(s.tenants[0], "tenant_id", "platform"),
    "an unknown tier": lambda s: setattr(s.tenants[0].tiers[0], "tier", 9),
    "a tier twice": lambda s: s.tenants[0].tiers.add().CopyFrom(s.tenants[0].tiers[0]),
    "a negative limit": lambda s: setattr(s.tenants[0].tiers[0], "limit_bytes", -1),
    "a reservation above the limit": lambda s: setattr(s.tenants[0].tiers[0], "reserved_bytes", 3),
    "a weight out of range": lambda s: setattr(s.tenants[0].tiers[0], "weight", 5000),
    "a namespace without a uid": lambda s: setattr(s.tenants[0].namespaces[0], "uid", ""),
    "a namespace of blocks too large": lambda s: setattr(s.tenants[0].namespaces[0], "block_bytes", 2**40),
    "a namespace twice": lambda s: s.tenants[0].namespaces.add().CopyFrom(s.tenants[0].namespaces[0]),
    "a negative rate of operations": lambda s: setattr(s.tenants[0].rates, "operations_per_s", -1),
    "a rate of bytes above every other": lambda s: setattr(s.tenants[0].rates, "bytes_per_s", RATE_MAX + 1),
    "a negative rate of writes": lambda s: setattr(s.tenants[0].rates, "ssd_write_bytes_per_s", -(2**63)),
    "epochs out of order": lambda s: s.tenants[0].namespaces[0].epochs.append(1),
    "a negative epoch": lambda s: s.tenants[0].namespaces[0].epochs.insert(0, -1),
    "a namespace's uid that joins two": lambda s: setattr(s.tenants[0].namespaces[0], "uid", "u/g"),
    "a group without a uid": lambda s: setattr(_group(s), "uid", ""),
    "a group's uid that joins two": lambda s: setattr(_group(s), "uid", "g/h"),
    "a group's uid without end": lambda s: setattr(_group(s), "uid", "g" * 10_000),
    "a group twice": lambda s: (_group(s), _group(s)),
    "a group without epochs": lambda s: _group(s).ClearField("epochs"),
    "a group's epochs out of order": lambda s: _group(s).epochs.append(1),
    "a group with a negative epoch": lambda s: _group(s).epochs.insert(0, -1),
    "a peer twice": lambda s: _group(s).peers.add(tenant_id="blue", namespace_id="chat", namespace_uid="v"),
    "a namespace that is its own peer": lambda s: setattr(_group(s).peers[0], "namespace_uid", "u"),
    "a peer without a uid": lambda s: setattr(_group(s).peers[0], "namespace_uid", ""),
    "the platform as a peer": lambda s: setattr(_group(s).peers[0], "tenant_id", "platform"),
    "a peer's name with a slash": lambda s: setattr(_group(s).peers[0], "namespace_id", "a/b"),
    "more peers than a group has": lambda s: [
        _group_of(s).peers.add(tenant_id="blue", namespace_id="chat", namespace_uid=f"v{n}") for n in range(16)
    ],
}


@pytest.mark.parametrize("case", MALFORMED)
def test_one_malformed_part_refuses_the_whole(case: str) -> None:
    message = snapshot()
    MALFORMED[case](message)
    with pytest.raises(InvalidArgumentError) as caught:
        decode_snapshot(message)
    assert caught.value.reason == "POLICY_MALFORMED"


@given(st.binary(max_size=200))
def test_any_message_is_decoded_or_refused(data: bytes) -> None:
    message = node_pb2.PolicySnapshot()
    try:
        message.ParseFromString(data)
    except Exception:
        return
    with pytest.raises(InvalidArgumentError):
        decode_snapshot(message)


def test_i8_reports_hold_every_counter_of_both_tiers() -> None:
    counters = TenantCounters(get_hits=1, get_misses=2, get_bytes=3, put_bytes=4, puts_stored=5)
    counters.refused("NODE_FULL")
    counters.evicted(10, EvictionCause.NEIGHBOUR)
    counters.evicted(20, EvictionCause.OWN_LIMIT)
    counters.took(30)
    activity = SsdCounters(1, 2, 3, 4, 5, {DropReason.NO_ROOM: 6}, 7, 8, 9, 10)
    ssd = SsdUsage(
        reserved_bytes=50,
        limit_bytes=99,
        used_bytes=40,
        leaving_bytes=0,
        live_bytes=40,
        entries=2,
        segments=1,
        counters=activity,
    )
    books = TenantUsage(
        reserved_bytes=5,
        limit_bytes=99,
        used_bytes=12,
        resident_bytes=12,
        in_flight_bytes=0,
        slack_bytes=0,
        held_bytes=0,
        entries=3,
        counters=counters,
        ssd=ssd,
    )

    (usage,) = encode_usage(NodeUsage(1, 100, 88, 88, {TenantId("acme"): books}, 100))

    assert usage == node_pb2.TenantUsage(
        tenant_id="acme",
        tiers=[
            node_pb2.TenantTierUsage(tier=quotas_pb2.TIER_DRAM, used_bytes=12, entries=3, borrowed_bytes=7),
            node_pb2.TenantTierUsage(tier=quotas_pb2.TIER_SSD, used_bytes=40, entries=2, lent_bytes=10),
        ],
        get_hits=1,
        get_misses=2,
        get_bytes=3,
        put_bytes=4,
        puts_stored=5,
        puts_refused=1,
        evictions=2,
        evicted_bytes=30,
        evictions_by_cause={"neighbour": 1, "own-limit": 1},
        evicted_bytes_by_cause={"neighbour": 10, "own-limit": 20},
        refused_by_reason={"NODE_FULL": 1},
        taken_entries=1,
        taken_bytes=30,
        demotions_dropped_by_reason={"no-room": 6},
        ssd=usage_pb2.SsdActivity(
            reads=1,
            read_bytes=2,
            read_failures=3,
            demotions=4,
            demoted_bytes=5,
            demotions_dropped=6,
            relocations=7,
            written_bytes=8,
            evictions=9,
            lost=10,
        ),
    )
