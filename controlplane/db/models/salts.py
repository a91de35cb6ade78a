"""How the blocks of a tenant are named."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import one_of
from controlplane.db.models.base import Base, tenant_key
from saltern.keys import SaltScope


class SaltPolicy(Base):
    """How a tenant's blocks are named: the scope and the current epoch of its salt."""

    __tablename__ = "salt_policies"
    __table_args__ = (
        one_of("scope", *SaltScope),
        CheckConstraint("epoch >= 1", name="epoch_from_one"),
    )

    tenant_id: Mapped[str] = tenant_key(primary_key=True)
    scope: Mapped[SaltScope]
    epoch: Mapped[int]
    update_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)
