"""Tables of the control plane, one class each; what a row may hold is said twice, in the domain and as a CHECK.

::

    tenants 1──n namespaces            nodes 1──n node_usage, node_tier_usage n──1 tenants
            1──n tier_quotas           audit_events, request_log   (keyed by names: they outlive what they name)
            1──n quota_leases n──1 nodes
            1──1 salt_policies         signing_keys, audit_checkpoint_keys
            1──0..1 rate_limits
            1──n api_keys (n──0 for    bootstrap, policy_state     (one row each)
                 keys of the platform)
            1──n token_revocations (n──0 for tokens of the platform)

Deleting a tenant deletes all that hangs off it, its root secret included (I12); its audit chain stays (I11).
The schema is made by ``migrations/``; a test holds both to be the same.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Enum,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from controlplane.db.checks import identifier, in_range, is_object, length, not_negative, one_of, sha256
from saltern.keys import SaltScope
from saltern.wire import ENTRY_MAX_BYTES
from tenants.policy import TenantState
from tenants.quota import BYTES_MAX, RATE_MAX, WEIGHT_MAX, Tier
from tenants.roles import PLATFORM_ROLES, TENANT_ROLES, Role

DISPLAY_NAME_MAX_CHARS = 128
MODEL_FINGERPRINT_MAX_CHARS = 512
BLOCK_TOKENS_MAX = 65_536
#: Chain of the platform's own audit events; ``saltern.names`` reserves it, so no tenant can have it.
PLATFORM_CHAIN = "platform"
#: Columns of ``NodeUsage`` and fields of the messages of the same names: counters, and counters by name.
USAGE_COUNTERS = (
    "get_hits",
    "get_misses",
    "get_bytes",
    "put_bytes",
    "puts_stored",
    "puts_refused",
    "evictions",
    "evicted_bytes",
    "taken_entries",
    "taken_bytes",
)
USAGE_MAPS = (
    "evictions_by_cause",
    "evicted_bytes_by_cause",
    "refused_by_reason",
    "demotions_dropped_by_reason",
)
# Defaults of the server's for columns that came later: during an upgrade, processes of the earlier version insert too.
_ZERO = text("0")
_EMPTY_OBJECT = text("'{}'::jsonb")
_EMPTY_TEXT = text("''::text")
#: Formats of an audit event's hash that this release knows; see ``saltern.audit.chain``.
HASH_FORMAT_NEWEST = 2


class NodeAdminState(StrEnum):
    """What an operator wants of a node."""

    ACTIVE = "active"
    CORDONED = "cordoned"  #: new sessions go elsewhere; it keeps its leases and serves on
    DRAINING = "draining"  #: as cordoned, and its leases go to the other nodes


class AuditOutcome(StrEnum):
    """How an audited attempt ended."""

    SUCCESS = "success"
    DENIED = "denied"


def _values(kind: type[StrEnum]) -> list[str]:
    """What the database stores of an enumeration: its values, not the names of its members."""
    return [member.value for member in kind]


class Base(DeclarativeBase):
    """Base of all tables: constraint names are derived, so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own declarative hook)
        str: Text(),
        int: BigInteger(),
        bytes: LargeBinary(),
        datetime: DateTime(timezone=True),
        UUID: Uuid(),
        TenantState: Enum(TenantState, native_enum=False, length=32, values_callable=_values),
        Tier: Enum(Tier, native_enum=False, length=32, values_callable=_values),
        SaltScope: Enum(SaltScope, native_enum=False, length=32, values_callable=_values),
        Role: Enum(Role, native_enum=False, length=32, values_callable=_values),
        NodeAdminState: Enum(NodeAdminState, native_enum=False, length=32, values_callable=_values),
        AuditOutcome: Enum(AuditOutcome, native_enum=False, length=32, values_callable=_values),
    }


def _tenant_key(**options: Any) -> Mapped[str]:
    return mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), **options)


