"""Numbers, times and words as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from saltern.sizes import format_size

NOTHING: Final = "\N{EN DASH}"
_UNITS: Final = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def count(number: int) -> str:
    """``1,234``."""
    return f"{number:,}"


def short_count(number: int) -> str:
    """Three digits and a letter: ``1.2 M``, for a headline; exact numbers stand in tables."""
    value, unit = float(number), ""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    text = f"{value:.0f}" if value >= 99.95 or value == int(value) else f"{value:.1f}"
    return f"{text} {unit}".strip()


def size(size_bytes: int) -> str:
    """``1.5 GiB``."""
    return format_size(size_bytes)


def ratio(part: int, whole: int) -> str:
    """``94.2 %``; a dash where there is nothing to be a part of."""
    return f"{100 * part / whole:.1f} %" if whole else NOTHING


def utc(time: datetime) -> str:
    """``2026-11-30 04:05 UTC``."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def to_datetime(timestamp: Timestamp) -> datetime | None:
    """The time of a message; None where it is not set."""
    if not (timestamp.seconds or timestamp.nanos):
        return None
    return datetime.fromtimestamp(timestamp.seconds, UTC) + timedelta(microseconds=timestamp.nanos // 1000)


def stamp(timestamp: Timestamp, otherwise: str = NOTHING) -> str:
    """The time of a message as text; ``otherwise`` where it is not set."""
    time = to_datetime(timestamp)
    return otherwise if time is None else utc(time)


def exact_stamp(timestamp: Timestamp) -> str:
    """To the second, for the audit trail."""
    time = to_datetime(timestamp)
    return NOTHING if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: int) -> str:
    """In the largest unit that divides it: ``7 days``, ``90 minutes``."""
    if not seconds:
        return "none"
    size_s, unit = next((size_s, unit) for size_s, unit in _UNITS if seconds % size_s == 0)
    number = seconds // size_s
    return f"{number} {unit}{'' if number == 1 else 's'}"


def ago(time: datetime | None, now: datetime) -> str:
    """``12 seconds ago``; ``never`` for none."""
    if time is None:
        return "never"
    seconds = max(int((now - time).total_seconds()), 0)
    size_s, unit = next(((size_s, unit) for size_s, unit in _UNITS if seconds >= 2 * size_s), (1, "second"))
    number = seconds // size_s
    return f"{number} {unit}{'' if number == 1 else 's'} ago"


def enum_word(kind: Any, value: int, prefix: str) -> str:
    """A value of an enumeration as a word, ``TIER_DRAM`` as ``dram``; a newer one than known as its number."""
    try:
        name: str = kind.Name(value)
    except ValueError:
        return f"{value}"
    return name.removeprefix(prefix).lower().replace("_", "-")


def last_segment(name: str) -> str:
    """The id at the end of a resource name."""
    return name.rpartition("/")[2]
