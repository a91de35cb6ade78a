"""What turns one policy into a later one: the tenants that changed, each of them whole.

For any history of policies and any u <= v, ``policy(u)`` with the deltas from u to v is ``policy(v)``. A delta fits one
version only, so that one that is lost, repeated or out of order is noticed and never makes a policy that there was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from saltern.errors import FailedPreconditionError
from saltern.names import TenantId
from tenants.policy import NodePolicy, TenantPolicy


@dataclass(frozen=True, slots=True)
class PolicyDelta:
    """From the policy ``base_version`` to ``version``.

    Attributes:
        changed: new tenants, and those that are not as they were.
        removed: tenants that are gone.
    """

    base_version: int
    version: int
    changed: Mapping[TenantId, TenantPolicy] = field(default_factory=lambda: MappingProxyType({}))
    removed: frozenset[TenantId] = frozenset()

    @property
    def touched(self) -> tuple[TenantId, ...]:
        """Every tenant that it says something of."""
        return (*self.changed, *self.removed)


def apply_delta(policy: NodePolicy, delta: PolicyDelta) -> NodePolicy:
    """The policy that ``delta`` makes of ``policy``; rules of tenants that it does not touch are the same objects.

    Raises:
        FailedPreconditionError: POLICY_BASE_MISMATCH: it is for another policy, or leads nowhere.
    """
    if delta.base_version != policy.version or delta.version <= delta.base_version:
        raise FailedPreconditionError(
            f"a delta from policy {delta.base_version} to {delta.version} does not fit policy {policy.version}",
            reason="POLICY_BASE_MISMATCH",
            hint="push a snapshot",
        )
    # Of a proxy dict() would go through every key: ten times as long.
    known = policy.tenants
    tenants = known.copy() if isinstance(known, dict | MappingProxyType) else dict(known)
    for tenant in delta.removed:
        tenants.pop(tenant, None)
    tenants.update(delta.changed)
    return NodePolicy(version=delta.version, tenants=MappingProxyType(tenants))
