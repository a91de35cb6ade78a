"""Under which name the certificate of a node is to be verified; empty for a node that serves plain text.

Additive: control planes of the earlier version go on beside it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("tls_server_name", sa.Text(), server_default=sa.text("''::text"), nullable=False))


def downgrade() -> None:
    op.drop_column("nodes", "tls_server_name")
