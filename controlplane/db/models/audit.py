"""The audit trail, what signs its checkpoints, and the requests that were answered."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, Index, SmallInteger, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import identifier, in_range, not_negative, one_of, sha256
from controlplane.db.models.base import EMPTY_TEXT, HASH_FORMAT_NEWEST, ZERO, AuditOutcome, Base


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
    actor_role: Mapped[str] = mapped_column(server_default=EMPTY_TEXT)
    peer: Mapped[str] = mapped_column(server_default=EMPTY_TEXT)
    policy_version: Mapped[int] = mapped_column(server_default=ZERO)


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
