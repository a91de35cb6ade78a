"""The version of the policy that nodes receive, and what it changed."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import CheckConstraint, SmallInteger
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import not_negative, one_of
from controlplane.db.models.base import ZERO, Base


class Concern(StrEnum):
    """Whom a policy version concerns that is about no one tenant."""

    #: The set of nodes, or their capacities: leases of every tenant have to follow, and what is split by capacity.
    MEMBERS = "members"
    #: Nobody's part of the policy: at most the set of signing keys, which goes out with every push.
    NOBODY = "nobody"


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
    """Which tenant a policy version changed, or whom else it concerns (:class:`Concern`); both NULL: it may be any.

    A control plane of an earlier version does not know ``concern``, and takes such a change for one of any.
    """

    __tablename__ = "policy_changes"
    __table_args__ = (
        one_of("concern", *Concern),
        CheckConstraint("concern IS NULL OR tenant_id IS NULL", name="concern_of_no_tenant"),
    )

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str | None]
    concern: Mapped[str | None]
