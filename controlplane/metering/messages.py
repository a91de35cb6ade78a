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


def saturated(total: int) -> int:
    """A sum of counts as int64: each count of a node fits, their sum need not.

    Whoever reports counts that large reports nonsense; it must not keep an hour of everybody else's from being closed.
    """
    return min(int(total), _INT64_MAX)


def to_usage_record(record: Record, *, is_open: bool | None = None) -> usage_pb2.UsageRecord:
    """A record as a message; ``is_open``: say so whatever it was when it was read."""
    fields: dict[str, Any] = {name: saturated(record.amounts.get(name, 0)) for name in RECORD_COUNTERS}
    fields.update((name, str(record.amounts.get(name, 0))) for name in RECORD_INTEGRALS)
    for column in RECORD_MAPS:
        fields[column] = {name: saturated(count) for name, count in record.maps.get(column, {}).items()}
    return usage_pb2.UsageRecord(
        tenant=tenant_name(record.tenant),
        tenant_uid=str(record.tenant_uid),
        namespace_id=record.namespace,
        start_time=Timestamp(seconds=to_unix_s(record.start)),
        end_time=Timestamp(seconds=to_unix_s(record.end)),
        is_open=record.is_open if is_open is None else is_open,
        **fields,
    )
