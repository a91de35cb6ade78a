"""The script of one session: frames in, replies out, with the deadlines of WIRE.md section 8.

It joins a :class:`~dataplane.io.session.Session` (what may happen) and a :class:`~dataplane.io.stream.ByteStream`
(how bytes move), for the TCP and the unix door alike. The bytes of an entry go from the socket or the client's region
straight into the arena, and from the arena straight out.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, monotonic_ns
from typing import Final

import msgspec
import xxhash

from dataplane.core.work import REQUEST_WORK
from dataplane.io.batches import GetBatch, PutBatch
from dataplane.io.letting_go import close_descriptor
from dataplane.io.regions import Region, RegionTable
from dataplane.io.session import Session, closes_session
from dataplane.io.stream import BUFFER_BYTES, READ, TURN, WAKE, ByteStream, Script
from dataplane.metrics.meters import DoorMeter
from dataplane.settings import SessionLimits
from saltern import wire
from saltern.errors import ProtocolError, SalternError
from saltern.wire import HEADER_BYTES, Opcode

#: Plain integers: an enum's member costs a descriptor call at each use in Python 3.11.
_PUT, _GET, _REGISTER, _UNREGISTER = map(int, (Opcode.PUT, Opcode.GET, Opcode.REGISTER, Opcode.UNREGISTER))
_PING: Final = int(Opcode.PING)
#: A session that is alone waits for its next frame without the event loop: so long at a time, so long in a row.
_ALONE_WAIT_MS: Final = 1
_ALONE_S: Final = 0.002
#: One piece of a copy between a region and the arena: it is still in the L2 cache when its sum is taken.
_COPY_BYTES: Final = 256 * 1024


class Conversation:
    """Runs one session over one stream.

    Attributes:
        deadline_s: when the present wait ends the session, on the clock of ``time.monotonic``.
        end_reason: why the script has ended by itself.
        is_in_frame: whether a frame or its reply is on its way; only then does a lack of progress count.
        is_busy: whether a request is being handled.
        is_alone: whether no other session had a turn since this one's last.
        wake: resumes the script where it waits for WAKE; set by whoever runs it.
    """

    __slots__ = (
        "_alone_until_s",
        "_lapsed_s",
        "_limits",
        "_meter",
        "_regions",
        "_session",
        "_stream",
        "deadline_s",
        "end_reason",
        "is_alone",
        "is_busy",
        "is_in_frame",
        "wake",
    )

    def __init__(self, stream: ByteStream, session: Session, limits: SessionLimits, meter: DoorMeter) -> None:
        self._stream = stream
        self._session = session
        self._limits = limits
        self._meter = meter
        self.end_reason = "CLIENT_LEFT"
        self._regions = RegionTable(session.region_space)
        self.deadline_s = monotonic() + limits.hello_s
        #: Since when the gate refuses the session.
        self._lapsed_s: float | None = None
        self.is_in_frame = False
        self.is_busy = False
        self.is_alone = False
        self.wake: Callable[[], None] = _nobody
        self._alone_until_s = 0.0

    def overdue(self, now_s: float) -> str:
        """Why the session should be closed now, or an empty string."""
        if now_s > self.deadline_s:
            return "DEADLINE"
        if self.is_in_frame and now_s > self._stream.progress_s + self._limits.stall_s:
            return "STALLED"
        if not self._session.is_lapsed:
            self._lapsed_s = None
        elif self._lapsed_s is None:
            self._lapsed_s = now_s
        elif now_s > self._lapsed_s + self._limits.lapsed_s:
            return "LAPSED"
        return ""

    def run(self) -> Script[None]:
        """Answer frames until the client goes or breaks the protocol. Raises PeerGoneError."""
        try:
            open_for_more = True
            while open_for_more:
                open_for_more = yield from self._frame()
        except ProtocolError as error:
            # Found while receiving, outside of any one frame.
            yield from self._part(_PING, 0, error, 0)
        finally:
            self._regions.close()

    def _frame(self) -> Script[bool]:
        """Receive one frame and answer it; False when the session ends with that."""
        stream, session = self._stream, self._session
        if stream.buffered_bytes < HEADER_BYTES and not self._next_follows():
            yield from self._await_header()
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
                self._expect_transfer(payload_bytes)
                yield from stream.fill(frame_bytes)
            body = stream.peek(frame_bytes)[HEADER_BYTES:]
        else:
            self._expect_transfer(payload_bytes)
            stream.consume(HEADER_BYTES)
            body = memoryview(bytearray(header.body_bytes))
            yield from stream.read_into(body)
            frame_bytes = 0
        try:
            answer = self._handle(header, body)
        except SalternError as error:
            stream.consume(frame_bytes)
            if not (yield from self._refuse(header, error)):
                return False
        else:
            stream.consume(frame_bytes)
            yield from self._reply(answer) if isinstance(answer, bytes) else answer
        self._meter.observe(opcode, session.tenant, monotonic_ns() - began_ns)
        stream.close_stale_descriptors()
        self.is_busy = self.is_in_frame = False
        if stream.spend_turn(REQUEST_WORK):
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
        if self._session.is_open:
            self.deadline_s = monotonic() + self._limits.idle_s
        if not stream.buffered_bytes:
            # Waiting first saves the system call that would find nothing after almost every reply.
            yield READ
            while not stream.receive():
                yield READ
            self._alone_until_s = monotonic() + _ALONE_S
        if stream.buffered_bytes < HEADER_BYTES:
            self._expect_transfer(0)
            yield from stream.fill(HEADER_BYTES)

    def _refuse(self, header: wire.Header, error: SalternError) -> Script[bool]:
        """Answer a request that was refused before any of its payload was read; False if that ends the session."""
        if closes_session(error, self._session):
            yield from self._part(header.opcode, header.request_id, error, header.payload_bytes)
            return False
        self._meter.refused[error.reason] += 1
        self._expect_transfer(header.payload_bytes)
        yield from self._stream.discard(header.payload_bytes)
        yield from self._reply(wire.encode_error_reply(header.opcode, header.request_id, error))
        return True

    def _expect_transfer(self, payload_bytes: int) -> None:
        """From now on progress counts. Before HELLO its own, shorter deadline stays."""
        self._stream.progress_s = now_s = monotonic()
        self.is_in_frame = True
        if self._session.is_open:
            self.deadline_s = now_s + self._limits.transfer_s(payload_bytes)

    def _handle(self, header: wire.Header, body: memoryview) -> bytes | Script[None]:
        """Decode and check a request; return its whole reply, or the script that moves its entries and replies.

        Raises:
            SalternError: the request is refused and had no effect.
        """
        opcode, session = header.opcode, self._session
        reply: msgspec.Struct
        if opcode == _PUT:
            put = wire.decode_body(wire.Put, body)
            wire.check_put(put, header.payload_bytes)
            put_region = self._region(put.region, put.offsets, put.sizes)
            return self._put(header.request_id, put, session.begin_put(put), put_region)
        if opcode == _GET:
            get = wire.decode_body(wire.Get, body)
            wire.check_get(get, header.payload_bytes)
            get_region = self._region(get.region, get.offsets, get.max_sizes)
            return self._get(header.request_id, get, session.begin_get(get), get_region)
        if opcode == _REGISTER:
            reply = self._register(wire.decode_body(wire.Register, body))
        elif opcode == _UNREGISTER:
            unregister = wire.decode_body(wire.Unregister, body)
            session.require(None)
            self._regions.unregister(unregister.region)
            reply = wire.Empty()
        else:
            reply = session.answer(opcode, body)
        return wire.encode_reply(opcode, header.request_id, wire.encode_body(reply))

    def _register(self, register: wire.Register) -> wire.Empty:
        tenant = self._session.require(None).tenant
        descriptors = self._stream.take_descriptors()
        try:
            self._regions.register(tenant, register.region, register.region_bytes, descriptors)
        finally:
            for descriptor in descriptors:
                close_descriptor(descriptor)
        return wire.Empty()

    def _region(self, number: int | None, offsets: list[int], sizes: list[int]) -> Region | None:
        """The region of a regional batch, every entry inside it; None for an inline one."""
        if number is None:
            return None
        region = self._regions[number]
        region.check(offsets, sizes)
        return region

    def _put(self, request_id: int, put: wire.Put, batch: PutBatch, region: Region | None) -> Script[None]:
        stream = self._stream
        self._expect_transfer(0 if region else sum(put.sizes))
        try:
            for index, (size, claimed) in enumerate(zip(put.sizes, wire.split_sums(put.sums), strict=True)):
                target = batch.start(index, size)
                if region is None:
                    if target is None:
                        yield from stream.discard(size)
                        continue
                    digest = yield from stream.read_into(target)
                else:
                    if target is None:
                        continue
                    digest = yield from self._copy_and_sum(region.view(put.offsets[index], size), target)
                batch.finish(index, digest, claimed)
        finally:
            batch.close()
        yield from self._reply(wire.encode_reply(_PUT, request_id, wire.encode_body(batch.reply())))

    def _get(self, request_id: int, get: wire.Get, batch: GetBatch, region: Region | None) -> Script[None]:
        try:
            if batch.fetch is not None:
                self._expect_transfer(0)
                batch.fetch.on_done(self.wake)
                while not batch.fetch.is_done:
                    yield WAKE
                batch.finish()
            body = wire.encode_body(batch.reply())
            if region is None:
                head = wire.encode_reply(_GET, request_id, body, batch.payload_bytes)
                self._expect_transfer(batch.payload_bytes)
                yield from self._stream.send([head, *(batch.view(pin) for _, pin in batch.hits)])
                return
            for index, pin in batch.hits:
                yield from self._copy(batch.view(pin), region.view(get.offsets[index], pin.size_bytes))
        finally:
            batch.close()
        yield from self._reply(wire.encode_reply(_GET, request_id, body))

    def _copy_and_sum(self, source: memoryview, target: memoryview) -> Script[int]:
        """Copy an entry out of a region and return the sum of the node's own copy: the client may write meanwhile."""
        digest = xxhash.xxh3_64()
        for start in range(0, len(source), _COPY_BYTES):
            piece = target[start : start + _COPY_BYTES]
            piece[:] = source[start : start + _COPY_BYTES]
            digest.update(piece)
            if self._stream.spend_turn(len(piece)):
                yield TURN
        return digest.intdigest()

    def _copy(self, source: memoryview, target: memoryview) -> Script[None]:
        for start in range(0, len(source), _COPY_BYTES):
            piece = source[start : start + _COPY_BYTES]
            target[start : start + _COPY_BYTES] = piece
            if self._stream.spend_turn(len(piece)):
                yield TURN

    def _reply(self, reply: bytes) -> Script[None]:
        sent = self._stream.send_now(reply)
        if sent < len(reply):
            self._expect_transfer(0)
            yield from self._stream.send([memoryview(reply)[sent:]])

    def _part(self, opcode: int, request_id: int, error: SalternError, unread_bytes: int) -> Script[None]:
        """Send ``error`` as the last reply and let the client read it before the connection is closed."""
        self.is_busy = False
        self.end_reason = error.reason
        self._meter.refused[error.reason] += 1
        yield from self._reply(wire.encode_error_reply(opcode, request_id, error))
        self.deadline_s = monotonic() + self._limits.linger_s
        yield from self._stream.linger(unread_bytes + BUFFER_BYTES)


def _nobody() -> None:
    """Nobody runs the script yet."""
