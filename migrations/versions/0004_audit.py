"""Audit events say from where and in which role; keys that sign checkpoints of their chains.

Additive: events of the earlier version have hash format 1, which covers none of the new columns, and so have those that
control planes of the earlier version go on writing beside it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from saltern.errors import FailedPreconditionError

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_COLUMNS = ("hash_format", "actor_role", "peer", "policy_version")


def upgrade() -> None:
    for name, kind, default in (
        ("hash_format", sa.SmallInteger(), "1"),
        ("actor_role", sa.Text(), "''::text"),
        ("peer", sa.Text(), "''::text"),
        ("policy_version", sa.BigInteger(), "0"),
    ):
        op.add_column("audit_events", sa.Column(name, kind, nullable=False, server_default=sa.text(default)))
    op.create_check_constraint(op.f("ck_audit_events_hash_format_range"), "audit_events", "hash_format BETWEEN 1 AND 2")
    op.create_check_constraint(
        op.f("ck_audit_events_policy_version_not_negative"), "audit_events", "policy_version >= 0"
    )
    op.create_table(
        "audit_checkpoint_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("wrapped_private_key", sa.LargeBinary(), nullable=False),
        sa.Column("public_key", sa.LargeBinary(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("retire_time", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "octet_length(public_key) = 32", name=op.f("ck_audit_checkpoint_keys_public_key_is_ed25519")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_checkpoint_keys")),
    )


def downgrade() -> None:
    """Take it back where nothing is lost by that.

    Raises:
        FailedPreconditionError: there are events whose hash covers the new columns, or keys that signed checkpoints:
            without them neither would ever verify again.
    """
    written = (
        "SELECT EXISTS (SELECT FROM audit_events WHERE hash_format > 1) OR EXISTS (SELECT FROM audit_checkpoint_keys)"
    )
    if op.get_bind().scalar(sa.text(written)):
        raise FailedPreconditionError(
            "the downgrade would destroy parts of audit events, or the keys of their checkpoints",
            reason="SCHEMA_IN_USE",
            hint="keep this version of the schema; an audit trail is not taken back",
        )
    op.drop_table("audit_checkpoint_keys")
    for name in ("policy_version", "hash_format"):
        rule = "not_negative" if name == "policy_version" else "range"
        op.drop_constraint(op.f(f"ck_audit_events_{name}_{rule}"), "audit_events")
    for name in reversed(_COLUMNS):
        op.drop_column("audit_events", name)
