"""What a node must know to serve: a snapshot of tenants, quotas, namespaces and epochs, as pure values.

A snapshot is complete: what it does not name does not exist. It holds no secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from saltern.names import NamespaceId, TenantId
from tenants.quota import NO_RATE_LIMITS, RateLimits, Tier, TierQuota
from tenants.revocation import NO_REVOCATIONS, RevocationSet


class TenantState(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class GroupPeer:
    """Another member of a sharing group, that has accepted: a namespace of a tenant."""

    tenant: TenantId
    namespace: NamespaceId
    namespace_uid: str


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """A sharing group as one of its members sees it (I2).

    Each member's entries lie in its own budget; a session of the group reads its own and those of the peers.

    Attributes:
        epochs: salt epochs of the group that may be read, ascending; the last one may be written.
        peers: the other members.
    """

    epochs: tuple[int, ...]
    peers: tuple[GroupPeer, ...]


@dataclass(frozen=True, slots=True)
class NamespacePolicy:
    """One namespace as a node sees it.

    Attributes:
        uid: distinguishes a namespace from a deleted one of the same name (I12).
        block_bytes: the largest entry, in bytes.
        epochs: salt epochs that may be read, ascending; the last one may be written.
        tier_limits: this node's share of the namespace's own limits in bytes; a tier that is not named has none.
        groups: sharing groups that the namespace is a member of, by uid.
        block_tokens: tokens of one block, which a hit saves; 0 where the control plane does not say.
    """

    uid: str
    block_bytes: int
    epochs: tuple[int, ...]
    tier_limits: Mapping[Tier, int] = field(default_factory=lambda: MappingProxyType({}))
    groups: Mapping[str, GroupPolicy] = field(default_factory=lambda: MappingProxyType({}))
    block_tokens: int = 0

    def epochs_of(self, group_uid: str) -> tuple[int, ...]:
        """Epochs of a sharing group, ascending, or of the namespace's own salt for an empty uid; () for no member."""
        if not group_uid:
            return self.epochs
        group = self.groups.get(group_uid)
        return () if group is None else group.epochs


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """One tenant as a node sees it: its share of the quota on this node and its namespaces.

    Attributes:
        min_issue_time_s: tokens issued before this Unix time are refused.
        rates: this node's share of the tenant's rate limits.
        revocations: single tokens, and tokens of single API keys, that are refused.
        uid: distinguishes a tenant from a deleted one of the same name; empty where the control plane does not say.
    """

    state: TenantState
    tiers: Mapping[Tier, TierQuota]
    namespaces: Mapping[NamespaceId, NamespacePolicy]
    min_issue_time_s: int = 0
    rates: RateLimits = NO_RATE_LIMITS
    revocations: RevocationSet = NO_REVOCATIONS
    uid: str = ""


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """A complete snapshot; a higher version replaces a lower one."""

    version: int
    tenants: Mapping[TenantId, TenantPolicy] = field(default_factory=lambda: MappingProxyType({}))
