"""A circuit breaker: no caller waits for a dead peer more than once in each backoff (I10).

A state machine without a clock of its own: every method takes ``now_s`` from a monotonic clock.

::

    CLOSED --(a timeout, or 3 quick failures in a row)--> OPEN --(backoff over)--> HALF-OPEN: one probe
       ^                                                   ^                          |
       +------------------ success ------------------------+------- failure ---------+
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from saltern.errors import SalternError, UnavailableError


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a breaker opens and for how long.

    Attributes:
        quick_failures: how many refused or broken connections in a row open it; a timeout opens it at once.
        backoff_first_s, backoff_max_s: bounds of the exponential backoff.
    """

    quick_failures: int = 3
    backoff_first_s: float = 0.1
    backoff_max_s: float = 10.0


class CircuitBreaker:
    """Decides whether a peer may be asked now. Thread-safe.

    Args:
        peer: how errors call the peer.
        policy: thresholds.
        jitter: returns a number in 0..1; a backoff is scaled by 0.5 to 1.0 so that clients do not return together.
    """

    def __init__(self, peer: str, policy: BreakerPolicy, jitter: Callable[[], float]) -> None:
        self._peer = peer
        self._policy = policy
        self._jitter = jitter
        self._lock = threading.Lock()
        self._failures = 0
        self._times_opened = 0
        self._opens_until_s: float | None = None
        self._probe_until_s = 0.0
        self._last_error: SalternError | None = None

    @property
    def is_open(self) -> bool:
        return self._opens_until_s is not None

    def check(self, now_s: float, *, patience_s: float) -> None:
        """Let the caller through or raise UnavailableError (reason CIRCUIT_OPEN) at once.

        Args:
            now_s: monotonic seconds.
            patience_s: how long the caller may take; a probe that is not heard of for so long is given up.
        """
        if self._opens_until_s is None:  # no lock: with a healthy peer there is nothing to agree on
            return
        with self._lock:
            if self._opens_until_s is None:
                return
            if now_s >= self._opens_until_s and now_s >= self._probe_until_s:
                self._probe_until_s = now_s + patience_s
                return
            wait_s = max(self._opens_until_s, self._probe_until_s) - now_s
            why = f": {self._last_error.message}" if self._last_error else ""
        raise UnavailableError(
            f"{self._peer} failed and is not asked again yet{why}",
            reason="CIRCUIT_OPEN",
            hint="go on without the cache; it is tried again by itself",
            retry_after_ms=max(1, round(wait_s * 1000)),
        )

    def record_success(self) -> None:
        if not self._failures:
            return
        with self._lock:
            self._failures = self._times_opened = 0
            self._opens_until_s = self._last_error = None
            self._probe_until_s = 0.0

    def record_failure(self, now_s: float, error: SalternError, *, waited: bool) -> None:
        """Note a failure; ``waited`` says that the caller lost its time on it rather than being refused at once."""
        with self._lock:
            self._failures += 1
            self._last_error = error
            was_open = self._opens_until_s is not None
            if not (was_open or waited or self._failures >= self._policy.quick_failures):
                return
            if was_open and self._opens_until_s is not None and now_s < self._opens_until_s:
                return  # a call that began before it opened: one failure of the peer is one backoff
            backoff_s = min(self._policy.backoff_first_s * 2 ** min(self._times_opened, 30), self._policy.backoff_max_s)
            self._times_opened += 1
            self._opens_until_s = now_s + backoff_s * (0.5 + 0.5 * self._jitter())
            self._probe_until_s = 0.0
