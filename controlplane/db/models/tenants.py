"""Tenants, their namespaces and their quotas."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, Integer
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import identifier, in_range, length, one_of
from controlplane.db.models.base import (
    BLOCK_TOKENS_MAX,
    DISPLAY_NAME_MAX_CHARS,
    MODEL_FINGERPRINT_MAX_CHARS,
    ONE,
    PLATFORM_CHAIN,
    Base,
    tenant_key,
)
from saltern.wire import ENTRY_MAX_BYTES
from tenants.policy import TenantState
from tenants.quota import BYTES_MAX, RATE_MAX, WEIGHT_MAX, Tier


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
    first_audit_sequence: Mapped[int]
    create_time: Mapped[datetime]
    update_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)


class Namespace(Base):
    """One model deployment's cache; only its limits change after creation, and ``revision`` with each change.

    ``dram_limit_bytes``, ``ssd_limit_bytes``: what it may hold of its tenant's quota; NULL for all of it.
    """

    __tablename__ = "namespaces"
    __table_args__ = (
        identifier("id"),
        in_range("block_tokens", 1, BLOCK_TOKENS_MAX),
        in_range("block_bytes", 1, ENTRY_MAX_BYTES),
        in_range("dram_limit_bytes", 0, BYTES_MAX),
        in_range("ssd_limit_bytes", 0, BYTES_MAX),
        CheckConstraint(
            f"char_length(model_fingerprint) BETWEEN 1 AND {MODEL_FINGERPRINT_MAX_CHARS}",
            name="model_fingerprint_length",
        ),
    )

    tenant_id: Mapped[str] = tenant_key(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    uid: Mapped[UUID] = mapped_column(unique=True, default=uuid4)
    model_fingerprint: Mapped[str]
    block_tokens: Mapped[int] = mapped_column(Integer)
    block_bytes: Mapped[int]
    create_time: Mapped[datetime]
    dram_limit_bytes: Mapped[int | None]
    ssd_limit_bytes: Mapped[int | None]
    revision: Mapped[int] = mapped_column(default=1, server_default=ONE)

    @property
    def tier_limits(self) -> dict[Tier, int]:
        """Its limits in bytes; a tier that is not named has none."""
        limits = {Tier.DRAM: self.dram_limit_bytes, Tier.SSD: self.ssd_limit_bytes}
        return {tier: limit_bytes for tier, limit_bytes in limits.items() if limit_bytes is not None}


class TierQuota(Base):
    """The quota of one tenant on one tier, in bytes: the rules of ``tenants.quota.TierQuota``."""

    __tablename__ = "tier_quotas"
    __table_args__ = (
        one_of("tier", *Tier),
        in_range("limit_bytes", 0, BYTES_MAX),
        CheckConstraint("reserved_bytes BETWEEN 0 AND limit_bytes", name="reserved_within_limit"),
        in_range("weight", 1, WEIGHT_MAX),
    )

    tenant_id: Mapped[str] = tenant_key(primary_key=True)
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

    tenant_id: Mapped[str] = tenant_key(primary_key=True)
    operations_per_s: Mapped[int]
    bytes_per_s: Mapped[int]
    ssd_write_bytes_per_s: Mapped[int]
    update_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)
