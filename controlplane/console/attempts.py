"""How often somebody may fail to log in, by the address that asks.

Not because an API key could be guessed (256 random bits), but because each attempt costs a transaction and may cost an
audit event. So it goes by who asks and never by the key that is asked about: whoever knows how another's key begins, as
lists of keys show it, keeps nobody out. Only failures count, and a counter refills by itself.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Final

from saltern.errors import ResourceExhaustedError

FAILURES_MAX: Final = 10
REFILL_S: Final = 6.0
#: Sources that are remembered; the ones that failed longest ago are forgotten first.
_SOURCES_MAX: Final = 4096
#: What one customer of a provider has of IPv6, at least: it counts as one address.
_IPV6_PREFIX_BITS: Final = 64


class Attempts:
    """Failures of each source as a bucket that leaks one every :data:`REFILL_S` seconds. Knows no clock."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # failures, at which time

    def begin(self, source: str, now_s: float) -> None:
        """Count an attempt as failed until :meth:`forgive` takes it back: those that are in progress count too.

        Raises:
            ResourceExhaustedError: TOO_MANY_LOGINS, with the time after which one more is allowed; it counts nothing.
        """
        level = self._level(source, now_s)
        excess = level - (FAILURES_MAX - 1)
        if excess > 0:
            raise ResourceExhaustedError(
                "too many attempts to log in from this address have failed",
                reason="TOO_MANY_LOGINS",
                hint="wait a few seconds, then check that you paste the whole secret",
                retry_after_ms=round(excess * REFILL_S * 1000),
            )
        self._buckets[source] = (level + 1.0, now_s)
        self._buckets.move_to_end(source)
        while len(self._buckets) > _SOURCES_MAX:
            self._buckets.popitem(last=False)

    def forgive(self, source: str) -> None:
        """An attempt that has begun was no failure."""
        failures, at_s = self._buckets.get(source, (0.0, 0.0))
        if failures > 1.0:
            self._buckets[source] = (failures - 1.0, at_s)
        else:
            self._buckets.pop(source, None)

    def _level(self, source: str, now_s: float) -> float:
        failures, at_s = self._buckets.get(source, (0.0, now_s))
        return max(failures - (now_s - at_s) / REFILL_S, 0.0)


def source_of(address: str) -> str:
    """What an address, ``HOST:PORT``, counts as: its host, of IPv6 the network that one customer has."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((int(parsed), _IPV6_PREFIX_BITS), strict=False))
