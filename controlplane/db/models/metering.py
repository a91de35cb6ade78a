"""What tenants used, hour by hour, and how far the counters of each node's process were followed.

::

    metered_processes 1──n meters       the last report of each process of a node, tenant by tenant
                      1──n open_usage   what it added to hours that are not closed yet
    metering_state                      which hours are closed (one row)
    usage_records                       closed hours: inserted once, when they close, and never changed

None of it hangs off a tenant's row: what was used is billed also after the tenant is gone, and a tenant of the same
name has another uid. Triggers keep closed hours as they are, whoever connects (``0012_metering.py``).
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, Numeric, SmallInteger
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import is_object, not_negative
from controlplane.db.models.base import Base
from saltern.billing.columns import COUNTS, INTEGRALS, MAPS

#: Columns of ``UsageRecord`` beside the byte-seconds: fields of the message, and columns of a bill, of the same names.
RECORD_COUNTERS = COUNTS
#: Columns that may pass 2^63: bytes held x seconds.
RECORD_INTEGRALS = INTEGRALS
#: Columns of counters by name.
RECORD_MAPS = MAPS
#: Decimal digits of a byte-second column: 2^53 bytes for a century have 26.
INTEGRAL_DIGITS = 30


class MeteredProcess(Base):
    """A process of a node, by the id that it made of its counters, and the report that was taken in last.

    It is not bound to the node's row: a process that comes back after its node was removed goes on counting where it
    was, and what it counted before must not be counted again (I8). ``write_id``: another one whenever its meters
    change, so that a control plane knows whether what it remembers of them is still so.
    """

    __tablename__ = "metered_processes"
    __table_args__ = (not_negative("sequence"),)

    counters_id: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str]
    sequence: Mapped[int]
    report_time: Mapped[datetime] = mapped_column(index=True)
    write_id: Mapped[UUID]


class Meter(Base):
    """The newest reading of one tenant, or of one of its namespaces, in one process.

    ``since``: up to then the bytes held are booked. ``counters``: absolute, those above 0 by name. ``namespace_uid`` is
    empty for the tenant as a whole.
    """

    __tablename__ = "meters"
    __table_args__ = (not_negative("dram_bytes"), not_negative("ssd_bytes"), is_object("counters"))

    counters_id: Mapped[str] = mapped_column(
        ForeignKey("metered_processes.counters_id", ondelete="CASCADE"), primary_key=True
    )
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_uid: Mapped[UUID] = mapped_column(primary_key=True)
    namespace_uid: Mapped[str] = mapped_column(primary_key=True)
    namespace_id: Mapped[str]
    since: Mapped[datetime]
    dram_bytes: Mapped[int]
    ssd_bytes: Mapped[int]
    counters: Mapped[dict[str, int]] = mapped_column(JSONB)


class OpenUsage(Base):
    """What one process has added to an hour that is not closed: ``totals`` by name."""

    __tablename__ = "open_usage"
    __table_args__ = (is_object("totals"), Index("ix_open_usage_tenant_id", "tenant_id", "hour"))

    hour: Mapped[datetime] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_uid: Mapped[UUID] = mapped_column(primary_key=True)
    namespace_id: Mapped[str] = mapped_column(primary_key=True)
    counters_id: Mapped[str] = mapped_column(primary_key=True)
    totals: Mapped[dict[str, int]] = mapped_column(JSONB)


class UsageRecord(Base):
    """A closed hour of a tenant, or of one of its namespaces; ``namespace_id`` is empty for the tenant as a whole."""

    __tablename__ = "usage_records"
    __table_args__ = (
        *(not_negative(column) for column in (*RECORD_INTEGRALS, *RECORD_COUNTERS)),
        *(is_object(column) for column in RECORD_MAPS),
        Index("ix_usage_records_hour", "hour", "tenant_id"),
    )

    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    tenant_uid: Mapped[UUID] = mapped_column(primary_key=True)
    namespace_id: Mapped[str] = mapped_column(primary_key=True)
    dram_byte_seconds: Mapped[int] = mapped_column(Numeric(INTEGRAL_DIGITS, 0))
    ssd_byte_seconds: Mapped[int] = mapped_column(Numeric(INTEGRAL_DIGITS, 0))
    hits: Mapped[int]
    misses: Mapped[int]
    tokens_saved: Mapped[int]
    read_bytes: Mapped[int]
    stored_bytes: Mapped[int]
    puts_stored: Mapped[int]
    puts_refused: Mapped[int]
    evictions: Mapped[int]
    evicted_bytes: Mapped[int]
    ssd_read_bytes: Mapped[int]
    ssd_written_bytes: Mapped[int]
    gap_seconds: Mapped[int]
    late_seconds: Mapped[int]
    puts_refused_by_reason: Mapped[dict[str, int]] = mapped_column(JSONB)
    evictions_by_cause: Mapped[dict[str, int]] = mapped_column(JSONB)


class MeteringState(Base):
    """One row: hours before ``closed_until`` are closed, and those from ``closed_from`` on were closed last."""

    __tablename__ = "metering_state"
    __table_args__ = (
        CheckConstraint("id = 1", name="one_row"),
        CheckConstraint("closed_from <= closed_until", name="closed_from_before_until"),
    )

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False, default=1)
    closed_from: Mapped[datetime]
    closed_until: Mapped[datetime]
