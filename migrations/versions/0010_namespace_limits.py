"""Limits of namespaces within their tenants' quotas, and what nodes hold of them.

Additive, and each new column has a default: control planes of the earlier version go on beside it, and leave limits as
they are.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from migrations.row_security import protect
from saltern.errors import FailedPreconditionError

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_BYTES_MAX = 2**53
_LIMITS = ("dram_limit_bytes", "ssd_limit_bytes")


def upgrade() -> None:
    for column in _LIMITS:
        op.add_column("namespaces", sa.Column(column, sa.BigInteger(), nullable=True))
        op.create_check_constraint(
            op.f(f"ck_namespaces_{column}_range"), "namespaces", f"{column} BETWEEN 0 AND {_BYTES_MAX}"
        )
    op.add_column("namespaces", sa.Column("revision", sa.BigInteger(), nullable=False, server_default="1"))
    op.create_table(
        "namespace_leases",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("namespace_id", sa.Text(), nullable=False),
        sa.Column("tier", sa.String(length=32), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("granted_bytes", sa.BigInteger(), nullable=False),
        sa.Column("believed_bytes", sa.BigInteger(), nullable=False),
        sa.Column("target_bytes", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("tier IN ('dram', 'ssd')", name=op.f("ck_namespace_leases_tier_known")),
        sa.CheckConstraint(
            f"believed_bytes BETWEEN 0 AND {_BYTES_MAX}", name=op.f("ck_namespace_leases_believed_bytes_range")
        ),
        sa.CheckConstraint(
            "granted_bytes BETWEEN 0 AND believed_bytes", name=op.f("ck_namespace_leases_granted_within_believed")
        ),
        sa.CheckConstraint(
            f"target_bytes BETWEEN 0 AND {_BYTES_MAX}", name=op.f("ck_namespace_leases_target_bytes_range")
        ),
        sa.CheckConstraint("version >= 0", name=op.f("ck_namespace_leases_version_not_negative")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "namespace_id"],
            ["namespaces.tenant_id", "namespaces.id"],
            name=op.f("fk_namespace_leases_tenant_id_namespace_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_namespace_leases_tenant_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["node_id"], ["nodes.id"], name=op.f("fk_namespace_leases_node_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant_id", "namespace_id", "tier", "node_id", name=op.f("pk_namespace_leases")),
    )
    op.create_index(op.f("ix_namespace_leases_node_id"), "namespace_leases", ["node_id"])
    op.create_index(
        "ix_namespace_leases_unmet",
        "namespace_leases",
        ["tenant_id"],
        postgresql_where=sa.text("granted_bytes <> target_bytes"),
    )
    protect("namespace_leases")


def downgrade() -> None:
    """Take it back.

    Raises:
        FailedPreconditionError: a namespace has a limit, which the earlier version would no longer keep (I4).
    """
    limited = "SELECT EXISTS (SELECT FROM namespaces WHERE num_nonnulls(dram_limit_bytes, ssd_limit_bytes) > 0)"
    if op.get_bind().scalar(sa.text(limited)):
        raise FailedPreconditionError(
            "the downgrade would lift the limits of namespaces",
            reason="SCHEMA_IN_USE",
            hint="lift them with `saltern namespace update --dram-limit none --ssd-limit none` first",
        )
    op.drop_table("namespace_leases")
    op.drop_column("namespaces", "revision")
    for column in reversed(_LIMITS):
        op.drop_constraint(op.f(f"ck_namespaces_{column}_range"), "namespaces")
        op.drop_column("namespaces", column)
