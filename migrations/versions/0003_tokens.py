"""Signing keys that are published before they sign and destroyed when they retire; revocations of tokens.

Additive, and each new column has a default: control planes of the earlier version go on reading and writing beside it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from saltern.errors import FailedPreconditionError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("signing_keys", sa.Column("publish_version", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("signing_keys", sa.Column("sign_time", sa.DateTime(timezone=True), nullable=True))
    op.add_column("signing_keys", sa.Column("retire_time", sa.DateTime(timezone=True), nullable=True))
    # The earlier version signs with a key from the moment that it makes it.
    op.execute("UPDATE signing_keys SET sign_time = create_time")
    op.alter_column("signing_keys", "wrapped_private_key", nullable=True)
    op.add_column("api_keys", sa.Column("min_issue_time", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "token_revocations",
        sa.Column("uid", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("token_id_prefix", sa.Text(), nullable=False),
        sa.Column("issued_before_s", sa.BigInteger(), nullable=False),
        sa.Column("revoke_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expire_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "token_id_prefix ~ '^[0-9a-f]{16}([0-9a-f]{16})?$'", name=op.f("ck_token_revocations_token_id_prefix_form")
        ),
        sa.CheckConstraint("issued_before_s >= 0", name=op.f("ck_token_revocations_issued_before_s_not_negative")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_token_revocations_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_token_revocations")),
        sa.UniqueConstraint(
            "tenant_id",
            "token_id_prefix",
            name=op.f("uq_token_revocations_tenant_id_token_id_prefix"),
            postgresql_nulls_not_distinct=True,
        ),
    )


def downgrade() -> None:
    """Take it back.

    Raises:
        FailedPreconditionError: a revocation is in force, which the earlier version would forget; or a signing key has
            no private half any more, or is published but must not sign yet.
    """
    in_force = {
        "token_revocations": "SELECT EXISTS (SELECT FROM token_revocations WHERE expire_time > now())",
        "signing_keys": (
            "SELECT EXISTS (SELECT FROM signing_keys WHERE wrapped_private_key IS NULL OR sign_time IS NULL)"
        ),
    }
    for table, statement in in_force.items():
        if op.get_bind().scalar(sa.text(statement)):
            raise FailedPreconditionError(
                f"the downgrade would forget what {table} holds: revoked tokens or keys would be good again",
                reason="SCHEMA_IN_USE",
                hint="wait an hour for revocations to end; delete withdrawn signing keys yourself if you must go back",
            )
    op.drop_table("token_revocations")
    op.drop_column("api_keys", "min_issue_time")
    op.alter_column("signing_keys", "wrapped_private_key", nullable=False)
    for column in ("retire_time", "sign_time", "publish_version"):
        op.drop_column("signing_keys", column)
