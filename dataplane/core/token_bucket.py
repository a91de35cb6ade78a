"""A rate that may be exceeded for a moment: so many a second, and never more than a burst at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_NS: Final = 1_000_000_000


@dataclass(slots=True)
class TokenBucket:
    """Integer token bucket; ``rate_per_s`` 0 permits everything.

    Attributes:
        burst: the most that may be taken at once after a pause.
    """

    rate_per_s: int
    burst: int
    _level_ns: int = 0  # what is available, in units of 1 / 10^9
    _filled_ns: int | None = None

    def take(self, amount: int, now_ns: int) -> bool:
        """Take ``amount`` if it is there; an amount above the burst is taken from a full bucket, which then owes it."""
        if not self.rate_per_s:
            return True
        full = self.burst * _NS
        if self._filled_ns is None:
            self._level_ns, self._filled_ns = full, now_ns
        elif now_ns > self._filled_ns:
            self._level_ns = min(full, self._level_ns + (now_ns - self._filled_ns) * self.rate_per_s)
            self._filled_ns = now_ns
        if self._level_ns < min(amount * _NS, full):
            return False
        self._level_ns -= amount * _NS
        return True
