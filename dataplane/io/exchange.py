"""What the requests of one session have in common: replies, deadlines (WIRE.md 8), and waiting to be let in."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, monotonic_ns

from dataplane.core.lines import Place
from dataplane.io.session import Session
from dataplane.io.stream import WAKE, ByteStream, Script
from dataplane.settings import SessionLimits


class Exchange:
    """One request after another on one stream.

    Attributes:
        deadline_s: when the present wait ends the session, on the clock of ``time.monotonic``.
        is_in_frame: whether a frame or its reply is on its way; only then does a lack of progress count.
        wake: resumes the script where it waits for WAKE; set by whoever runs it.
    """

    __slots__ = (
        "_flight_place",
        "_lapsed_s",
        "_rate_place",
        "deadline_s",
        "is_in_frame",
        "limits",
        "session",
        "stream",
        "wake",
    )

    def __init__(self, stream: ByteStream, session: Session, limits: SessionLimits) -> None:
        self.stream = stream
        self.session = session
        self.limits = limits
        self.deadline_s = monotonic() + limits.hello_s
        self.is_in_frame = False
        self.wake: Callable[[], None] = _nobody
        #: Since when the gate refuses the session.
        self._lapsed_s: float | None = None
        self._rate_place: Place | None = None
        self._flight_place: Place | None = None

    def overdue(self, now_s: float) -> str:
        """Why the session should be closed now, or an empty string."""
        if now_s > self.deadline_s:
            return "DEADLINE"
        if self.is_in_frame and now_s > self.stream.progress_s + self.limits.stall_s:
            return "STALLED"
        if not self.session.is_lapsed:
            self._lapsed_s = None
        elif self._lapsed_s is None:
            self._lapsed_s = now_s
        elif now_s > self._lapsed_s + self.limits.lapsed_s:
            return "LAPSED"
        return ""

    def expect_nothing(self) -> None:
        """From now on the client owes nothing for a while. Before HELLO its own, shorter deadline stays."""
        self.is_in_frame = False
        if self.session.is_open:
            self.deadline_s = monotonic() + self.limits.idle_s

    def expect_transfer(self, payload_bytes: int) -> None:
        """From now on progress counts. Before HELLO its own, shorter deadline stays."""
        self.stream.progress_s = now_s = monotonic()
        self.is_in_frame = True
        if self.session.is_open:
            self.deadline_s = now_s + self.limits.transfer_s(payload_bytes)

    def reply(self, reply: bytes) -> Script[None]:
        """Send a whole reply, or the last piece of one."""
        sent = self.stream.send_now(reply)
        if sent < len(reply):
            self.expect_transfer(0)
            yield from self.stream.send([memoryview(reply)[sent:]])

    def enter(self, operations: int, payload_bytes: int = 0, *, moves_entries: bool = False) -> Script[None]:
        """Wait until the tenant's rates, and for a transfer what its others hold, let a request begin.

        The caller calls :meth:`begun` in any case, once it has charged and holds what the request needs.

        Raises:
            ResourceExhaustedError: RATE_LIMITED.
        """
        traffic = self.session.traffic
        assert traffic is not None, "check_frame lets only HELLO through before"
        self._rate_place = place = traffic.enter_rates(operations, payload_bytes)
        if place is not None:
            began_ns = monotonic_ns()
            yield from self._wait(place)
            traffic.throttled_ns += monotonic_ns() - began_ns
            refusal = place.take_refusal()
            if refusal is not None:
                try:
                    raise refusal
                finally:
                    del refusal  # what its own traceback leads to would be left to the garbage collector
        if moves_entries:
            self._flight_place = place = traffic.enter_flight()
            if place is not None:
                yield from self._wait(place)

    def begun(self) -> None:
        """The request has begun or was refused; idempotent."""
        if self._rate_place is None and self._flight_place is None:
            return
        rate_place, self._rate_place = self._rate_place, None
        flight_place, self._flight_place = self._flight_place, None
        assert self.session.traffic is not None
        self.session.traffic.begun(rate_place, flight_place)

    def _wait(self, place: Place) -> Script[None]:
        self.expect_nothing()  # it is not the client that takes its time
        place.wake = self.wake
        while place.is_waiting:
            yield WAKE


def _nobody() -> None:
    """Nobody runs the script yet."""
