"""A root secret for each salt epoch, schedules of rotation, and API keys that are bound to a project or a user.

The root secret that a tenant has becomes the one of its epoch 1; it is moved as it is, wrapped, and its column goes.
Control planes of the earlier version cannot go on beside it: they read that column.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from migrations.row_security import protect
from saltern.errors import FailedPreconditionError

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_ROTATION_PERIOD_MAX_S = 400 * 86400
_GRACE_PERIOD_MAX_S = 90 * 86400
_BINDINGS = ("project_id", "user_id")
_SCHEDULE_CHECKS = {
    "rotation_period_s_range": f"rotation_period_s BETWEEN 0 AND {_ROTATION_PERIOD_MAX_S}",
    "grace_period_s_range": f"grace_period_s BETWEEN 0 AND {_GRACE_PERIOD_MAX_S}",
    "schedule_whole": "(rotation_period_s = 0) = (next_rotation_time IS NULL)",
}


def upgrade() -> None:
    op.create_table(
        "salt_epochs",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("wrapped_root_secret", sa.LargeBinary(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("read_until_time", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("epoch >= 1", name=op.f("ck_salt_epochs_epoch_from_one")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_salt_epochs_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant_id", "epoch", name=op.f("pk_salt_epochs")),
    )
    op.create_index(
        "ix_salt_epochs_current",
        "salt_epochs",
        ["tenant_id"],
        unique=True,
        postgresql_where=sa.text("read_until_time IS NULL"),
    )
    op.create_index(op.f("ix_salt_epochs_read_until_time"), "salt_epochs", ["read_until_time"])
    protect("salt_epochs")
    op.execute(
        "INSERT INTO salt_epochs (tenant_id, epoch, wrapped_root_secret, create_time)"
        " SELECT id, 1, wrapped_root_secret, create_time FROM tenants"
    )
    op.drop_column("tenants", "wrapped_root_secret")
    for column, default in (("rotation_period_s", "0"), ("grace_period_s", "86400")):
        op.add_column("salt_policies", sa.Column(column, sa.BigInteger(), nullable=False, server_default=default))
    op.add_column("salt_policies", sa.Column("next_rotation_time", sa.DateTime(timezone=True), nullable=True))
    for name, rule in _SCHEDULE_CHECKS.items():
        op.create_check_constraint(op.f(f"ck_salt_policies_{name}"), "salt_policies", rule)
    op.create_index(op.f("ix_salt_policies_next_rotation_time"), "salt_policies", ["next_rotation_time"])
    for column in _BINDINGS:
        op.add_column("api_keys", sa.Column(column, sa.Text(), nullable=True))
        op.create_check_constraint(
            op.f(f"ck_api_keys_{column}_length"), "api_keys", f"char_length({column}) BETWEEN 1 AND 128"
        )


def downgrade() -> None:
    """Take it back.

    Raises:
        FailedPreconditionError: a salt has been rotated or narrowed or is to rotate, or a key is bound: the earlier
            version would give out a wider or an older salt.
    """
    in_use = """
        SELECT EXISTS (SELECT FROM salt_epochs WHERE epoch <> 1)
            OR EXISTS (SELECT FROM salt_policies WHERE scope <> 'tenant' OR rotation_period_s <> 0)
            OR EXISTS (SELECT FROM api_keys WHERE project_id IS NOT NULL OR user_id IS NOT NULL)
    """
    if op.get_bind().scalar(sa.text(in_use)):
        raise FailedPreconditionError(
            "the downgrade would undo salt rotations, narrower salts or the bindings of API keys",
            reason="SCHEMA_IN_USE",
            hint="stay with this version: a salt that was rotated has no way back",
        )
    for column in _BINDINGS:
        op.drop_constraint(op.f(f"ck_api_keys_{column}_length"), "api_keys")
        op.drop_column("api_keys", column)
    op.drop_index(op.f("ix_salt_policies_next_rotation_time"), "salt_policies")
    for name in _SCHEDULE_CHECKS:
        op.drop_constraint(op.f(f"ck_salt_policies_{name}"), "salt_policies")
    for column in ("next_rotation_time", "grace_period_s", "rotation_period_s"):
        op.drop_column("salt_policies", column)
    op.add_column("tenants", sa.Column("wrapped_root_secret", sa.LargeBinary(), nullable=True))
    op.execute(
        "UPDATE tenants SET wrapped_root_secret = salt_epochs.wrapped_root_secret FROM salt_epochs"
        " WHERE salt_epochs.tenant_id = tenants.id"
    )
    op.alter_column("tenants", "wrapped_root_secret", nullable=False)
    op.drop_table("salt_epochs")
