"""API keys with two secrets: after a rotation the previous one stays valid for a while.

Additive: control planes of the earlier version go on beside it, and do not accept a previous secret.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from saltern.errors import FailedPreconditionError

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_PREVIOUS = ("previous_lookup", "previous_secret_sha256", "previous_expire_time")
_CHECKS = {
    "previous_lookup_form": "previous_lookup ~ '^[0-9a-f]{16}$'",
    "previous_secret_sha256_is_sha256": "octet_length(previous_secret_sha256) = 32",
    "previous_whole": f"num_nulls({', '.join(_PREVIOUS)}) IN (0, 3)",
}


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("rotate_time", sa.DateTime(timezone=True), nullable=True))
    op.add_column("api_keys", sa.Column("previous_lookup", sa.Text(), nullable=True))
    op.add_column("api_keys", sa.Column("previous_secret_sha256", sa.LargeBinary(), nullable=True))
    op.add_column("api_keys", sa.Column("previous_expire_time", sa.DateTime(timezone=True), nullable=True))
    op.add_column("api_keys", sa.Column("previous_last_used_time", sa.DateTime(timezone=True), nullable=True))
    op.create_unique_constraint(op.f("uq_api_keys_previous_lookup"), "api_keys", ["previous_lookup"])
    for name, rule in _CHECKS.items():
        op.create_check_constraint(op.f(f"ck_api_keys_{name}"), "api_keys", rule)


def downgrade() -> None:
    """Take it back.

    Raises:
        FailedPreconditionError: a previous secret is still valid, which the earlier version would refuse.
    """
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM api_keys WHERE previous_expire_time > now())")):
        raise FailedPreconditionError(
            "the downgrade would end API key secrets that are valid until their rotation's overlap ends",
            reason="SCHEMA_IN_USE",
            hint="wait until the overlaps end; `saltern key list` shows when",
        )
    for name in _CHECKS:
        op.drop_constraint(op.f(f"ck_api_keys_{name}"), "api_keys")
    op.drop_constraint(op.f("uq_api_keys_previous_lookup"), "api_keys")
    for column in ("previous_last_used_time", *reversed(_PREVIOUS), "rotate_time"):
        op.drop_column("api_keys", column)
