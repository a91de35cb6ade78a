"""Policies that are made of deltas are those that there were, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern.errors import FailedPreconditionError
from saltern.names import TenantId
from tenants.policy import NodePolicy, TenantPolicy, TenantState
from tenants.policy_delta import PolicyDelta, apply_delta
from tenants.quota import Tier, TierQuota

Tenants = dict[TenantId, TenantPolicy]


def rules(limit_bytes: int) -> TenantPolicy:
    return TenantPolicy(TenantState.ACTIVE, {Tier.DRAM: TierQuota(0, limit_bytes)}, {})


def between(base: NodePolicy, new: NodePolicy) -> PolicyDelta:
    return PolicyDelta(
        base.version,
        new.version,
        {name: policy for name, policy in new.tenants.items() if base.tenants.get(name) != policy},
        frozenset(base.tenants.keys() - new.tenants.keys()),
    )


#: Each step changes tenants or, by None, removes them.
STEPS = st.lists(
    st.dictionaries(st.sampled_from("abcde"), st.none() | st.integers(0, 3), min_size=1), min_size=1, max_size=12
)


def history(steps: list[dict[str, int | None]]) -> list[NodePolicy]:
    policies, tenants = [NodePolicy(version=1)], Tenants()
    for version, step in enumerate(steps, 2):
        for name, limit_bytes in step.items():
            tenants.pop(TenantId(name), None)
            if limit_bytes is not None:
                tenants[TenantId(name)] = rules(limit_bytes)
        policies.append(NodePolicy(version, dict(tenants)))
    return policies


@given(steps=STEPS, data=st.data())
def test_a_snapshot_and_the_deltas_after_it_are_the_later_snapshot(
    steps: list[dict[str, int | None]], data: st.DataObject
) -> None:
    policies = history(steps)
    at = data.draw(st.integers(0, len(policies) - 1))
    policy = policies[at]
    while at + 1 < len(policies):
        upto = data.draw(st.integers(at + 1, len(policies) - 1), label="several changes may come as one")
        policy, at = apply_delta(policy, between(policies[at], policies[upto])), upto
        assert policy.version == policies[at].version
        assert policy.tenants == policies[at].tenants


@given(steps=STEPS, data=st.data())
def test_whatever_is_lost_doubled_or_out_of_order_the_policy_is_one_that_there_was(
    steps: list[dict[str, int | None]], data: st.DataObject
) -> None:
    policies = history(steps)
    messages: list[PolicyDelta | NodePolicy] = [*policies]
    messages += [between(old, new) for i, old in enumerate(policies) for new in policies[i + 1 : i + 4]]
    policy = policies[0]
    for message in data.draw(st.lists(st.sampled_from(messages), max_size=30)):
        if isinstance(message, NodePolicy):
            policy = message if message.version >= policy.version else policy
            continue
        try:
            policy = apply_delta(policy, message)
        except FailedPreconditionError as error:
            assert error.reason == "POLICY_BASE_MISMATCH"
        assert policy.tenants == policies[policy.version - 1].tenants


def test_what_a_delta_does_not_touch_is_the_same_object() -> None:
    base = NodePolicy(1, {TenantId("a"): rules(1), TenantId("b"): rules(2)})
    after = apply_delta(base, PolicyDelta(1, 2, {TenantId("b"): rules(3)}))
    assert after.tenants[TenantId("a")] is base.tenants[TenantId("a")]
    assert base.tenants[TenantId("b")] == rules(2), "a policy never changes"


@pytest.mark.parametrize(("base", "version"), [(2, 3), (1, 1), (1, 0), (0, 1)])
def test_a_delta_fits_one_policy_only(base: int, version: int) -> None:
    with pytest.raises(FailedPreconditionError, match="does not fit"):
        apply_delta(NodePolicy(1), PolicyDelta(base, version))
