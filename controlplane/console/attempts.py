"""How often somebody may fail to log in: by the address that asks, and by the key that is asked about.

Not because an API key could be guessed (256 random bits), but because each attempt costs a transaction and may cost an
audit event. So only failures count, whoever has a good key is never kept out by them for long, and a counter refills by
itself.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from saltern.errors import ResourceExhaustedError

FAILURES_MAX: Final = 10
REFILL_S: Final = 6.0
#: Sources that are remembered; the ones that failed longest ago are forgotten first.
_SOURCES_MAX: Final = 4096


class Attempts:
    """Failures of each source as a bucket that leaks one every :data:`REFILL_S` seconds. Knows no clock."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # failures, at which time

    def check(self, sources: tuple[str, ...], now_s: float) -> None:
        """Return if none of ``sources`` has failed too often.

        Raises:
            ResourceExhaustedError: TOO_MANY_LOGINS, with the time after which one more is allowed.
        """
        excess = max((self._level(source, now_s) - (FAILURES_MAX - 1) for source in sources), default=0.0)
        if excess > 0:
            raise ResourceExhaustedError(
                "too many attempts to log in have failed, from this address or with this key",
                reason="TOO_MANY_LOGINS",
                hint="wait a few seconds, then check that you paste the whole secret",
                retry_after_ms=round(excess * REFILL_S * 1000),
            )

    def note_failure(self, sources: tuple[str, ...], now_s: float) -> None:
        """Count one failure of each of ``sources``."""
        for source in sources:
            self._buckets[source] = (self._level(source, now_s) + 1.0, now_s)
            self._buckets.move_to_end(source)
        while len(self._buckets) > _SOURCES_MAX:
            self._buckets.popitem(last=False)

    def _level(self, source: str, now_s: float) -> float:
        failures, at_s = self._buckets.get(source, (0.0, now_s))
        return max(failures - (now_s - at_s) / REFILL_S, 0.0)
