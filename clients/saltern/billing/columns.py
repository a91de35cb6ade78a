"""Usage records as rows with stable columns, for CSV and for JSON (docs/metering.md says what each one means).

Columns are only ever added, at the end. Units are in their names, numbers are exact integers, times RFC 3339 in UTC.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from saltern.admin.v1 import usage_pb2

#: Number columns, and fields of ``UsageRecord``: bytes x seconds, then what is counted.
INTEGRALS: Final = ("dram_byte_seconds", "ssd_byte_seconds")
COUNTS: Final = (
    "hits",
    "misses",
    "tokens_saved",
    "read_bytes",
    "stored_bytes",
    "puts_stored",
    "puts_refused",
    "evictions",
    "evicted_bytes",
    "ssd_read_bytes",
    "ssd_written_bytes",
    "gap_seconds",
    "late_seconds",
)
#: Columns of counters by name: a JSON object in a CSV cell.
MAPS: Final = ("puts_refused_by_reason", "evictions_by_cause")
COLUMNS: Final = ("tenant", "tenant_uid", "namespace", "start", "end", "state", *INTEGRALS, *COUNTS, *MAPS)
OPEN: Final = "open"
CLOSED: Final = "closed"


def to_row(record: usage_pb2.UsageRecord) -> dict[str, str | int | dict[str, int]]:
    """A record by the names of ``COLUMNS``, in their order."""
    row: dict[str, str | int | dict[str, int]] = {
        "tenant": record.tenant.removeprefix("tenants/"),
        "tenant_uid": record.tenant_uid,
        "namespace": record.namespace_id,
        "start": _rfc3339(record.start_time.seconds),
        "end": _rfc3339(record.end_time.seconds),
        "state": OPEN if record.is_open else CLOSED,
    }
    row.update((name, int(getattr(record, name) or 0)) for name in INTEGRALS)
    row.update((name, getattr(record, name)) for name in COUNTS)
    row.update((name, dict(sorted(getattr(record, name).items()))) for name in MAPS)
    return row


def csv_line(cells: Mapping[str, object]) -> str:
    """One line of CSV, with its line end: the values of ``cells``, objects as compact JSON."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(
        json.dumps(cell, separators=(",", ":"), sort_keys=True) if isinstance(cell, dict) else cell
        for cell in cells.values()
    )
    return line.getvalue()


def csv_head(columns: tuple[str, ...] = COLUMNS) -> str:
    """The line of CSV that names the columns."""
    return ",".join(columns) + "\n"


def _rfc3339(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
