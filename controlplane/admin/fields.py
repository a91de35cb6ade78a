"""Values of requests: each is checked here before anything else happens, and refused with the name of its field."""

from __future__ import annotations

import re
import unicodedata
from datetime import UTC, datetime, timedelta
from uuid import UUID

from google.protobuf.timestamp_pb2 import Timestamp

from saltern.errors import InvalidArgumentError
from saltern.names import TenantId, parse_tenant_name

PAGE_SIZE_DEFAULT = 50
PAGE_SIZE_MAX = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: 9999-12-31T23:59:59Z, the last second of google.protobuf.Timestamp.
_TIMESTAMP_MAX_S = 253_402_300_799
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
# Control characters, surrogates, line and paragraph separators; and those that turn the direction of a terminal's text.
_REFUSED_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
_REFUSED_CHARACTERS = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def refused(field: str, message: str, hint: str, reason: str = "INVALID_FIELD") -> InvalidArgumentError:
    """The error for a value of ``field``; ``message`` holds nothing long that the caller wrote."""
    return InvalidArgumentError(f"{field} {message}", reason=reason, hint=hint, metadata={"field": field})


def parse_text(value: str, field: str, *, max_chars: int, required: bool = False) -> str:
    """One line of text for people; raises InvalidArgumentError if it is too long, holds control characters or lacks."""
    if len(value) > max_chars:
        raise refused(field, f"has {len(value)} characters, above the limit of {max_chars}", "write less")
    if any(char in _REFUSED_CHARACTERS or unicodedata.category(char) in _REFUSED_CATEGORIES for char in value):
        raise refused(field, "holds control characters", "write one line of plain text")
    if required and not value.strip():
        raise refused(field, "is empty", f"give {field}")
    return value


def parse_integer(value: int, field: str, low: int, high: int) -> int:
    """An integer of ``low..high``; raises InvalidArgumentError for another."""
    if not low <= value <= high:
        raise refused(field, f"{value} is outside {low}..{high}", f"give an integer from {low} to {high}")
    return value


def parse_page_size(value: int) -> int:
    """How many to answer with: 0 means 50, more than 1000 means 1000 (AIP-158); raises for a negative one."""
    if value < 0:
        raise refused("page_size", f"{value} is negative", f"give 1 to {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE_DEFAULT}")
    return min(value, PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT


def parse_request_id(value: str) -> UUID | None:
    """The request id, or None where the caller gave none (AIP-155); raises InvalidArgumentError unless it is a UUID."""
    if not value:
        return None
    if _UUID.fullmatch(value) is None:
        raise refused("request_id", "is not a UUID", "give a fresh UUID for each request, or none")
    return UUID(value)


def parse_parent(value: str) -> TenantId | None:
    """The tenant of ``tenants/{tenant}``, or None for the platform's own collection (empty)."""
    return parse_tenant_name(value) if value else None


def parse_timestamp(value: Timestamp, field: str) -> datetime:
    """A time, to the microsecond; raises InvalidArgumentError outside the years 1970 to 9999."""
    if not (0 <= value.seconds <= _TIMESTAMP_MAX_S and 0 <= value.nanos < 10**9):
        raise refused(field, "is not a time between the years 1970 and 9999", "give an RFC 3339 time")
    return _EPOCH + timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)


def to_timestamp(value: datetime | None) -> Timestamp | None:
    """The wire form; None stays None."""
    if value is None:
        return None
    seconds, microseconds = divmod((value - _EPOCH) // _MICROSECOND, 1_000_000)
    return Timestamp(seconds=seconds, nanos=1000 * microseconds)  # a third of the time of Timestamp.FromDatetime
