"""The version of the policy that nodes receive, and what it changed."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, SmallInteger
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import not_negative
from controlplane.db.models.base import ZERO, Base


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
    leased_version: Mapped[int] = mapped_column(default=0, server_default=ZERO)


class PolicyChange(Base):
    """Which tenant a policy version changed; NULL: it may be any, or what is no tenant's, such as a node."""

    __tablename__ = "policy_changes"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str | None]
