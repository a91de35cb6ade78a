"""Node policies are values: complete, immutable, without a secret."""

from __future__ import annotations

import dataclasses

import pytest

from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota


def policy(version: int = 1) -> NodePolicy:
    namespaces = {NamespaceId("chat"): NamespacePolicy("uid", 1 << 20, (1, 2))}
    tenant = TenantPolicy(TenantState.ACTIVE, {Tier.DRAM: TierQuota(0, 1 << 30)}, namespaces)
    return NodePolicy(version, {TenantId("acme"): tenant})


def test_policies_compare_by_value() -> None:
    assert policy() == policy()
    assert policy(1) != policy(2)


def test_an_empty_policy_knows_nobody() -> None:
    empty = NodePolicy(0)
    assert not empty.tenants
    with pytest.raises(TypeError):
        empty.tenants[TenantId("acme")] = policy().tenants[TenantId("acme")]  # type: ignore[index]


def test_policies_cannot_be_changed() -> None:
    for value in (policy(), policy().tenants[TenantId("acme")], NamespacePolicy("uid", 1, (1,))):
        field = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)


def test_no_token_is_too_old_unless_the_policy_says_so() -> None:
    assert policy().tenants[TenantId("acme")].min_issue_time_s == 0
