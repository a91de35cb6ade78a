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
class NamespacePolicy:
    """One namespace as a node sees it.

    Attributes:
        uid: distinguishes a namespace from a deleted one of the same name (I12).
        block_bytes: the largest entry, in bytes.
        epochs: salt epochs that may be read, ascending; the last one may be written.
    """

    uid: str
    block_bytes: int
    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """One tenant as a node sees it: its share of the quota on this node and its namespaces.

    Attributes:
        min_issue_time_s: tokens issued before this Unix time are refused.
        rates: this node's share of the tenant's rate limits.
        revocations: single tokens, and tokens of single API keys, that are refused.
    """

    state: TenantState
    tiers: Mapping[Tier, TierQuota]
    namespaces: Mapping[NamespaceId, NamespacePolicy]
    min_issue_time_s: int = 0
    rates: RateLimits = NO_RATE_LIMITS
    revocations: RevocationSet = NO_REVOCATIONS


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """A complete snapshot; a higher version replaces a lower one."""

    version: int
    tenants: Mapping[TenantId, TenantPolicy] = field(default_factory=lambda: MappingProxyType({}))
