"""How the blocks of a tenant are named: its salt policy, and the root secret of each epoch."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import in_range, one_of
from controlplane.db.models.base import ZERO, Base, tenant_key
from saltern.keys import SaltScope
from tenants.salts import GRACE_PERIOD_DEFAULT_S, GRACE_PERIOD_MAX_S, ROTATION_PERIOD_MAX_S


class SaltPolicy(Base):
    """How a tenant's blocks are named: the least scope, the current epoch, and when the next one begins.

    ``rotation_period_s``: 0 for rotation on demand alone; else ``next_rotation_time`` says when it is due.
    """

    __tablename__ = "salt_policies"
    __table_args__ = (
        one_of("scope", *SaltScope),
        CheckConstraint("epoch >= 1", name="epoch_from_one"),
        in_range("rotation_period_s", 0, ROTATION_PERIOD_MAX_S),
        in_range("grace_period_s", 0, GRACE_PERIOD_MAX_S),
        CheckConstraint("(rotation_period_s = 0) = (next_rotation_time IS NULL)", name="schedule_whole"),
        Index(None, "next_rotation_time"),
    )

    tenant_id: Mapped[str] = tenant_key(primary_key=True)
    scope: Mapped[SaltScope]
    epoch: Mapped[int]
    update_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)
    rotation_period_s: Mapped[int] = mapped_column(default=0, server_default=ZERO)
    grace_period_s: Mapped[int] = mapped_column(
        default=GRACE_PERIOD_DEFAULT_S, server_default=text(str(GRACE_PERIOD_DEFAULT_S))
    )
    next_rotation_time: Mapped[datetime | None]


class SaltEpoch(Base):
    """One generation of a tenant's salt and the root secret of its own; that the row is there means it is readable.

    The wrapped root is the only copy: deleting the row destroys every salt key of the epoch (I12).
    ``read_until_time``: when the row is due for deletion; NULL for the current epoch.
    """

    __tablename__ = "salt_epochs"
    __table_args__ = (
        CheckConstraint("epoch >= 1", name="epoch_from_one"),
        Index("ix_salt_epochs_current", "tenant_id", unique=True, postgresql_where=text("read_until_time IS NULL")),
        Index(None, "read_until_time"),
    )

    tenant_id: Mapped[str] = tenant_key(primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True)
    wrapped_root_secret: Mapped[bytes]
    create_time: Mapped[datetime]
    read_until_time: Mapped[datetime | None]
