"""Cache nodes and what each of them may hold."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import identifier, in_range, not_negative, one_of
from controlplane.db.models.base import EMPTY_TEXT, ZERO, Base, NodeAdminState, tenant_key
from tenants.quota import BYTES_MAX, Tier


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
    state_id: Mapped[str] = mapped_column(server_default=EMPTY_TEXT)
    admin_state: Mapped[NodeAdminState] = mapped_column(
        default=NodeAdminState.ACTIVE, server_default=text("'active'::character varying")
    )
    settled_version: Mapped[int] = mapped_column(default=0, server_default=ZERO)
    lease_version: Mapped[int] = mapped_column(default=0, server_default=ZERO)
    lease_expire_time: Mapped[datetime | None]
    lease_from_time: Mapped[datetime | None]
    tls_server_name: Mapped[str] = mapped_column(server_default=EMPTY_TEXT)


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

    tenant_id: Mapped[str] = tenant_key(primary_key=True)
    tier: Mapped[Tier] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True, index=True)
    granted_bytes: Mapped[int]
    believed_bytes: Mapped[int]
    target_bytes: Mapped[int]
    version: Mapped[int]


class NamespaceLease(Base):
    """What one node holds of one namespace's own limit on one tier: as :class:`QuotaLease` does of a tenant's quota.

    Only namespaces with limits have rows.
    """

    __tablename__ = "namespace_leases"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "namespace_id"], ["namespaces.tenant_id", "namespaces.id"], ondelete="CASCADE"
        ),
        one_of("tier", *Tier),
        in_range("believed_bytes", 0, BYTES_MAX),
        CheckConstraint("granted_bytes BETWEEN 0 AND believed_bytes", name="granted_within_believed"),
        in_range("target_bytes", 0, BYTES_MAX),
        not_negative("version"),
        Index("ix_namespace_leases_unmet", "tenant_id", postgresql_where=text("granted_bytes <> target_bytes")),
    )

    tenant_id: Mapped[str] = tenant_key(primary_key=True)
    namespace_id: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[Tier] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True, index=True)
    granted_bytes: Mapped[int]
    believed_bytes: Mapped[int]
    target_bytes: Mapped[int]
    version: Mapped[int]
