"""The wall clock, as a value that tests replace, and its conversion to what tokens carry."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeAlias

Clock: TypeAlias = Callable[[], datetime]


def utc_now() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


def ceiling_s(time: datetime) -> int:
    """Whole Unix seconds, rounded up.

    Token times are whole seconds. What must be refused is everything issued before an instant; rounded down, the
    instant would let through a token from earlier in the same second.
    """
    return -int(-time.timestamp() // 1)
