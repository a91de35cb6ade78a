"""Quotas leased to nodes; which tenant each policy version changed; what an operator wants of a node.

Additive, and each new column has a default: control planes of the earlier version go on reading and writing beside it.
Nodes that registered before get leases of their shares at the first step of a control plane of this version.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from migrations.row_security import protect

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BYTES_MAX = 2**53
_NODE_COLUMNS = ("state_id", "admin_state", "settled_version", "lease_version", "lease_expire_time", "lease_from_time")


def upgrade() -> None:
    op.create_table(
        "quota_leases",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("tier", sa.String(length=32), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("granted_bytes", sa.BigInteger(), nullable=False),
        sa.Column("believed_bytes", sa.BigInteger(), nullable=False),
        sa.Column("target_bytes", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("tier IN ('dram', 'ssd')", name=op.f("ck_quota_leases_tier_known")),
        sa.CheckConstraint(
            f"believed_bytes BETWEEN 0 AND {_BYTES_MAX}", name=op.f("ck_quota_leases_believed_bytes_range")
        ),
        sa.CheckConstraint(
            "granted_bytes BETWEEN 0 AND believed_bytes", name=op.f("ck_quota_leases_granted_within_believed")
        ),
        sa.CheckConstraint(f"target_bytes BETWEEN 0 AND {_BYTES_MAX}", name=op.f("ck_quota_leases_target_bytes_range")),
        sa.CheckConstraint("version >= 0", name=op.f("ck_quota_leases_version_not_negative")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_quota_leases_tenant_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_quota_leases_node_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("tenant_id", "tier", "node_id", name=op.f("pk_quota_leases")),
    )
    op.create_index(op.f("ix_quota_leases_node_id"), "quota_leases", ["node_id"])
    op.create_index(
        "ix_quota_leases_unmet",
        "quota_leases",
        ["tenant_id"],
        postgresql_where=sa.text("granted_bytes <> target_bytes"),
    )
    protect("quota_leases")
    # No foreign key: that a tenant is gone is a change as well.
    op.create_table(
        "policy_changes",
        sa.Column("version", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_policy_changes")),
    )
    protect("policy_changes")
    op.add_column("policy_state", sa.Column("leased_version", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_check_constraint(
        op.f("ck_policy_state_leased_version_not_negative"), "policy_state", "leased_version >= 0"
    )
    op.add_column("nodes", sa.Column("state_id", sa.Text(), nullable=False, server_default=sa.text("''::text")))
    op.add_column(
        "nodes", sa.Column("admin_state", sa.String(length=32), nullable=False, server_default=sa.text("'active'"))
    )
    op.create_check_constraint(
        op.f("ck_nodes_admin_state_known"), "nodes", "admin_state IN ('active', 'cordoned', 'draining')"
    )
    for column in ("settled_version", "lease_version"):
        op.add_column("nodes", sa.Column(column, sa.BigInteger(), nullable=False, server_default="0"))
        op.create_check_constraint(op.f(f"ck_nodes_{column}_not_negative"), "nodes", f"{column} >= 0")
    for column in ("lease_expire_time", "lease_from_time"):
        op.add_column("nodes", sa.Column(column, sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Take it back. The earlier version splits by capacity at once, and nodes learn of it with their next policy."""
    for column in ("settled_version", "lease_version"):
        op.drop_constraint(op.f(f"ck_nodes_{column}_not_negative"), "nodes")
    op.drop_constraint(op.f("ck_nodes_admin_state_known"), "nodes")
    for column in reversed(_NODE_COLUMNS):
        op.drop_column("nodes", column)
    op.drop_constraint(op.f("ck_policy_state_leased_version_not_negative"), "policy_state")
    op.drop_column("policy_state", "leased_version")
    op.drop_table("policy_changes")
    op.drop_table("quota_leases")
