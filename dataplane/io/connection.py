"""One connection: its conversation's script, gone on with whenever its turn comes."""

from __future__ import annotations

import socket
from collections.abc import Callable

import structlog

from dataplane.io.conversation import Conversation
from dataplane.io.scheduler import Scheduler
from dataplane.io.stream import READ, TURN, WAKE, WRITE, ByteStream, PeerGoneError, Want
from dataplane.io.traffic import TenantTraffic, Traffic
from dataplane.metrics.meters import DoorMeter
from saltern.names import TenantId

_log = structlog.get_logger(__name__)


class Connection:
    """Waits for what its script waits for, and takes its turns in its tenant's flow."""

    __slots__ = (
        "_fileno",
        "_flow",
        "_on_close",
        "_scheduler",
        "_script",
        "_stream",
        "_want",
        "conversation",
        "meter",
        "tenant",
    )

    def __init__(
        self,
        sock: socket.socket,
        stream: ByteStream,
        conversation: Conversation,
        traffic: Traffic,
        *,
        meter: DoorMeter,
        on_close: Callable[[Connection], None],
    ) -> None:
        self.conversation = conversation
        self.tenant: TenantId | None = None
        self.meter = meter
        self._scheduler: Scheduler = traffic.scheduler
        self._flow = traffic.unopened
        self._fileno = sock.fileno()
        self._stream = stream
        conversation.on_wake(self._wake)
        self._script = conversation.run()
        self._on_close = on_close
        self._want: Want | None = TURN

    def start(self) -> None:
        """Begin, when it is this connection's turn."""
        self._scheduler.ready(self._flow, self)

    def open(self, tenant: TenantId, traffic: TenantTraffic) -> None:
        """From now on turns are taken in the tenant's flow."""
        self.tenant = tenant
        self._flow = traffic.flow
        self.meter.opened += 1

    def count_by(self, meter: DoorMeter) -> None:
        """The session goes on over another transport, whose meter counts it from now on."""
        self.meter.ended(was_open=True, reason="CONNECTED")
        meter.opened += 1
        self.meter = self.conversation.meter = meter

    def expire(self, now_s: float) -> None:
        """Close the connection if what it waits for is overdue (WIRE.md 8)."""
        if self._want is TURN or self._want is None:
            return
        reason = self.conversation.overdue(now_s)
        if reason:
            _log.info("session closed", reason=reason, tenant=self.tenant)
            self.close(reason)

    def close(self, reason: str) -> None:
        """End the script, which gives back what it holds, and close the socket; idempotent."""
        if self._want is None:
            return
        self._want = None
        self.meter.ended(was_open=self.tenant is not None, reason=reason)
        self._scheduler.forget(self._fileno, self)
        try:
            self._script.close()
        finally:
            self._stream.close()
            self._on_close(self)
            # It leads back here, by its session and by what wakes it: a cycle of 20 objects for the collector to find.
            del self.conversation

    def take(self, turn_bytes: int, *, is_alone: bool) -> int:
        """Go on until the script waits or has had its turn; return the work done (see :mod:`dataplane.core.work`)."""
        if self._want is None:
            return 0
        self.conversation.is_alone = is_alone
        stream, scheduler = self._stream, self._scheduler
        stream.begin_turn(turn_bytes)
        try:
            self._want = want = next(self._script)
        except (StopIteration, PeerGoneError):
            self.close(self.conversation.end_reason)
        except Exception:
            # A fault of ours ends this session and no other; its script has given back what it held.
            _log.exception("session failed", tenant=self.tenant)
            self.close("INTERNAL")
        else:
            if want is READ:
                scheduler.await_readable(self._fileno, self._on_ready)
            elif want is WRITE:
                scheduler.await_writable(self._fileno, self._on_ready)
            elif want is TURN:
                scheduler.ready(self._flow, self)
        return stream.turn_work

    def _on_ready(self) -> None:
        if self._want is not None:
            self._want = TURN
            self._scheduler.ready(self._flow, self)

    def _wake(self) -> None:
        if self._want is WAKE:
            self._on_ready()