class Tenant(Base):
    """A tenant. ``revision`` grows with every change and is what the etag is made of.

    ``first_audit_sequence``: where this tenant begins in its audit chain; a deleted tenant of the same id wrote the
    events before it, and they are not this tenant's to read (I2).
    """

    __tablename__ = "tenants"
    __table_args__ = (
        identifier("id"),
        CheckConstraint(f"id <> '{PLATFORM_CHAIN}'", name="id_not_reserved"),
        one_of("state", *TenantState),
        length("display_name", DISPLAY_NAME_MAX_CHARS),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    uid: Mapped[UUID] = mapped_column(unique=True, default=uuid4)
    display_name: Mapped[str]
    state: Mapped[TenantState]
    min_issue_time: Mapped[datetime]
    wrapped_root_secret: Mapped[bytes]
    first_audit_sequence: Mapped[int]
    create_time: Mapped[datetime]
    update_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)


class Namespace(Base):
    """One model deployment's cache; nothing in it changes after creation, so its etag is its ``uid``."""

    __tablename__ = "namespaces"
    __table_args__ = (
        identifier("id"),
        in_range("block_tokens", 1, BLOCK_TOKENS_MAX),
        in_range("block_bytes", 1, ENTRY_MAX_BYTES),
        CheckConstraint(
            f"char_length(model_fingerprint) BETWEEN 1 AND {MODEL_FINGERPRINT_MAX_CHARS}",
            name="model_fingerprint_length",
        ),
    )

    tenant_id: Mapped[str] = _tenant_key(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    uid: Mapped[UUID] = mapped_column(unique=True, default=uuid4)
    model_fingerprint: Mapped[str]
    block_tokens: Mapped[int] = mapped_column(Integer)
    block_bytes: Mapped[int]
    create_time: Mapped[datetime]


class TierQuota(Base):
    """The quota of one tenant on one tier, in bytes: the rules of ``tenants.quota.TierQuota``."""

    __tablename__ = "tier_quotas"
    __table_args__ = (
        one_of("tier", *Tier),
        in_range("limit_bytes", 0, BYTES_MAX),
        CheckConstraint("reserved_bytes BETWEEN 0 AND limit_bytes", name="reserved_within_limit"),
        in_range("weight", 1, WEIGHT_MAX),
    )

    tenant_id: Mapped[str] = _tenant_key(primary_key=True)
    tier: Mapped[Tier] = mapped_column(primary_key=True)
    reserved_bytes: Mapped[int]
    limit_bytes: Mapped[int]
    weight: Mapped[int] = mapped_column(Integer)
    update_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)


class RateLimits(Base):
    """How fast one tenant may use the cluster: the rules of ``tenants.quota.RateLimits``; 0 is no limit.

    A tenant has a row from the first time that its rates are set; without one it has no limits.
    """

    __tablename__ = "rate_limits"
    __table_args__ = (
        in_range("operations_per_s", 0, RATE_MAX),
        in_range("bytes_per_s", 0, RATE_MAX),
        in_range("ssd_write_bytes_per_s", 0, RATE_MAX),
    )

    tenant_id: Mapped[str] = _tenant_key(primary_key=True)
    operations_per_s: Mapped[int]
    bytes_per_s: Mapped[int]
    ssd_write_bytes_per_s: Mapped[int]
    update_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)


class SaltPolicy(Base):
    """How a tenant's blocks are named: the scope and the current epoch of its salt."""

    __tablename__ = "salt_policies"
    __table_args__ = (
        one_of("scope", *SaltScope),
        CheckConstraint("epoch >= 1", name="epoch_from_one"),
    )

    tenant_id: Mapped[str] = _tenant_key(primary_key=True)
    scope: Mapped[SaltScope]
    epoch: Mapped[int]
    update_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)


