"""Policies of several nodes that are made of one view: what they share is made once, and each is as if made alone."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from controlplane.db import models
from controlplane.node.policy_encode import encode_delta, encode_policy
from controlplane.node.policy_rows import (
    NamespaceRow,
    PolicyRows,
    QuotaRow,
    RatesRow,
    RevocationRow,
    SaltEpochRow,
    SharedNamespace,
    TenantRow,
)
from controlplane.node.push import View
from controlplane.node.snapshot import PolicyComposer, compose_policy
from dataplane.policy_codec import decode_delta, decode_snapshot
from saltern.names import NamespaceId, NodeId, TenantId
from tenants.policy import TenantState
from tenants.quota import Tier
from tenants.tokens import KeySet

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = timedelta(seconds=30)
NODES = [NodeId(f"n{number}") for number in range(3)]
CHAT, CODE = NamespaceId("chat"), NamespaceId("code")


def some_rows(seed: int, base_version: int | None) -> PolicyRows:
    """Some ten tenants with whatever a tenant can have; one of those that changed is gone."""
    draw = random.Random(seed)
    names = [TenantId(f"t{number}") for number in range(10)]
    nodes = [
        models.Node(
            id=node,
            dram_capacity_bytes=draw.randint(1, 9) << 20,
            ssd_capacity_bytes=draw.choice([0, 1 << 30]),
            lease_from_time=NOW if draw.random() < 0.2 else None,
        )
        for node in NODES
    ]
    limits = {(name, tier): draw.randint(0, 1 << 20) for name in names for tier in Tier}

    def limit() -> int | None:
        return draw.choice([None, None, draw.randint(0, 1 << 16)])

    namespaces = [
        NamespaceRow(name, namespace, UUID(int=draw.getrandbits(128)), 4096, 16, limit(), limit())
        for name in names
        for namespace in draw.choice([(), (CHAT,), (CHAT, CODE)])
    ]
    members = draw.sample(namespaces, 3)
    return PolicyRows(
        version=7,
        base_version=base_version,
        changed=None if base_version is None else frozenset([*names, TenantId("gone")]),
        tenants=[
            TenantRow(name, UUID(int=draw.getrandbits(128)), draw.choice(list(TenantState)), NOW) for name in names
        ],
        quotas=[
            QuotaRow(name, tier, draw.choice([0, limit_bytes // 2]), limit_bytes, 100)
            for (name, tier), limit_bytes in limits.items()
        ],
        rates=[RatesRow(name, draw.randint(0, 99), draw.randint(0, 99), 0) for name in draw.sample(names, 4)],
        namespaces=namespaces,
        salt_epochs=[SaltEpochRow(name, epoch) for name in names for epoch in range(1, draw.randint(2, 4))],
        nodes=nodes,
        granted_bytes={
            node: {key: draw.randint(0, limit_bytes) for key, limit_bytes in limits.items() if draw.random() < 0.8}
            for node in NODES
        },
        namespace_granted_bytes={
            (row.tenant_id, row.id, Tier.DRAM): {NODES[0]: draw.randint(0, 1 << 15)}
            for row in namespaces
            if row.dram_limit_bytes is not None and draw.random() < 0.5
        },
        revocations=[RevocationRow(draw.choice([None, *names]), f"{number:032x}", 99) for number in range(9)],
        shared=[SharedNamespace("g" * 8, 3, row.tenant_id, row.id, str(row.uid)) for row in members],
        key_set=KeySet(issuer="saltern-test", keys={}),
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_that_shares_what_nodes_have_in_common_is_the_one_made_alone(seed: int) -> None:
    rows = some_rows(seed, None)
    view = View(PolicyComposer(rows))
    for node in [*NODES, *NODES, NodeId("unknown")]:
        alone = compose_policy(rows, node)
        snapshot = view.snapshot(node, NOW, LEASE)
        assert snapshot == encode_policy(alone, rows.key_set, NOW, LEASE)
        assert decode_snapshot(snapshot)[0] == alone


@pytest.mark.parametrize("seed", range(20))
def test_a_delta_that_shares_what_nodes_have_in_common_is_the_one_made_alone(seed: int) -> None:
    rows = some_rows(seed, 5)
    assert rows.changed is not None
    view = View(PolicyComposer(rows))
    for node in [*NODES, *NODES]:
        alone = compose_policy(rows, node)
        delta = view.delta(node, NOW, LEASE)
        assert delta == encode_delta(
            alone, 5, rows.changed, key_set=rows.key_set, create_time=NOW, lease_duration=LEASE
        )
        decoded, _ = decode_delta(delta)
        assert (decoded.changed, decoded.removed) == (alone.tenants, {"gone"})


@pytest.mark.parametrize("seed", range(20))
def test_i4_shares_of_all_nodes_are_within_the_quota_that_is_leased(seed: int) -> None:
    rows = some_rows(seed, None)
    composer = PolicyComposer(rows)
    for node in NODES:
        waits = next(row for row in rows.nodes if row.id == node).lease_from_time is not None
        policy = composer.policy(node)
        for row in rows.quotas:
            share = policy.tenants[row.tenant_id].tiers[row.tier]
            leased_bytes = rows.granted_bytes[node].get((row.tenant_id, row.tier), 0)
            assert share.limit_bytes == (0 if waits else min(leased_bytes, row.limit_bytes))
            assert share.reserved_bytes <= share.limit_bytes
