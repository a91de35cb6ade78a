"""Sessions of the console: the hash of each cookie, and what only the cookie opens.

Additive: control planes of the earlier version go on beside it; they serve no console.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from migrations.row_security import protect

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "console_sessions",
        sa.Column("cookie_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("use_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expire_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "octet_length(cookie_sha256) = 32", name=op.f("ck_console_sessions_cookie_sha256_is_sha256")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_console_sessions_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("cookie_sha256", name=op.f("pk_console_sessions")),
    )
    for column in ("tenant_id", "subject", "expire_time"):
        op.create_index(op.f(f"ix_console_sessions_{column}"), "console_sessions", [column])
    protect("console_sessions")


def downgrade() -> None:
    """Take it back: whoever is logged in logs in again."""
    op.drop_table("console_sessions")
