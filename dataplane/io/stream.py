"""A non-blocking socket as scripts see it: receive, discard and send, yielding what they wait for.

A *script* is a generator that yields a :class:`Want` whenever it cannot go on; :mod:`dataplane.io.connection` resumes
it straight from the event loop's callback. So a request costs no task, no future and no timer, and closing the
generator runs its ``finally`` clauses at once: tickets and pins of a dead session are given back (I8).

asyncio's own transports are not used: their ``writelines`` joins the buffers of a reply, which copies every block.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Generator, Sequence
from enum import Enum
from os import sched_yield
from time import monotonic
from typing import Final, TypeVar

import xxhash

from dataplane.core.work import PART_WORK
from dataplane.io.letting_go import close_descriptor
from saltern.errors import ProtocolError

#: Holds a header with the body of all but very large batches, and what comes with it of a small payload.
BUFFER_BYTES: Final = 64 * 1024
#: One receive call; small enough that what it brought is still in the CPU's cache when its sum is taken.
RECEIVE_MAX_BYTES: Final = 512 * 1024
#: The sum of a longer entry is taken in pieces of at least this, as they arrive.
SUM_PIECE_BYTES: Final = 256 * 1024
#: Linux takes up to 1024 buffers in one sendmsg.
SEND_BUFFERS_MAX: Final = 512
#: A socket may take more in one call than a short turn has left; below this it is offered no more than that.
_SEND_BYTES: Final = 1024 * 1024
_SEND_MIN_BYTES: Final = 64 * 1024
_SCRATCH_BYTES: Final = 256 * 1024
#: About 150 us of looking for the next frame.
_LOOKS_MAX: Final = 150
#: Room for as many descriptors as one message can carry (SCM_MAX_FD): the kernel would close what does not fit within
#: our own system call, and that may block (see letting_go.py).
_DESCRIPTORS_BYTES: Final = socket.CMSG_SPACE(253 * 4)

T = TypeVar("T")


class Want(Enum):
    """What a script waits for: bytes to read, room to write, that other sessions had their turn, or to be woken."""

    READ = "read"
    WRITE = "write"
    TURN = "turn"
    WAKE = "wake"


#: An enum's member costs a descriptor call at each use in Python 3.11; these do not.
READ: Final = Want.READ
WRITE: Final = Want.WRITE
TURN: Final = Want.TURN
WAKE: Final = Want.WAKE
Script = Generator[Want, None, T]


class PeerGoneError(Exception):
    """The client closed the connection or it broke; there is nobody to answer."""


class HandshakeError(Exception):
    """The client and we did not agree on TLS; ``reason`` is for the log and the metrics."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ByteStream:
    """One connected socket with a receive buffer.

    Args:
        takes_descriptors: receive file descriptors too (unix sockets); at most one may be on its way at a time.
        others_descriptor: readable when anything else in the process wants the event loop (its epoll); None if unknown.

    Attributes:
        progress_s: when a byte last moved, on the clock of ``time.monotonic``.
    """

    __slots__ = (
        "_arrival",
        "_buffer",
        "_consumed_bytes",
        "_descriptors",
        "_descriptors_span",
        "_end",
        "_socket",
        "_start",
        "_takes_descriptors",
        "_turn_bytes",
        "_turn_left",
        "progress_s",
    )  # fmt: skip
    #: Received from the socket and not handed out yet: no event will tell of it. Only TLS holds anything back.
    hidden_bytes = 0
    #: Shared by every stream of the process: what is drained is never read.
    _drain = memoryview(bytearray(_SCRATCH_BYTES))

    def __init__(
        self,
        sock: socket.socket,
        *,
        takes_descriptors: bool = False,
        others_descriptor: int | None = None,
    ) -> None:
        self.progress_s = monotonic()
        self._socket = sock
        self._arrival = select.poll()
        self._arrival.register(sock, select.POLLIN)
        if others_descriptor is not None:
            self._arrival.register(others_descriptor, select.POLLIN)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._turn_bytes = self._turn_left = 0
        self._takes_descriptors = takes_descriptors
        #: Received and not yet taken; the span of stream positions that they came with.
        self._descriptors: list[int] = []
        self._descriptors_span = (0, 0)
        self._consumed_bytes = 0

    def open(self) -> Script[None]:
        """What comes before the first frame: nothing here. Raises ProtocolError, PeerGoneError."""
        yield from ()

    @property
    def buffered_bytes(self) -> int:
        return self._end - self._start

    def peek(self, length: int) -> memoryview:
        """The next ``length`` buffered bytes, which must be there; valid until the next receive."""
        return self._buffer[self._start : self._start + length]

    def consume(self, length: int) -> None:
        """Drop ``length`` buffered bytes."""
        self._start += length
        self._consumed_bytes += length
        if self._start == self._end:
            self._start = self._end = 0

    def receive(self) -> bool:
        """Read what is there into the buffer; False if nothing is. Raises PeerGoneError."""
        if self._start and self._end == BUFFER_BYTES:
            held = self._end - self._start
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        count = self._receive_into(self._buffer[self._end :])
        self._end += count
        return count > 0

    def await_bytes(self, timeout_ms: int) -> bool:
        """Block until there is something to receive; False if nothing came in time, or something else came first.

        The event loop stands still meanwhile, so whatever it waits for ends the wait too. It looks before it sleeps: a
        core that went idle wakes more slowly than a client asks the next question.
        """
        arrived = self._arrival.poll(0)
        for _ in range(_LOOKS_MAX):
            if arrived:
                break
            sched_yield()
            arrived = self._arrival.poll(0)
        fileno = self._socket.fileno()
        return any(ready == fileno for ready, _ in arrived or self._arrival.poll(timeout_ms))

    def fill(self, length: int) -> Script[None]:
        """Wait until ``length`` bytes, at most BUFFER_BYTES, are buffered."""
        while self._end - self._start < length:
            if self._start + length > BUFFER_BYTES:
                held = self._end - self._start
                self._buffer[:held] = self._buffer[self._start : self._end]
                self._start, self._end = 0, held
            if not self.receive():
                yield READ

    def read_into(self, view: memoryview) -> Script[int]:
        """Fill ``view`` and return the XXH3-64 of what it holds then, taken piece by piece while hot in the cache."""
        total = len(view)
        filled = min(self._end - self._start, total)
        if filled:
            view[:filled] = self._buffer[self._start : self._start + filled]
            self.consume(filled)
        receive_into = self._recvmsg_into if self._takes_descriptors else self._socket.recv_into
        digest = None
        summed = 0
        while filled < total:
            try:
                count = receive_into(view[filled : filled + RECEIVE_MAX_BYTES])
            except (BlockingIOError, InterruptedError):
                yield READ
                continue
            except OSError:
                raise PeerGoneError from None
            if not count:
                raise PeerGoneError
            self.progress_s = monotonic()
            filled += count
            self._consumed_bytes += count
            if filled - summed >= SUM_PIECE_BYTES and total > SUM_PIECE_BYTES:
                digest = digest or xxhash.xxh3_64()
                digest.update(view[summed:filled])
                summed = filled
            self._turn_left -= count
            if self._turn_left <= 0:
                yield TURN
        if digest is None:
            return xxhash.xxh3_64_intdigest(view)
        digest.update(view[summed:])
        return digest.intdigest()

    def discard(self, length: int) -> Script[None]:
        """Read ``length`` bytes and throw them away, through bounded memory."""
        buffered = min(self._end - self._start, length)
        self.consume(buffered)
        length -= buffered
        while length:
            count = self._receive_into(self._drain[: min(length, _SCRATCH_BYTES)])
            if not count:
                yield READ
                continue
            length -= count
            self._consumed_bytes += count
            if self.spend_turn(count):
                yield TURN

    def send_now(self, data: bytes) -> int:
        """Send what fits into the socket's buffer of a short reply; return how many bytes did. Raises PeerGoneError."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            raise PeerGoneError from None

    def send(self, parts: Sequence[bytes | memoryview]) -> Script[None]:
        """Send ``parts`` one after the other without joining them."""
        index, count = 0, len(parts)
        rest: list[bytes | memoryview] = list(parts)
        while index < count:
            offered = rest[index : index + SEND_BUFFERS_MAX]
            if self._turn_left < _SEND_BYTES:
                offered = _head(offered, max(self._turn_left, _SEND_MIN_BYTES))
            try:
                sent = self._socket.sendmsg(offered)
            except (BlockingIOError, InterruptedError):
                yield WRITE
                continue
            except OSError:
                raise PeerGoneError from None
            self.progress_s = monotonic()
            self._turn_left -= sent
            first = index
            while index < count and sent >= len(rest[index]):
                sent -= len(rest[index])
                index += 1
            if sent:
                rest[index] = memoryview(rest[index])[sent:]
            if self.spend_turn((index - first) * PART_WORK) and index < count:
                yield TURN

    def begin_turn(self, turn_bytes: int) -> None:
        """The script may go on for so much work; whoever resumes it says so."""
        self._turn_bytes = self._turn_left = turn_bytes

    @property
    def turn_work(self) -> int:
        """Work done in this turn (see :mod:`dataplane.core.work`)."""
        return self._turn_bytes - self._turn_left

    @property
    def is_turn_over(self) -> bool:
        return self._turn_left <= 0

    def spend_turn(self, work: int) -> bool:
        """Account for work done; True when it is time to yield to other sessions."""
        self._turn_left -= work
        return self._turn_left <= 0

    def take_descriptors(self) -> list[int]:
        """Take the descriptors that came with the frame at the head of the buffer; the caller closes them."""
        first, last = self._descriptors_span
        if not self._descriptors or not first <= self._consumed_bytes < last:
            return []
        taken, self._descriptors = self._descriptors, []
        return taken

    def close_stale_descriptors(self) -> None:
        """Close descriptors whose frame is done and did not take them."""
        if self._descriptors and self._descriptors_span[1] <= self._consumed_bytes:
            self._close_descriptors()

    def close(self) -> None:
        self._close_descriptors()
        if not self._takes_descriptors:
            self._socket.close()
            return
        # Descriptors that nobody has read are closed with the socket: that may block, so the client hears of it first.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        close_descriptor(self._socket.detach())

    def linger(self, limit_bytes: int) -> Script[None]:
        """Say that nothing more will come and read until the client has gone, at most ``limit_bytes``.

        Closing with bytes unread would reset the connection and take the last reply away from the client.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._start = self._end = 0
        with contextlib.suppress(ProtocolError):  # still more descriptors: it is over at once
            yield from self.discard(limit_bytes)

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            close_descriptor(descriptor)
        self._descriptors = []

    def _receive_into(self, view: memoryview) -> int:
        try:
            count = self._recvmsg_into(view) if self._takes_descriptors else self._socket.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            raise PeerGoneError from None
        if not count:
            raise PeerGoneError
        self.progress_s = monotonic()
        return count

    def _recvmsg_into(self, view: memoryview) -> int:
        """``recv_into`` of a unix socket, which keeps the descriptor that came along.

        Raises:
            ProtocolError: REGION_DESCRIPTORS, more descriptors than one frame may carry; all of them are closed.
        """
        count, ancillary, flags, _ = self._socket.recvmsg_into([view], _DESCRIPTORS_BYTES, socket.MSG_CMSG_CLOEXEC)
        if not ancillary and not flags & socket.MSG_CTRUNC:
            return count
        arrived: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                usable = len(data) - len(data) % 4
                arrived += [int.from_bytes(data[at : at + 4], "little") for at in range(0, usable, 4)]
        crowded = bool(self._descriptors) and bool(arrived)
        self._descriptors += arrived
        if crowded or len(arrived) > 1 or flags & socket.MSG_CTRUNC:
            self._close_descriptors()
            raise ProtocolError(
                "more than one file descriptor came with a frame",
                reason="REGION_DESCRIPTORS",
                hint="send one descriptor with the first byte of a REGISTER frame and none otherwise",
            )
        received_bytes = self._consumed_bytes + self._end - self._start
        self._descriptors_span = (received_bytes, received_bytes + count)
        return count


def _head(parts: list[bytes | memoryview], length: int) -> list[bytes | memoryview]:
    """The first ``length`` bytes of ``parts``, uncopied, or all of them."""
    for index, part in enumerate(parts):
        if len(part) >= length:
            return [*parts[:index], memoryview(part)[:length]]
        length -= len(part)
    return parts