class ApiKey(Base):
    """A credential: what finds it (``lookup``) and what proves it (``secret_sha256``), never the secret itself.

    ``tenant_id`` is NULL for a key of the platform. ``created_by``: resource name of the key that made this one.
    ``min_issue_time``: its tokens issued before are refused.
    ``rotate_time``: when the secret was made, if not with the key. ``previous_``: the secret before it, which is good
    until ``previous_expire_time``; a key has at most two.
    """

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id", postgresql_nulls_not_distinct=True),
        identifier("id"),
        length("display_name", DISPLAY_NAME_MAX_CHARS),
        sha256("secret_sha256"),
        CheckConstraint("lookup ~ '^[0-9a-f]{16}$'", name="lookup_form"),
        CheckConstraint("previous_lookup ~ '^[0-9a-f]{16}$'", name="previous_lookup_form"),
        sha256("previous_secret_sha256"),
        CheckConstraint(
            "num_nulls(previous_lookup, previous_secret_sha256, previous_expire_time) IN (0, 3)", name="previous_whole"
        ),
        CheckConstraint(
            f"(tenant_id IS NULL AND role IN ({', '.join(repr(role.value) for role in sorted(PLATFORM_ROLES))}))"
            f" OR (tenant_id IS NOT NULL AND role IN ({', '.join(repr(role.value) for role in sorted(TENANT_ROLES))}))",
            name="role_fits_owner",
        ),
    )

    uid: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    id: Mapped[str]
    lookup: Mapped[str] = mapped_column(unique=True)
    secret_sha256: Mapped[bytes]
    role: Mapped[Role]
    display_name: Mapped[str]
    created_by: Mapped[str]
    create_time: Mapped[datetime]
    expire_time: Mapped[datetime | None]
    last_used_time: Mapped[datetime | None]
    min_issue_time: Mapped[datetime | None]
    rotate_time: Mapped[datetime | None]
    previous_lookup: Mapped[str | None] = mapped_column(unique=True)
    previous_secret_sha256: Mapped[bytes | None]
    previous_expire_time: Mapped[datetime | None]
    previous_last_used_time: Mapped[datetime | None]


class AuditEvent(Base):
    """One event of one hash chain; append-only, also by trigger and grants (I11).

    ``chain``: a tenant id or ``PLATFORM_CHAIN``. No foreign key: a chain outlives its tenant.
    ``hash_format``: which fields ``hash`` covers (``saltern.audit.chain``); the columns after it from format 2 on.
    ``peer``: the network address that the call came from. ``policy_version``: after the act.
    """

    __tablename__ = "audit_events"
    __table_args__ = (
        identifier("chain"),
        CheckConstraint("sequence >= 1", name="sequence_from_one"),
        one_of("outcome", *AuditOutcome),
        sha256("previous_hash"),
        sha256("hash"),
        in_range("hash_format", 1, HASH_FORMAT_NEWEST),
        not_negative("policy_version"),
    )

    chain: Mapped[str] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    event_time: Mapped[datetime]
    actor: Mapped[str]
    method: Mapped[str]
    resource: Mapped[str]
    outcome: Mapped[AuditOutcome]
    reason: Mapped[str]
    request_id: Mapped[str]
    before: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    after: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    previous_hash: Mapped[bytes]
    hash: Mapped[bytes]
    hash_format: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    actor_role: Mapped[str] = mapped_column(server_default=_EMPTY_TEXT)
    peer: Mapped[str] = mapped_column(server_default=_EMPTY_TEXT)
    policy_version: Mapped[int] = mapped_column(server_default=_ZERO)


