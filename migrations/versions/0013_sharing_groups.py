"""Sharing groups and their members.

Additive: control planes of the earlier version go on beside it, and compose policies without groups, which shares
nothing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from migrations.row_security import protect
from migrations.wrapped_columns import guard_wrapped
from saltern.errors import FailedPreconditionError

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_IDENTIFIER = "~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'"


def upgrade() -> None:
    op.create_table(
        "sharing_groups",
        sa.Column("uid", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("model_fingerprint", sa.Text(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("block_bytes", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("wrapped_root_secret", sa.LargeBinary(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(f"id {_IDENTIFIER}", name=op.f("ck_sharing_groups_id_identifier")),
        sa.CheckConstraint("epoch >= 1", name=op.f("ck_sharing_groups_epoch_from_one")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_sharing_groups_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_sharing_groups")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_sharing_groups_tenant_id_id")),
    )
    op.create_table(
        "sharing_group_members",
        sa.Column("group_uid", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("namespace_id", sa.Text(), nullable=False),
        sa.Column("namespace_uid", sa.Uuid(), nullable=True),
        sa.Column("invite_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("accept_time", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(f"tenant_id {_IDENTIFIER}", name=op.f("ck_sharing_group_members_tenant_id_identifier")),
        sa.CheckConstraint(
            f"namespace_id {_IDENTIFIER}", name=op.f("ck_sharing_group_members_namespace_id_identifier")
        ),
        sa.CheckConstraint(
            "(accept_time IS NULL) = (namespace_uid IS NULL)", name=op.f("ck_sharing_group_members_accepted_whole")
        ),
        sa.ForeignKeyConstraint(
            ["group_uid"], ["sharing_groups.uid"], name=op.f("fk_sharing_group_members_group_uid"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["namespace_uid"],
            ["namespaces.uid"],
            name=op.f("fk_sharing_group_members_namespace_uid"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("group_uid", "tenant_id", "namespace_id", name=op.f("pk_sharing_group_members")),
    )
    for column in ("tenant_id", "namespace_uid"):
        op.create_index(op.f(f"ix_sharing_group_members_{column}"), "sharing_group_members", [column])
    guard_wrapped("sharing_groups", "wrapped_root_secret")
    protect("sharing_groups")
    protect("sharing_group_members")


def downgrade() -> None:
    """Take it back.

    Raises:
        FailedPreconditionError: there is a group: its members would lose what they share without an audit event.
    """
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM sharing_groups)")):
        raise FailedPreconditionError(
            "the downgrade would undo sharing groups",
            reason="SCHEMA_IN_USE",
            hint="delete the sharing groups first: saltern share delete",
        )
    op.drop_table("sharing_group_members")
    op.drop_table("sharing_groups")
