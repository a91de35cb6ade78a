"""API keys of nodes are bound to one node each.

Additive: control planes of the earlier version go on beside it, and take a bound key for any node, as they took every
key.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from saltern.errors import FailedPreconditionError

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("node_id", sa.Text(), nullable=True))
    op.create_check_constraint(
        op.f("ck_api_keys_node_id_identifier"), "api_keys", "node_id ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'"
    )
    op.create_check_constraint(op.f("ck_api_keys_node_id_of_a_node"), "api_keys", "node_id IS NULL OR role = 'node'")


def downgrade() -> None:
    """Take it back.

    Raises:
        FailedPreconditionError: a key is bound, and would be good for every node.
    """
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT FROM api_keys WHERE node_id IS NOT NULL)")):
        raise FailedPreconditionError(
            "the downgrade would make API keys that are bound to one node good for every node",
            reason="SCHEMA_IN_USE",
            hint="under --allow-unbound-node-keys give the nodes keys without --node, and delete the bound ones",
        )
    for check in ("node_id_of_a_node", "node_id_identifier"):
        op.drop_constraint(op.f(f"ck_api_keys_{check}"), "api_keys")
    op.drop_column("api_keys", "node_id")