class AuditCheckpointKey(Base):
    """A key pair that signs checkpoints of audit chains; the private half is wrapped, both halves are 32 bytes.

    ``retire_time``: it signs nothing from then on; what it signed before stays good. The newest one without it signs.
    """

    __tablename__ = "audit_checkpoint_keys"
    __table_args__ = (CheckConstraint("octet_length(public_key) = 32", name="public_key_is_ed25519"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    wrapped_private_key: Mapped[bytes]
    public_key: Mapped[bytes]
    create_time: Mapped[datetime]
    retire_time: Mapped[datetime | None]


class RequestLog(Base):
    """Answered requests by request id, so that a repeated one changes nothing (AIP-155).

    ``request_sha256`` tells a repetition from another request that reuses the id. ``response``: the serialized answer
    without any secret; NULL only inside the transaction that makes it.
    """

    __tablename__ = "request_log"
    __table_args__ = (sha256("request_sha256"), Index(None, "create_time"))

    actor: Mapped[str] = mapped_column(primary_key=True)
    method: Mapped[str] = mapped_column(primary_key=True)
    request_id: Mapped[UUID] = mapped_column(primary_key=True)
    request_sha256: Mapped[bytes]
    response: Mapped[bytes | None]
    create_time: Mapped[datetime]


class SigningKey(Base):
    """A key pair that signs tokens; ``controlplane.core.key_rotation`` says what its times mean.

    ``publish_version``: the first policy version that holds it. ``not_after_time``: no token of it is good from then.
    ``wrapped_private_key``: NULL once destroyed.
    """

    __tablename__ = "signing_keys"

    kid: Mapped[str] = mapped_column(primary_key=True)
    wrapped_private_key: Mapped[bytes | None]
    public_x: Mapped[str]
    create_time: Mapped[datetime]
    not_after_time: Mapped[datetime | None]
    publish_version: Mapped[int] = mapped_column(server_default=_ZERO)
    sign_time: Mapped[datetime | None]
    retire_time: Mapped[datetime | None]


class TokenRevocation(Base):
    """Tokens that are refused although they verify: the rules of ``tenants.revocation``.

    ``tenant_id``: whose tokens; NULL for those of the platform. The row means nothing from ``expire_time`` on.
    """

    __tablename__ = "token_revocations"
    __table_args__ = (
        UniqueConstraint("tenant_id", "token_id_prefix", postgresql_nulls_not_distinct=True),
        CheckConstraint("token_id_prefix ~ '^[0-9a-f]{16}([0-9a-f]{16})?$'", name="token_id_prefix_form"),
        not_negative("issued_before_s"),
    )

    uid: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    token_id_prefix: Mapped[str]
    issued_before_s: Mapped[int]
    revoke_time: Mapped[datetime]
    expire_time: Mapped[datetime]


class Bootstrap(Base):
    """The one-time bootstrap token of this deployment: its hash, and when it was redeemed."""

    __tablename__ = "bootstrap"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"), sha256("token_sha256"))

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False, default=1)
    token_sha256: Mapped[bytes]
    create_time: Mapped[datetime]
    redeemed_time: Mapped[datetime | None]


class Node(Base):
    """A cache node, known since it first registered; every registration raises ``fencing_epoch``.

    Its leases hold on these terms (``controlplane.core.lease_terms``):

    ``state_id``: of the state folder that the registered process holds the lock of; empty if it did not say.
    ``settled_version``: what it acknowledged with nothing left above the limits of that version.
    ``lease_version``: renewals count only for a process that goes by this version or a later one.
    ``lease_expire_time``: when the last process that may hold leases stops growing, by any clock within the margin.
    ``lease_from_time``: until then an earlier process may live, and this one gets nothing; NULL: it has its leases.
    """

    __tablename__ = "nodes"
    __table_args__ = (
        identifier("id"),
        CheckConstraint("fencing_epoch >= 1", name="fencing_epoch_from_one"),
        in_range("dram_capacity_bytes", 0, BYTES_MAX),
        in_range("ssd_capacity_bytes", 0, BYTES_MAX),
        not_negative("applied_version"),
        one_of("admin_state", *NodeAdminState),
        not_negative("settled_version"),
        not_negative("lease_version"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    uid: Mapped[UUID] = mapped_column(unique=True, default=uuid4)
    fencing_epoch: Mapped[int] = mapped_column(default=1)
    wire_endpoint: Mapped[str]
    shm_path: Mapped[str]
    grpc_endpoint: Mapped[str]
    host_id: Mapped[str]
    dram_capacity_bytes: Mapped[int]
    ssd_capacity_bytes: Mapped[int] = mapped_column(default=0)
    software_version: Mapped[str]
    applied_version: Mapped[int] = mapped_column(default=0)
    register_time: Mapped[datetime]
    last_report_time: Mapped[datetime]
    state_id: Mapped[str] = mapped_column(server_default=_EMPTY_TEXT)
    admin_state: Mapped[NodeAdminState] = mapped_column(
        default=NodeAdminState.ACTIVE, server_default=text("'active'::character varying")
    )
    settled_version: Mapped[int] = mapped_column(default=0, server_default=_ZERO)
    lease_version: Mapped[int] = mapped_column(default=0, server_default=_ZERO)
    lease_expire_time: Mapped[datetime | None]
    lease_from_time: Mapped[datetime | None]
    tls_server_name: Mapped[str] = mapped_column(server_default=_EMPTY_TEXT)


class QuotaLease(Base):
    """What one node holds of one tenant's quota on one tier, in bytes (``controlplane.core.leases.Holding``).

    A node without a row holds nothing. The sum of what all nodes may believe is at most the quota (I4).
    """

    __tablename__ = "quota_leases"
    __table_args__ = (
        one_of("tier", *Tier),
        in_range("believed_bytes", 0, BYTES_MAX),
        CheckConstraint("granted_bytes BETWEEN 0 AND believed_bytes", name="granted_within_believed"),
        in_range("target_bytes", 0, BYTES_MAX),
        not_negative("version"),
        Index("ix_quota_leases_unmet", "tenant_id", postgresql_where=text("granted_bytes <> target_bytes")),
    )

    tenant_id: Mapped[str] = _tenant_key(primary_key=True)
    tier: Mapped[Tier] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True, index=True)
    granted_bytes: Mapped[int]
    believed_bytes: Mapped[int]
    target_bytes: Mapped[int]
    version: Mapped[int]


class NodeUsage(Base):
    """What the cache did for one tenant on one node since that node started: absolute counters, never increments.

    The columns of ``USAGE_MAPS`` are objects of counters by name, which nodes of a later version may add to.
    ``ssd``: an object with the fields of ``SsdActivity``; NULL without an SSD tier.
    """

    __tablename__ = "node_usage"
    __table_args__ = (
        *(not_negative(counter) for counter in USAGE_COUNTERS),
        *(is_object(column) for column in (*USAGE_MAPS, "ssd")),
    )

    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True)
    tenant_id: Mapped[str] = _tenant_key(primary_key=True, index=True)
    get_hits: Mapped[int]
    get_misses: Mapped[int]
    get_bytes: Mapped[int]
    put_bytes: Mapped[int]
    puts_stored: Mapped[int]
    puts_refused: Mapped[int]
    evictions: Mapped[int]
    evicted_bytes: Mapped[int]
    report_time: Mapped[datetime]
    evictions_by_cause: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=_EMPTY_OBJECT)
    evicted_bytes_by_cause: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=_EMPTY_OBJECT)
    refused_by_reason: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=_EMPTY_OBJECT)
    demotions_dropped_by_reason: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=_EMPTY_OBJECT)
    taken_entries: Mapped[int] = mapped_column(server_default=_ZERO)
    taken_bytes: Mapped[int] = mapped_column(server_default=_ZERO)
    ssd: Mapped[dict[str, int] | None] = mapped_column(JSONB(none_as_null=True))


