"""What requests for usage records ask for, and page tokens of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.fields import parse_timestamp, refused
from controlplane.admin.pages import decode_text_token, encode_page_token, invalid_token
from controlplane.metering.records import DAY, HOUR, Position, RecordQuery, first_hour
from saltern.admin.v1 import usage_pb2
from saltern.errors import SalternError
from saltern.names import TenantId, parse_namespace_id, parse_tenant_id

RecordsRequest: TypeAlias = usage_pb2.ListUsageRecordsRequest | usage_pb2.ExportUsageRecordsRequest

_STEPS: Final[dict[int, timedelta]] = {
    usage_pb2.ListUsageRecordsRequest.GRANULARITY_UNSPECIFIED: HOUR,
    usage_pb2.ListUsageRecordsRequest.GRANULARITY_HOUR: HOUR,
    usage_pb2.ListUsageRecordsRequest.GRANULARITY_DAY: DAY,
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SEPARATOR: Final = " "  # in no name, uid or number
_HOUR_S_MAX: Final = 253_402_300_799


async def parse_query(
    session: AsyncSession,
    request: RecordsRequest,
    now: datetime,
    *,
    tenant: TenantId | None = None,
    tenant_uid: UUID | None = None,
    closed_only: bool = False,
) -> RecordQuery:
    """What ``request`` asks for, of ``tenant`` or of every one.

    Raises:
        InvalidArgumentError: INVALID_FIELD.
    """
    step = _STEPS.get(request.granularity)
    if step is None:
        raise refused("granularity", f"{request.granularity} is none", "give GRANULARITY_HOUR or GRANULARITY_DAY")
    begin, end = (
        parse_timestamp(getattr(request, field), field) if request.HasField(field) else None
        for field in ("start_time", "end_time")
    )
    # Nothing is known of before the first hour or after now, and a walk through empty days would be for nothing.
    first = await first_hour(session) or now
    begin = max(begin or first, first)
    end = _floor(now, step) + step if end is None or end >= now else _floor(end, step)
    return RecordQuery(step, _floor(begin, step), end, tenant, tenant_uid, request.by_namespace, closed_only)


def collection_of(request: usage_pb2.ListUsageRecordsRequest) -> str:
    """The name of the list that a page token belongs to: all of the request that must stay the same."""
    same = usage_pb2.ListUsageRecordsRequest()
    same.CopyFrom(request)
    same.page_size, same.page_token = 0, ""
    return f"usageRecords/{same.SerializeToString(deterministic=True).hex()}"


def encode_position(collection: str, position: Position) -> str:
    """The token of the page behind ``position``."""
    start, tenant, tenant_uid, namespace = position
    return encode_page_token(
        collection, _SEPARATOR.join((str(int(start.timestamp())), tenant, str(tenant_uid), namespace))
    )


def decode_position(token: str, collection: str) -> Position | None:
    """Where the page begins; None for the first page. Raises InvalidArgumentError (INVALID_PAGE_TOKEN)."""
    if not token:
        return None
    parts = decode_text_token(token, collection).split(_SEPARATOR)
    try:
        start, tenant, tenant_uid, namespace = parts
        start_s = int(start)
        if not 0 <= start_s <= _HOUR_S_MAX:
            raise invalid_token()
        return (
            datetime.fromtimestamp(start_s, UTC),
            parse_tenant_id(tenant),
            UUID(tenant_uid),
            parse_namespace_id(namespace) if namespace else "",
        )
    except (ValueError, SalternError):
        raise invalid_token() from None


def _floor(time: datetime, step: timedelta) -> datetime:
    return time - (time - _EPOCH) % step
