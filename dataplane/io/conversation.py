"""The script of one session: frames in, replies out.

It joins a :class:`~dataplane.io.session.Session` (what may happen) and a :class:`~dataplane.io.stream.ByteStream`
(how bytes move), for the TCP and the unix door alike. What the requests do to entries is in
:mod:`dataplane.io.transfers`; deadlines are in :mod:`dataplane.io.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, monotonic_ns
from typing import Final

import msgspec

from dataplane.core.work import REQUEST_WORK, TOKEN_WORK
from dataplane.io.exchange import Exchange
from dataplane.io.letting_go import close_descriptor
from dataplane.io.rdma import Link, RemoteFailedError
from dataplane.io.regions import RegionTable
from dataplane.io.remote_transfers import RemoteTransfers
from dataplane.io.session import Session, closes_session
from dataplane.io.stream import BUFFER_BYTES, READ, TURN, ByteStream, HandshakeError, Script
from dataplane.io.transfers import Transfers
from dataplane.metrics.meters import DoorMeter
from dataplane.settings import SessionLimits
from saltern import wire
from saltern.errors import FailedPreconditionError, InvalidArgumentError, ProtocolError, SalternError
from saltern.wire import HEADER_BYTES, Opcode

#: Plain integers: an enum's member costs a descriptor call at each use in Python 3.11.
_PUT, _GET, _LOOKUP, _DELETE = map(int, (Opcode.PUT, Opcode.GET, Opcode.LOOKUP, Opcode.DELETE))
_REGISTER, _UNREGISTER, _PING = map(int, (Opcode.REGISTER, Opcode.UNREGISTER, Opcode.PING))
_CONNECT: Final = int(Opcode.CONNECT)
#: A session that is alone waits for its next frame without the event loop: so long at a time, so long in a row.
_ALONE_WAIT_MS: Final = 1
_ALONE_S: Final = 0.002


class Conversation:
    """Runs one session over one stream.

    Attributes:
        end_reason: why the script has ended by itself.
        is_busy: whether a request is being handled.
        is_alone: whether no other session had a turn since this one's last.
        meter: counts its requests; another one once the session has a queue pair.
        on_connect: called when it gets one.
    """

    __slots__ = (
        "_alone_until_s",
        "_exchange",
        "_link",
        "_regions",
        "_session",
        "_stream",
        "_transfers",
        "end_reason",
        "is_alone",
        "is_busy",
        "meter",
        "on_connect",
    )

    def __init__(self, stream: ByteStream, session: Session, limits: SessionLimits, meter: DoorMeter) -> None:
        self._stream = stream
        self._session = session
        self.meter = meter
        self.on_connect: Callable[[], None] = _nobody
        self._link: Link | None = None
        self._regions = RegionTable(session.region_space)
        self._exchange = Exchange(stream, session, limits)
        self._transfers = Transfers(self._exchange, self._regions)
        self.end_reason = "CLIENT_LEFT"
        self.is_busy = False
        self.is_alone = False
        self._alone_until_s = 0.0

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when what the script waits for by WAKE has come."""
        self._exchange.wake = wake

    def overdue(self, now_s: float) -> str:
        """Why the session should be closed now, or an empty string."""
        return self._exchange.overdue(now_s)

    def run(self) -> Script[None]:
        """Answer frames until the client goes or breaks the protocol. Raises PeerGoneError."""
        try:
            yield from self._stream.open()
            open_for_more = True
            while open_for_more:
                open_for_more = yield from self._frame()
        except ProtocolError as error:
            # Found while receiving, outside of any one frame.
            yield from self._part(_PING, 0, error, 0)
        except HandshakeError as error:
            self.end_reason = error.reason
            self._exchange.deadline_s = monotonic() + self._exchange.limits.linger_s
            yield from self._stream.linger(BUFFER_BYTES)  # so that the client gets to read OpenSSL's alert
        finally:
            self._exchange.begun()
            self._regions.close()
            if self._link is not None:
                self._link.close()

    def _frame(self) -> Script[bool]:
        """Receive one frame and answer it; False when the session ends with that."""
        stream, session, exchange = self._stream, self._session, self._exchange
        if stream.buffered_bytes < HEADER_BYTES and not self._next_follows():
            yield from self._await_header()
        stream.spend_turn(REQUEST_WORK)
        opcode, request_id, payload_bytes = _PING, 0, 0
        try:
            body_max_bytes = wire.BODY_MAX_BYTES if session.is_open else wire.HELLO_BODY_MAX_BYTES
            header = wire.decode_header(stream.peek(HEADER_BYTES), body_max_bytes=body_max_bytes)
            opcode, request_id, payload_bytes = header.opcode, header.request_id, header.payload_bytes
            session.check_frame(header)
        except SalternError as error:
            yield from self._part(opcode, request_id, error, payload_bytes)
            return False

        began_ns = monotonic_ns()
        self.is_busy = True
        frame_bytes = HEADER_BYTES + header.body_bytes
        if frame_bytes <= BUFFER_BYTES:
            if stream.buffered_bytes < frame_bytes:
                exchange.expect_transfer(payload_bytes)
                yield from stream.fill(frame_bytes)
            body = stream.peek(frame_bytes)[HEADER_BYTES:]
        else:
            exchange.expect_transfer(payload_bytes)
            stream.consume(HEADER_BYTES)
            body = memoryview(bytearray(header.body_bytes))
            yield from stream.read_into(body)
            frame_bytes = 0
        try:
            answer = yield from self._begin(header, body)
        except SalternError as error:
            exchange.begun()
            stream.consume(frame_bytes)
            if not (yield from self._refuse(header, error)):
                return False
        else:
            exchange.begun()
            stream.consume(frame_bytes)
            try:
                yield from exchange.reply(answer) if isinstance(answer, bytes) else answer
            except RemoteFailedError as failed:
                # The queue pair is gone and what was not published is given back: the client has to connect again.
                yield from self._part(opcode, request_id, failed.error, 0)
                return False
        self.meter.observe(opcode, session.tenant, monotonic_ns() - began_ns)
        stream.close_stale_descriptors()
        self.is_busy = exchange.is_in_frame = False
        if stream.is_turn_over:
            yield TURN
        # A draining node answers what is here already with DRAINING, and waits for nothing more.
        return not session.is_draining or stream.buffered_bytes > 0 or stream.receive()

    def _next_follows(self) -> bool:
        """Wait a moment for the next frame of a session that is alone; False if it is to wait in the event loop.

        Going round the loop takes longer than answering one small question after another. Sleeping rather than looking
        again and again leaves the core to the client. Whatever else the loop waits for ends the sleep; where frames
        follow each other without a gap, it gets its turn after 2 ms.
        """
        if not self.is_alone or monotonic() > self._alone_until_s or not self._session.is_open:
            return False
        stream = self._stream
        return stream.await_bytes(_ALONE_WAIT_MS) and stream.receive() and stream.buffered_bytes >= HEADER_BYTES

    def _await_header(self) -> Script[None]:
        stream = self._stream
        self._exchange.expect_nothing()
        if not stream.buffered_bytes:
            # Waiting first saves the system call that would find nothing after almost every reply.
            if not stream.hidden_bytes:
                yield READ
            while not stream.receive():
                yield READ
            self._alone_until_s = monotonic() + _ALONE_S
        if stream.buffered_bytes < HEADER_BYTES:
            self._exchange.expect_transfer(0)
            yield from stream.fill(HEADER_BYTES)

    def _refuse(self, header: wire.Header, error: SalternError) -> Script[bool]:
        """Answer a request that was refused before any of its payload was read; False if that ends the session."""
        if closes_session(error, self._session):
            yield from self._part(header.opcode, header.request_id, error, header.payload_bytes)
            return False
        self.meter.refused[error.reason] += 1
        self._exchange.expect_transfer(header.payload_bytes)
        yield from self._stream.discard(header.payload_bytes)
        yield from self._exchange.reply(wire.encode_error_reply(header.opcode, header.request_id, error))
        return True

    def _begin(self, header: wire.Header, body: memoryview) -> Script[bytes | Script[None]]:
        """Decode, let in and check a request; return its whole reply, or the script that moves its entries and replies.

        Raises:
            SalternError: the request is refused and had no effect.
        """
        opcode, transfers = header.opcode, self._transfers
        reply: msgspec.Struct
        if opcode == _LOOKUP:
            return (yield from transfers.lookup(header, body))
        if opcode == _GET:
            return (yield from transfers.begin_get(header, body))
        if opcode == _PUT:
            return (yield from transfers.begin_put(header, body))
        if opcode == _DELETE:
            return (yield from transfers.delete(header, body))
        if opcode == _REGISTER:
            reply = self._register(wire.decode_body(wire.Register, body))
        elif opcode == _UNREGISTER:
            unregister = wire.decode_body(wire.Unregister, body)
            self._session.require(None)
            self._regions.unregister(unregister.region)
            reply = wire.Empty()
        elif opcode == _CONNECT:
            self._stream.spend_turn(TOKEN_WORK)
            reply = self._connect(wire.decode_body(wire.Connect, body))
        else:
            if opcode == _PING:
                yield from self._exchange.enter(1)
            else:
                self._stream.spend_turn(TOKEN_WORK)
            reply = self._session.answer(opcode, body)
        return wire.encode_reply(opcode, header.request_id, wire.encode_body(reply))

    def _register(self, register: wire.Register) -> wire.Empty:
        tenant = self._session.require(None).tenant
        descriptors = self._stream.take_descriptors()
        try:
            if register.address is None or register.key is None:
                self._regions.register(tenant, register.region, register.region_bytes, descriptors)
            elif self._link is None:
                raise InvalidArgumentError(
                    "RDMA memory is registered in a session that has no queue pair",
                    reason="REGION_NOT_CONNECTED",
                    hint="send CONNECT first",
                )
            else:
                self._regions.register_remote(register.region, register.region_bytes, register.address, register.key)
        finally:
            for descriptor in descriptors:
                close_descriptor(descriptor)
        return wire.Empty()

    def _connect(self, connect: wire.Connect) -> wire.ConnectReply:
        if self._link is not None:
            raise FailedPreconditionError(
                "the session has a queue pair already", reason="ALREADY_CONNECTED", hint="open another session"
            )
        self._link = link = self._session.connect(connect)
        self._transfers.remote = RemoteTransfers(self._exchange, link)
        self.on_connect()
        return wire.ConnectReply(link.endpoint.pack())

    def _part(self, opcode: int, request_id: int, error: SalternError, unread_bytes: int) -> Script[None]:
        """Send ``error`` as the last reply and let the client read it before the connection is closed."""
        self.is_busy = False
        self.end_reason = error.reason
        self.meter.refused[error.reason] += 1
        exchange = self._exchange
        yield from exchange.reply(wire.encode_error_reply(opcode, request_id, error))
        exchange.deadline_s = monotonic() + exchange.limits.linger_s
        yield from self._stream.linger(unread_bytes + BUFFER_BYTES)


def _nobody() -> None:
    """Nobody wants to know of queue pairs."""
