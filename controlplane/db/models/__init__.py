"""Tables of the control plane, one class each; what a row may hold is said twice, in the domain and as a CHECK.

::

    tenants 1──n namespaces            nodes 1──n node_usage, node_tier_usage n──1 tenants
            1──n tier_quotas           audit_events, request_log   (keyed by names: they outlive what they name)
            1──n quota_leases n──1 nodes
    namespaces 1──n namespace_leases n──1 nodes
            1──1 salt_policies         signing_keys, audit_checkpoint_keys, key_encryption_keys
            1──n salt_epochs
            1──n sharing_groups 1──n sharing_group_members n──0..1 namespaces
            1──0..1 rate_limits
            1──n api_keys (n──0 for    bootstrap, policy_state     (one row each)
                 keys of the platform)
            1──n token_revocations (n──0 for tokens of the platform)
            1──n console_sessions  (n──0 for those of the platform)

    metered_processes, meters, open_usage, usage_records, metering_state: see ``metering.py``

Deleting a tenant deletes all that hangs off it, its root secrets included (I12); its audit chain stays (I11).
The schema is made by ``migrations/``; a test holds both to be the same.
"""

from __future__ import annotations

from controlplane.db.models.audit import AuditCheckpointKey, AuditEvent, RequestLog
from controlplane.db.models.base import (
    BLOCK_TOKENS_MAX,
    DISPLAY_NAME_MAX_CHARS,
    HASH_FORMAT_NEWEST,
    MODEL_FINGERPRINT_MAX_CHARS,
    PLATFORM_CHAIN,
    AuditOutcome,
    Base,
    NodeAdminState,
)
from controlplane.db.models.console import ConsoleSession
from controlplane.db.models.credentials import ApiKey, Bootstrap, SigningKey, TokenRevocation
from controlplane.db.models.key_encryption import KeyEncryptionKey, KeyEncryptionKeyHolder
from controlplane.db.models.metering import Meter, MeteredProcess, MeteringState, OpenUsage, UsageRecord
from controlplane.db.models.nodes import NamespaceLease, Node, QuotaLease
from controlplane.db.models.policy import Concern, PolicyChange, PolicyState
from controlplane.db.models.salts import SaltEpoch, SaltPolicy
from controlplane.db.models.sharing import SharingGroup, SharingGroupMember
from controlplane.db.models.tenants import Namespace, RateLimits, Tenant, TierQuota
from controlplane.db.models.usage import USAGE_COUNTERS, USAGE_MAPS, NodeTierUsage, NodeUsage

__all__ = [
    "ApiKey",
    "AuditCheckpointKey",
    "AuditEvent",
    "AuditOutcome",
    "BLOCK_TOKENS_MAX",
    "Base",
    "Bootstrap",
    "Concern",
    "ConsoleSession",
    "DISPLAY_NAME_MAX_CHARS",
    "HASH_FORMAT_NEWEST",
    "KeyEncryptionKey",
    "KeyEncryptionKeyHolder",
    "MODEL_FINGERPRINT_MAX_CHARS",
    "Meter",
    "MeteredProcess",
    "MeteringState",
    "Namespace",
    "NamespaceLease",
    "Node",
    "NodeAdminState",
    "NodeTierUsage",
    "NodeUsage",
    "OpenUsage",
    "PLATFORM_CHAIN",
    "PolicyChange",
    "PolicyState",
    "QuotaLease",
    "RateLimits",
    "RequestLog",
    "SaltEpoch",
    "SaltPolicy",
    "SharingGroup",
    "SharingGroupMember",
    "SigningKey",
    "Tenant",
    "TierQuota",
    "TokenRevocation",
    "USAGE_COUNTERS",
    "USAGE_MAPS",
    "UsageRecord",
]
