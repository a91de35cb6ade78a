"""What nodes report of each tenant."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import is_object, not_negative, one_of
from controlplane.db.models.base import EMPTY_OBJECT, ZERO, Base, tenant_key
from tenants.quota import Tier

#: Columns of ``NodeUsage`` and fields of the messages of the same names: counters, and counters by name.
USAGE_COUNTERS = (
    "get_hits",
    "get_misses",
    "get_bytes",
    "put_bytes",
    "puts_stored",
    "puts_refused",
    "evictions",
    "evicted_bytes",
    "taken_entries",
    "taken_bytes",
)
USAGE_MAPS = (
    "evictions_by_cause",
    "evicted_bytes_by_cause",
    "refused_by_reason",
    "demotions_dropped_by_reason",
)


class NodeUsage(Base):
    """What the cache did for one tenant on one node since that node started: absolute counters, never increments.

    The columns of ``USAGE_MAPS`` are objects of counters by name, which nodes of a later version may add to.
    ``ssd``: an object with the fields of ``SsdActivity``; NULL without an SSD tier.
    """

    __tablename__ = "node_usage"
    __table_args__ = (
        *(not_negative(counter) for counter in USAGE_COUNTERS),
        *(is_object(column) for column in (*USAGE_MAPS, "ssd")),
    )

    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True)
    tenant_id: Mapped[str] = tenant_key(primary_key=True, index=True)
    get_hits: Mapped[int]
    get_misses: Mapped[int]
    get_bytes: Mapped[int]
    put_bytes: Mapped[int]
    puts_stored: Mapped[int]
    puts_refused: Mapped[int]
    evictions: Mapped[int]
    evicted_bytes: Mapped[int]
    report_time: Mapped[datetime]
    evictions_by_cause: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=EMPTY_OBJECT)
    evicted_bytes_by_cause: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=EMPTY_OBJECT)
    refused_by_reason: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=EMPTY_OBJECT)
    demotions_dropped_by_reason: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=EMPTY_OBJECT)
    taken_entries: Mapped[int] = mapped_column(server_default=ZERO)
    taken_bytes: Mapped[int] = mapped_column(server_default=ZERO)
    ssd: Mapped[dict[str, int] | None] = mapped_column(JSONB(none_as_null=True))


class NodeTierUsage(Base):
    """What one tenant holds on one tier of one node: resident + in flight + allocator slack, in bytes (I8).

    ``lent_bytes``: of its reservation there, not used; ``borrowed_bytes``: used past that reservation.
    """

    __tablename__ = "node_tier_usage"
    __table_args__ = (
        one_of("tier", *Tier),
        not_negative("used_bytes"),
        not_negative("entries"),
        not_negative("lent_bytes"),
        not_negative("borrowed_bytes"),
    )

    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True)
    tenant_id: Mapped[str] = tenant_key(primary_key=True, index=True)
    tier: Mapped[Tier] = mapped_column(primary_key=True)
    used_bytes: Mapped[int]
    entries: Mapped[int]
    lent_bytes: Mapped[int] = mapped_column(server_default=ZERO)
    borrowed_bytes: Mapped[int] = mapped_column(server_default=ZERO)