class NodeTierUsage(Base):
    """What one tenant holds on one tier of one node: resident + in flight + allocator slack, in bytes (I8).

    ``lent_bytes``: of its reservation there, not used; ``borrowed_bytes``: used past that reservation.
    """

    __tablename__ = "node_tier_usage"
    __table_args__ = (
        one_of("tier", *Tier),
        not_negative("used_bytes"),
        not_negative("entries"),
        not_negative("lent_bytes"),
        not_negative("borrowed_bytes"),
    )

    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True)
    tenant_id: Mapped[str] = _tenant_key(primary_key=True, index=True)
    tier: Mapped[Tier] = mapped_column(primary_key=True)
    used_bytes: Mapped[int]
    entries: Mapped[int]
    lent_bytes: Mapped[int] = mapped_column(server_default=_ZERO)
    borrowed_bytes: Mapped[int] = mapped_column(server_default=_ZERO)


class PolicyState(Base):
    """The version of the policy that nodes receive: one row, raised in the transaction of every change.

    ``leased_version``: leases have followed every change up to this version.
    """

    __tablename__ = "policy_state"
    __table_args__ = (
        CheckConstraint("id = 1", name="one_row"),
        not_negative("version"),
        not_negative("leased_version"),
    )

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False, default=1)
    version: Mapped[int]
    update_time: Mapped[datetime]
    leased_version: Mapped[int] = mapped_column(default=0, server_default=_ZERO)


class PolicyChange(Base):
    """Which tenant a policy version changed; NULL: it may be any, or what is no tenant's, such as a node."""

    __tablename__ = "policy_changes"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str | None]
