"""Usage by hour: how far the counters of each process were followed, hours that are open, and records of closed ones.

Additive: control planes of the earlier version go on beside it, and what is reported to them alone is counted with the
next report to one of this version, because counters are absolute.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from migrations.row_security import protect
from saltern.errors import FailedPreconditionError

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_INTEGRALS = ("dram_byte_seconds", "ssd_byte_seconds")
_COUNTERS = (
    "hits", "misses", "tokens_saved", "read_bytes", "stored_bytes", "puts_stored", "puts_refused", "evictions",
    "evicted_bytes", "ssd_read_bytes", "ssd_written_bytes", "gap_seconds", "late_seconds",
)  # fmt: skip
_MAPS = ("puts_refused_by_reason", "evictions_by_cause")

# A bill is not rewritten, whoever connects, the owner of the table included, short of dropping the triggers: a record
# is inserted by the closing of its hour alone, never changed, and removed only when it is older than any retention.
_GUARD_RECORDS = """
CREATE FUNCTION guard_usage_records() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    state metering_state%ROWTYPE;
BEGIN
    IF TG_OP = 'INSERT' THEN
        SELECT * INTO state FROM metering_state;
        IF NEW.hour >= state.closed_from AND NEW.hour < state.closed_until THEN
            RETURN NEW;
        END IF;
    ELSIF TG_OP = 'DELETE' THEN
        IF OLD.hour < now() - interval '60 days' THEN
            RETURN OLD;
        END IF;
    END IF;
    RAISE EXCEPTION 'usage_records holds closed hours: % refused', TG_OP USING ERRCODE = 'insufficient_privilege';
END
$$
"""
_GUARD_STATE = """
CREATE FUNCTION guard_metering_state() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.closed_from = OLD.closed_until AND NEW.closed_until > OLD.closed_until
        AND NEW.closed_until <= now() AND NEW.closed_until = date_trunc('hour', NEW.closed_until, 'UTC')
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'hours are closed once, in order, when they are over: % refused', TG_OP
        USING ERRCODE = 'insufficient_privilege';
END
$$
"""
_TRIGGERS = (
    """
    CREATE TRIGGER usage_records_closed BEFORE INSERT OR UPDATE OR DELETE ON usage_records
    FOR EACH ROW EXECUTE FUNCTION guard_usage_records()
    """,
    """
    CREATE TRIGGER usage_records_no_truncate BEFORE TRUNCATE ON usage_records
    FOR EACH STATEMENT EXECUTE FUNCTION guard_usage_records()
    """,
    """
    CREATE TRIGGER metering_state_forward BEFORE INSERT OR UPDATE OR DELETE ON metering_state
    FOR EACH ROW EXECUTE FUNCTION guard_metering_state()
    """,
    """
    CREATE TRIGGER metering_state_no_truncate BEFORE TRUNCATE ON metering_state
    FOR EACH STATEMENT EXECUTE FUNCTION guard_metering_state()
    """,
)


def upgrade() -> None:
    op.create_table(
        "metered_processes",
        sa.Column("counters_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("report_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("write_id", sa.Uuid(), nullable=False),
        sa.CheckConstraint("sequence >= 0", name=op.f("ck_metered_processes_sequence_not_negative")),
        sa.PrimaryKeyConstraint("counters_id", name=op.f("pk_metered_processes")),
    )
    op.create_index(op.f("ix_metered_processes_report_time"), "metered_processes", ["report_time"])
    op.create_table(
        "meters",
        sa.Column("counters_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("tenant_uid", sa.Uuid(), nullable=False),
        sa.Column("namespace_uid", sa.Text(), nullable=False),
        sa.Column("namespace_id", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("dram_bytes", sa.BigInteger(), nullable=False),
        sa.Column("ssd_bytes", sa.BigInteger(), nullable=False),
        sa.Column("counters", JSONB(), nullable=False),
        sa.CheckConstraint("dram_bytes >= 0", name=op.f("ck_meters_dram_bytes_not_negative")),
        sa.CheckConstraint("ssd_bytes >= 0", name=op.f("ck_meters_ssd_bytes_not_negative")),
        sa.CheckConstraint("jsonb_typeof(counters) = 'object'", name=op.f("ck_meters_counters_is_object")),
        sa.ForeignKeyConstraint(
            ["counters_id"], ["metered_processes.counters_id"], name=op.f("fk_meters_counters_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("counters_id", "tenant_id", "tenant_uid", "namespace_uid", name=op.f("pk_meters")),
    )
    protect("meters")
    op.create_table(
        "open_usage",
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("tenant_uid", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Text(), nullable=False),
        sa.Column("counters_id", sa.Text(), nullable=False),
        sa.Column("totals", JSONB(), nullable=False),
        sa.CheckConstraint("jsonb_typeof(totals) = 'object'", name=op.f("ck_open_usage_totals_is_object")),
        sa.PrimaryKeyConstraint(
            "hour", "tenant_id", "tenant_uid", "namespace_id", "counters_id", name=op.f("pk_open_usage")
        ),
    )
    op.create_index("ix_open_usage_tenant_id", "open_usage", ["tenant_id", "hour"])
    protect("open_usage")
    op.create_table(
        "metering_state",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("closed_from", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_until", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_metering_state_one_row")),
        sa.CheckConstraint("closed_from <= closed_until", name=op.f("ck_metering_state_closed_from_before_until")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metering_state")),
    )
    op.execute("INSERT INTO metering_state (id, closed_from, closed_until) VALUES (1, 'epoch', 'epoch')")
    op.create_table(
        "usage_records",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_uid", sa.Uuid(), nullable=False),
        sa.Column("namespace_id", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Numeric(30, 0), nullable=False) for name in _INTEGRALS),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTERS),
        *(sa.Column(name, JSONB(), nullable=False) for name in _MAPS),
        *(
            sa.CheckConstraint(f"{name} >= 0", name=op.f(f"ck_usage_records_{name}_not_negative"))
            for name in (*_INTEGRALS, *_COUNTERS)
        ),
        *(
            sa.CheckConstraint(f"jsonb_typeof({name}) = 'object'", name=op.f(f"ck_usage_records_{name}_is_object"))
            for name in _MAPS
        ),
        sa.PrimaryKeyConstraint("tenant_id", "hour", "tenant_uid", "namespace_id", name=op.f("pk_usage_records")),
    )
    op.create_index("ix_usage_records_hour", "usage_records", ["hour", "tenant_id"])
    protect("usage_records")
    op.execute(_GUARD_STATE)
    op.execute(_GUARD_RECORDS)
    for trigger in _TRIGGERS:
        op.execute(trigger)


def downgrade() -> None:
    """Take it back while nothing was metered.

    Raises:
        FailedPreconditionError: there is usage that would have to be billed.
    """
    written = "SELECT EXISTS (SELECT FROM usage_records) OR EXISTS (SELECT FROM open_usage)"
    if op.get_bind().scalar(sa.text(written)):
        raise FailedPreconditionError(
            "the downgrade would destroy records of what tenants used",
            reason="SCHEMA_IN_USE",
            hint="keep this version of the schema; a bill is not taken back",
        )
    for table in ("usage_records", "metering_state", "open_usage", "meters", "metered_processes"):
        op.drop_table(table)
    op.execute("DROP FUNCTION guard_usage_records()")
    op.execute("DROP FUNCTION guard_metering_state()")
