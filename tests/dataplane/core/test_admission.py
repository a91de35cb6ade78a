from __future__ import annotations

import pytest

from dataplane.core.admission import check_partition, open_partition
from dataplane.core.partition import Partition
from saltern.errors import PermissionDeniedError
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState

POLICY = NodePolicy(
    1,
    {
        TenantId("a"): TenantPolicy(
            TenantState.ACTIVE,
            {},
            {
                NamespaceId("mine"): NamespacePolicy("u1", 4096, (2, 3)),
                NamespaceId("other"): NamespacePolicy("u2", 4096, (1,)),
            },
        ),
        TenantId("b"): TenantPolicy(TenantState.ACTIVE, {}, {NamespaceId("theirs"): NamespacePolicy("u3", 4096, (1,))}),
        TenantId("off"): TenantPolicy(
            TenantState.SUSPENDED, {}, {NamespaceId("mine"): NamespacePolicy("u4", 4096, (1,))}
        ),
    },
)


def attempt(tenant: str, claimed: str, requested: str, epoch: int) -> Partition:
    return open_partition(
        POLICY,
        claims_tenant=TenantId(tenant),
        claims_namespace=NamespaceId(claimed),
        requested_namespace=NamespaceId(requested),
        epoch=epoch,
    )


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_readable_epoch_of_the_own_namespace_opens(epoch: int) -> None:
    partition = attempt("a", "mine", "mine", epoch)
    assert partition == Partition(TenantId("a"), NamespaceId("mine"), "u1", epoch)
    assert check_partition(POLICY, partition) is None


@pytest.mark.parametrize(
    ("tenant", "claimed", "requested", "epoch", "reason"),
    [
        ("a", "absent", "absent", 1, "NAMESPACE_NOT_AVAILABLE"),
        ("a", "theirs", "theirs", 1, "NAMESPACE_NOT_AVAILABLE"),
        ("a", "mine", "theirs", 1, "NAMESPACE_NOT_AVAILABLE"),
        ("a", "mine", "other", 1, "NAMESPACE_NOT_AVAILABLE"),
        ("nobody", "mine", "mine", 1, "NAMESPACE_NOT_AVAILABLE"),
        ("off", "mine", "mine", 1, "TENANT_SUSPENDED"),
        ("a", "mine", "mine", 1, "EPOCH_NOT_AVAILABLE"),
        ("a", "mine", "mine", 4, "EPOCH_NOT_AVAILABLE"),
    ],
)
def test_i10_what_the_policy_does_not_open_is_refused(
    tenant: str, claimed: str, requested: str, epoch: int, reason: str
) -> None:
    with pytest.raises(PermissionDeniedError) as refusal:
        attempt(tenant, claimed, requested, epoch)
    assert refusal.value.reason == reason
    assert refusal.value.hint


def test_i2_absent_and_foreign_get_the_same_answer() -> None:
    answers = []
    for requested in ("theirs", "absent"):
        with pytest.raises(PermissionDeniedError) as refusal:
            attempt("a", "mine", requested, 1)
        error = refusal.value
        answers.append((error.message.replace(requested, "X"), error.reason, error.hint, error.metadata))
    assert answers[0] == answers[1]


def test_i12_a_namespace_of_the_same_name_is_another_one() -> None:
    stale = Partition(TenantId("a"), NamespaceId("mine"), "u0", 3)
    refused = check_partition(POLICY, stale)
    assert refused is not None and refused.reason == "NAMESPACE_NOT_AVAILABLE"
