"""A change of the policy says whom it concerns where that is no one tenant.

Additive: control planes of the earlier version go on beside it. They leave the column empty and read it not, and to
them a change of no one tenant is one that may be of any.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("policy_changes", sa.Column("concern", sa.Text(), nullable=True))
    op.create_check_constraint(
        op.f("ck_policy_changes_concern_known"), "policy_changes", "concern IN ('members', 'nobody')"
    )
    op.create_check_constraint(
        op.f("ck_policy_changes_concern_of_no_tenant"), "policy_changes", "concern IS NULL OR tenant_id IS NULL"
    )


def downgrade() -> None:
    for check in ("concern_of_no_tenant", "concern_known"):
        op.drop_constraint(op.f(f"ck_policy_changes_{check}"), "policy_changes")
    op.drop_column("policy_changes", "concern")
