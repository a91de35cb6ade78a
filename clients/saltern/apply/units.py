"""Sizes, durations and times as files write them, exactly: what is written out reads back as the same number."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from saltern.errors import InvalidArgumentError

_DURATION: Final = re.compile(r"([0-9]{1,9})(s|m|h|d)", re.ASCII)
_UNIT_SECONDS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION_MAX_S: Final = 10 * 366 * 86400
_SIZE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_duration_s(text: str) -> int:
    """``90d``, ``12h``, ``30m``, ``10s`` or ``0`` in seconds; raises InvalidArgumentError for another form."""
    if text == "0":
        return 0
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else -1
    if not 0 <= seconds <= _DURATION_MAX_S:
        raise InvalidArgumentError(
            f"{text[:64]!r} is not a duration of up to 10 years", hint="write 30m, 12h, 90d or 0"
        )
    return seconds


def format_duration(seconds: int) -> str:
    """In the largest unit that divides it; ``0`` for none."""
    if not seconds:
        return "0"
    unit, size = next((unit, size) for unit, size in _UNIT_SECONDS.items() if seconds % size == 0)
    return f"{seconds // size}{unit}"


def parse_time_s(text: str) -> int:
    """RFC 3339, or a date alone (midnight UTC), as Unix seconds; raises InvalidArgumentError for another form."""
    try:
        parsed = datetime.fromisoformat(text)
        in_utc = parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidArgumentError(
            f"{text[:64]!r} is no time", hint="write 2027-11-29 or 2027-11-29T18:00:00Z"
        ) from None
    if in_utc.microsecond or in_utc.year < 1970:
        raise InvalidArgumentError(f"{text[:64]!r} is not a whole second after 1970", hint="write whole seconds")
    return int(in_utc.timestamp())


def format_time(seconds: int) -> str:
    """Unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def format_exact_size(size_bytes: int) -> str:
    """In the largest binary unit that divides it, so that it reads back as the same bytes."""
    power = 0
    while size_bytes and size_bytes % 1024 == 0 and power + 1 < len(_SIZE_UNITS):
        size_bytes //= 1024
        power += 1
    return f"{size_bytes}{_SIZE_UNITS[power]}" if power else str(size_bytes)
