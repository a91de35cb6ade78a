"""How fast a tenant may use a node: what it does is charged, and whoever owes waits.

A request begins while its tenant owes nothing, and is charged whatever it turns out to cost; the next one pays. So a
request larger than a second's worth is possible, nothing has to be known beforehand, and a tenant never gets more than
its rate over time, a burst, and one request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dataplane.core.lines import Line, Place
from saltern.errors import ResourceExhaustedError
from saltern.names import TenantId
from tenants.quota import NO_RATE_LIMITS, RateLimits

_NS: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000


@dataclass(slots=True)
class RateMeter:
    """A rate that may be exceeded for a moment; ``rate_per_s`` 0 permits everything. What it saves up is one second.

    Every ``now_ns`` is a reading of one monotonic clock; an earlier one than before counts as the same.
    """

    rate_per_s: int = 0
    _level: int = 0  # what is left, in units of 1 / 10^9; below 0 what is owed
    _filled_ns: int = 0

    def set_rate(self, rate_per_s: int, now_ns: int) -> None:
        """Change the rate. What is owed stays owed; a rate that is new begins with a full second."""
        self._fill(now_ns)
        full = rate_per_s * _NS
        self._level = min(self._level, full) if self.rate_per_s else full
        self._filled_ns = max(now_ns, self._filled_ns)
        self.rate_per_s = rate_per_s

    def charge(self, amount: int, now_ns: int) -> None:
        """Take ``amount``, whether or not it is there; a negative one is given back."""
        if self.rate_per_s:
            self._fill(now_ns)
            self._level = min(self._level - amount * _NS, self.rate_per_s * _NS)

    def wait_ns(self, now_ns: int, ahead: int = 0) -> int:
        """How long until nothing is owed, if ``ahead`` is taken before; 0 for now."""
        if not self.rate_per_s:
            return 0
        self._fill(now_ns)
        owed = ahead * _NS - self._level
        return max(0, -(-owed // self.rate_per_s))

    def owed(self, now_ns: int) -> int:
        """What is owed, rounded up; 0 if nothing."""
        self._fill(now_ns)
        return max(0, -(self._level // _NS)) if self.rate_per_s else 0

    def _fill(self, now_ns: int) -> None:
        if now_ns > self._filled_ns:
            gained = (now_ns - self._filled_ns) * self.rate_per_s
            self._level = min(self._level + gained, self.rate_per_s * _NS)
            self._filled_ns = now_ns


@dataclass(slots=True)
class TenantRates:
    """The rates of one tenant, and its requests that wait for them.

    Args:
        wait_max_ns: how long a request may wait; one that would have to wait longer is refused at once.

    Attributes:
        is_limited: whether there is any limit.
        delayed, refused: requests that had to wait, and that were refused; only ever grow.
    """

    tenant: TenantId
    wait_max_ns: int
    operations: RateMeter = field(default_factory=RateMeter)
    bytes: RateMeter = field(default_factory=RateMeter)
    line: Line = field(default_factory=Line)
    is_limited: bool = False
    delayed: int = 0
    refused: int = 0
    _limits: RateLimits = NO_RATE_LIMITS

    def set_limits(self, limits: RateLimits, now_ns: int) -> None:
        """Take over new limits; those who wait are let in or refused by them at the next :meth:`advance`."""
        if limits == self._limits:
            return
        self._limits = limits
        self.operations.set_rate(limits.operations_per_s, now_ns)
        self.bytes.set_rate(limits.bytes_per_s, now_ns)
        self.is_limited = bool(limits.operations_per_s or limits.bytes_per_s)

    def enter(self, operations: int, payload_bytes: int, now_ns: int) -> Place | None:
        """Ask to begin a request that costs at least this much, which is then charged.

        Returns:
            None if it may begin now; else a place in line: wait until it is not waiting. In any case :meth:`leave` it.

        Raises:
            ResourceExhaustedError: RATE_LIMITED, it would have to wait longer than ``wait_max_ns``.
        """
        if self.line.is_empty and not self._wait_ns(now_ns):
            self.charge(operations, payload_bytes, now_ns)
            return None
        operations_ahead = sum(place.operations for place in self.line)
        bytes_ahead = sum(place.payload_bytes for place in self.line)
        wait_ns = self._wait_ns(now_ns, operations_ahead, bytes_ahead)
        if wait_ns > self.wait_max_ns:
            self.refused += 1
            raise self._limited(now_ns, operations_ahead, bytes_ahead)
        self.delayed += 1
        place = Place(operations, payload_bytes, now_ns + self.wait_max_ns)
        self.line.join(place)
        return place

    def advance(self, now_ns: int) -> list[Place]:
        """Let in who may begin now and refuse who cannot in time; return those who wait no longer."""
        done: list[Place] = []
        while (head := self.line.head) is not None:
            wait_ns = self._wait_ns(now_ns)
            if not wait_ns:
                self.charge(head.operations, head.payload_bytes, now_ns)
                done.append(self.line.let_in())
            elif head.deadline_ns is not None and now_ns + wait_ns > head.deadline_ns:
                self.refused += 1
                done.append(self.line.refuse(self._limited(now_ns)))
            else:
                break
        return done

    def due_ns(self, now_ns: int) -> int | None:
        """How long until :meth:`advance` has something to do; None if it waits for nothing but a :meth:`leave`."""
        return self._wait_ns(now_ns) if self.line.head is not None else None

    def leave(self, place: Place) -> None:
        """The request has begun and all of its cost is charged, or it has given up; then call :meth:`advance`."""
        self.line.leave(place)

    def charge(self, operations: int, payload_bytes: int, now_ns: int) -> None:
        """Charge what a request costs beyond what was known when it entered; what it did not need is negative."""
        self.operations.charge(operations, now_ns)
        self.bytes.charge(payload_bytes, now_ns)

    def _wait_ns(self, now_ns: int, operations_ahead: int = 0, bytes_ahead: int = 0) -> int:
        return max(self.operations.wait_ns(now_ns, operations_ahead), self.bytes.wait_ns(now_ns, bytes_ahead))

    def _limited(self, now_ns: int, operations_ahead: int = 0, bytes_ahead: int = 0) -> ResourceExhaustedError:
        operations_ns = self.operations.wait_ns(now_ns, operations_ahead)
        bytes_ns = self.bytes.wait_ns(now_ns, bytes_ahead)
        rate, limit, wait_ns = ("operations_per_s", self._limits.operations_per_s, operations_ns)
        if bytes_ns > operations_ns:
            rate, limit, wait_ns = ("bytes_per_s", self._limits.bytes_per_s, bytes_ns)
        retry_after_ms = -(-wait_ns // _NS_PER_MS)
        return ResourceExhaustedError(
            f"tenant {self.tenant!r} is above its limit of {limit} {rate} on this node: what it has begun takes"
            f" {retry_after_ms} ms more",
            reason="RATE_LIMITED",
            hint="retry then, spread the requests out, or have the rate raised",
            metadata={"tenant": self.tenant, "rate": rate, f"limit_{rate}": str(limit)},
            retry_after_ms=retry_after_ms,
        )
