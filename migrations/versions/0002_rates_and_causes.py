"""Rate limits of tenants; and in the books of nodes who evicted what, why puts were refused, what was lent.

Additive, and each new column has a default: control planes of the earlier version go on reading and writing beside it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from saltern.errors import FailedPreconditionError

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_RATE_MAX = 2**40
_RATES = ("operations_per_s", "bytes_per_s", "ssd_write_bytes_per_s")
_OBJECTS = ("evictions_by_cause", "evicted_bytes_by_cause", "refused_by_reason", "demotions_dropped_by_reason")
_COUNTERS = (
    ("node_usage", "taken_entries"),
    ("node_usage", "taken_bytes"),
    ("node_tier_usage", "lent_bytes"),
    ("node_tier_usage", "borrowed_bytes"),
)


def upgrade() -> None:
    op.create_table(
        "rate_limits",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        *(sa.Column(rate, sa.BigInteger(), nullable=False) for rate in _RATES),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        *(
            sa.CheckConstraint(f"{rate} BETWEEN 0 AND {_RATE_MAX}", name=op.f(f"ck_rate_limits_{rate}_range"))
            for rate in _RATES
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_rate_limits_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_rate_limits")),
    )
    for table, column in _COUNTERS:
        op.add_column(table, sa.Column(column, sa.BigInteger(), nullable=False, server_default=sa.text("0")))
        op.create_check_constraint(op.f(f"ck_{table}_{column}_not_negative"), table, f"{column} >= 0")
    for column in _OBJECTS:
        empty = sa.text("'{}'::jsonb")
        op.add_column("node_usage", sa.Column(column, JSONB(), nullable=False, server_default=empty))
    op.add_column("node_usage", sa.Column("ssd", JSONB(), nullable=True))
    for column in (*_OBJECTS, "ssd"):
        is_object = f"jsonb_typeof({column}) = 'object'"
        op.create_check_constraint(op.f(f"ck_node_usage_{column}_is_object"), "node_usage", is_object)


def downgrade() -> None:
    """Take it back; reports come anew, so nothing of them is lost.

    Raises:
        FailedPreconditionError: a tenant has a rate limit, which the earlier version would lift without a word.
    """
    limited = f"SELECT EXISTS (SELECT FROM rate_limits WHERE greatest({', '.join(_RATES)}) > 0)"  # noqa: S608 (constants)
    if op.get_bind().scalar(sa.text(limited)):
        raise FailedPreconditionError(
            "the downgrade would lift the rate limits of tenants",
            reason="SCHEMA_IN_USE",
            hint="set every tenant's rates to 0 first if that is what you want",
        )
    for column in ("ssd", *_OBJECTS):
        op.drop_column("node_usage", column)
    for table, column in reversed(_COUNTERS):
        op.drop_column(table, column)
    op.drop_table("rate_limits")
