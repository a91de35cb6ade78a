"""Sharing groups, and who has been invited to them and has accepted."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, ForeignKey, Index, Integer, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import identifier
from controlplane.db.models.base import Base, tenant_key


class SharingGroup(Base):
    """A group, of the tenant that owns it.

    ``wrapped_root_secret`` is the only copy of its epoch's root secret (I12).
    """

    __tablename__ = "sharing_groups"
    __table_args__ = (
        identifier("id"),
        CheckConstraint("epoch >= 1", name="epoch_from_one"),
        UniqueConstraint("tenant_id", "id"),
    )

    uid: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[str] = tenant_key()
    id: Mapped[str]
    model_fingerprint: Mapped[str]
    block_tokens: Mapped[int] = mapped_column(Integer)
    block_bytes: Mapped[int]
    epoch: Mapped[int]
    wrapped_root_secret: Mapped[bytes]
    create_time: Mapped[datetime]
    revision: Mapped[int] = mapped_column(default=1)


class SharingGroupMember(Base):
    """A namespace that was invited, and from ``accept_time`` on is a member; the row is its tenant's to see.

    An invitation names a tenant and a namespace whether they exist or not, so that inviting tells nothing of them (I2).
    A member is one by ``namespace_uid`` and goes with its namespace.
    """

    __tablename__ = "sharing_group_members"
    __table_args__ = (
        identifier("tenant_id"),
        identifier("namespace_id"),
        CheckConstraint("(accept_time IS NULL) = (namespace_uid IS NULL)", name="accepted_whole"),
        Index(None, "tenant_id"),
        Index(None, "namespace_uid"),
    )

    group_uid: Mapped[UUID] = mapped_column(ForeignKey("sharing_groups.uid", ondelete="CASCADE"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    namespace_id: Mapped[str] = mapped_column(primary_key=True)
    namespace_uid: Mapped[UUID | None] = mapped_column(ForeignKey("namespaces.uid", ondelete="CASCADE"))
    invite_time: Mapped[datetime]
    accept_time: Mapped[datetime | None]
