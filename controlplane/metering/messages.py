"""Usage records as messages."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from controlplane.db.models.metering import RECORD_COUNTERS, RECORD_INTEGRALS, RECORD_MAPS
from controlplane.metering.records import Record
from controlplane.metering.store import to_unix_s
from saltern.admin.v1 import usage_pb2
from saltern.names import tenant_name

_INT64_MAX: Final = 2**63 - 1


def to_usage_record(record: Record, *, is_open: bool | None = None) -> usage_pb2.UsageRecord:
    """A record as a message; ``is_open``: say so whatever it was when it was read."""
    # A day's counts are saturated: those of each hour fit, their sum need not.
    fields: dict[str, Any] = {name: min(record.amounts.get(name, 0), _INT64_MAX) for name in RECORD_COUNTERS}
    fields.update((name, str(record.amounts.get(name, 0))) for name in RECORD_INTEGRALS)
    fields.update((name, dict(record.maps.get(name, {}))) for name in RECORD_MAPS)
    return usage_pb2.UsageRecord(
        tenant=tenant_name(record.tenant),
        tenant_uid=str(record.tenant_uid),
        namespace_id=record.namespace,
        start_time=Timestamp(seconds=to_unix_s(record.start)),
        end_time=Timestamp(seconds=to_unix_s(record.end)),
        is_open=record.is_open if is_open is None else is_open,
        **fields,
    )
