"""A connected stream socket that carries frames: deadlines, scatter/gather, no copies of payloads.

The socket blocks, with the kernel's own SO_RCVTIMEO and SO_SNDTIMEO as deadline. Python's timeouts would poll before
every call and make MSG_WAITALL useless; so one ``recv_into`` takes a whole entry.
"""

from __future__ import annotations

import array
import contextlib
import math
import socket
import struct
import sys
from collections.abc import Sequence
from os import sched_yield

import msgspec

from saltern.deadline import Deadline
from saltern.errors import ProtocolError, SalternError, StatusCode, UnavailableError
from saltern.transport.impostor import require_trusted_listener
from saltern.wire import (
    HEADER_BYTES,
    BodyT,
    Empty,
    ErrorBody,
    Header,
    Opcode,
    decode_body,
    decode_header,
    encode_body,
    encode_reply,
    encode_request,
    error_from_body,
)

if sys.platform != "linux":
    raise ImportError("the Saltern client needs Linux: it relies on memfd, SCM_RIGHTS and SO_RCVTIMEO")

_IOV_MAX = 1024
#: About 60 us of looking for a small reply.
_LOOKS_MAX = 60
#: An enum's member costs a descriptor call at each use in Python 3.11; this does not.
_OK = int(StatusCode.OK)
#: Timeouts are set again only when they are off by more than this: a system call saved for each piece of a batch.
_TIMEOUT_SLACK_S = 0.005
#: Bodies of small replies come with their header, in one call.
_READ_AHEAD_BYTES = 8 * 1024


class Connection:
    """One socket and the frames on it. Not thread-safe, except for ``abort``.

    ``usable`` turns False for good as soon as the state of the stream is unknown: an interrupted frame, a broken rule,
    a reply that nobody read. Such a connection is closed, never used again.
    """

    def __init__(self, address: tuple[str, int] | str, deadline: Deadline, *, peer: str) -> None:
        """Connect to ``(host, port)`` or to the path of a unix socket.

        Raises:
            DeadlineExceededError: not connected in time.
            UnavailableError: refused or unreachable.
        """
        self.peer = peer
        self._request_id = 0
        self._outstanding = 0
        self._broken = False
        self._armed_s = 0.0
        family = socket.AF_UNIX if isinstance(address, str) else _family(address[0])
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        deadline.on_cancel(self.abort)
        try:
            if family != socket.AF_UNIX:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._arm(deadline)
            self._socket.connect(address)
        except OSError as error:
            self.close()
            raise self._translate(error, deadline) from None
        except BaseException:
            self.close()
            raise

    def check_listener(self, path: str) -> None:
        """Raise UnavailableError (UNTRUSTED_SOCKET) if whoever listens at the unix socket ``path`` may be anybody."""
        require_trusted_listener(self._socket, path)

    @property
    def usable(self) -> bool:
        return not self._broken and self._outstanding == 0

    def is_stale(self) -> bool:
        """Whether the peer has closed the idle connection, or sent something that nobody asked for."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def send(
        self,
        opcode: int,
        body: msgspec.Struct,
        deadline: Deadline,
        *,
        payload: Sequence[memoryview] = (),
        descriptor: int | None = None,
    ) -> int:
        """Send one request, gathering ``payload`` from where it lies; return its request id."""
        self._request_id += 1
        payload_bytes = sum([view.nbytes for view in payload]) if payload else 0
        head = encode_request(opcode, self._request_id, encode_body(body), payload_bytes)
        self._outstanding += 1
        try:
            if not payload and descriptor is None:
                self._arm(deadline)
                head = head[self._socket.send(head) :]
                if not head:
                    return self._request_id
            if descriptor is not None:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
                self._arm(deadline)
                sent_bytes = self._socket.sendmsg([head], ancillary)
                head = head[sent_bytes:]
            self._send_all([memoryview(head), *payload], deadline)
        except OSError as error:
            raise self._fail(error, deadline) from None
        except BaseException:
            self._broken = True
            raise
        return self._request_id

    def receive(self, opcode: int, request_id: int, deadline: Deadline) -> tuple[Header, bytes]:
        """Read header and body of the reply to a request; a payload is the caller's to read, and then to ``complete``.

        Raises:
            SalternError: the reply's own error; the connection stays usable.
            ProtocolError: the peer broke the protocol.
            DeadlineExceededError, UnavailableError: no whole reply.
        """
        header = self._decode(self.read_exactly(HEADER_BYTES, deadline))
        body = self.read_exactly(header.body_bytes, deadline) if header.body_bytes else b""
        self._match(header, body, opcode, request_id)
        return header, body

    def receive_whole(self, opcode: int, request_id: int, deadline: Deadline) -> bytes:
        """As ``receive``, for a reply without a payload and with nothing behind it: mostly one system call."""
        data = self._read_some(deadline)
        body = data[HEADER_BYTES:]
        # What nearly every reply is like is sooner said than taken apart: whole, ours, without error or payload.
        if data == encode_reply(opcode, request_id, body):
            self._outstanding -= 1
            return body
        return self._receive_rest(data, opcode, request_id, deadline)

    def _receive_rest(self, data: bytes, opcode: int, request_id: int, deadline: Deadline) -> bytes:
        """The body of a reply that began with ``data``, where it is anything but the plainest."""
        if len(data) < HEADER_BYTES:
            data += self.read_exactly(HEADER_BYTES - len(data), deadline)
        header = self._decode(data[:HEADER_BYTES])
        missing_bytes = HEADER_BYTES + header.body_bytes - len(data)
        if missing_bytes > 0:
            data += self.read_exactly(missing_bytes, deadline)
        elif missing_bytes < 0:
            raise self.violation("bytes that belong to no reply", "UNEXPECTED_BYTES")
        body = data[HEADER_BYTES:]
        self._match(header, body, opcode, request_id)
        if header.payload_bytes:
            raise self.violation("a payload where none belongs", "UNEXPECTED_PAYLOAD")
        return body

    def _match(self, header: Header, body: bytes, opcode: int, request_id: int) -> None:
        """Check that a reply is the one to the request; raise the error that it carries."""
        # A node that cannot parse a header answers with request id 0: the error matters more than the mismatch.
        if header.status != _OK:
            error = self._received_error(header, body)
            if header.request_id == request_id and header.payload_bytes == 0:
                self._outstanding -= 1
            else:
                self._broken = True
            raise error
        if not header.is_reply or header.opcode != opcode or header.request_id != request_id:
            raise self.violation("the reply does not belong to the request", "REPLY_MISMATCH")
        if header.payload_bytes == 0:
            self._outstanding -= 1

    def complete(self) -> None:
        """Note that a reply's payload has been read to its end."""
        self._outstanding -= 1

    def read_exactly(self, size_bytes: int, deadline: Deadline) -> bytes:
        """Read bytes into fresh memory of their own (no zero-fill: several times cheaper than a bytearray)."""
        try:
            self._arm(deadline)
            data = self._socket.recv(size_bytes, socket.MSG_WAITALL)
            if len(data) == size_bytes:
                return data
            whole = bytearray(size_bytes)
            whole[: len(data)] = data
            if not data:
                raise self._ended()
            self._receive_into(memoryview(whole)[len(data) :], deadline)
            return bytes(whole)
        except OSError as error:
            raise self._fail(error, deadline) from None
        except BaseException:
            self._broken = True
            raise

    def _read_some(self, deadline: Deadline) -> bytes:
        """Read what is there, at least a byte."""
        try:
            data = self._look_for_reply()
            if data is None:
                self._arm(deadline)
                data = self._socket.recv(_READ_AHEAD_BYTES)
            if not data:
                raise self._ended()
            return data
        except OSError as error:
            raise self._fail(error, deadline) from None
        except BaseException:
            self._broken = True
            raise

    def _look_for_reply(self) -> bytes | None:
        """Look for a small reply before sleeping for it: a core that went idle wakes more slowly than a node answers.

        Yields between looks, so that a node on the same core gets to answer.
        """
        receive = self._socket.recv
        for _ in range(_LOOKS_MAX):
            try:
                return receive(_READ_AHEAD_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sched_yield()
        return None

    def read_into(self, view: memoryview, deadline: Deadline) -> None:
        """Fill ``view`` from the stream."""
        try:
            self._receive_into(view, deadline)
        except OSError as error:
            raise self._fail(error, deadline) from None
        except BaseException:
            self._broken = True
            raise

    def decode(self, kind: type[BodyT], body: bytes) -> BodyT:
        """Decode a reply's body; a malformed one makes the connection unusable."""
        try:
            return decode_body(kind, body)
        except ProtocolError:
            self._broken = True
            raise

    def violation(self, message: str, reason: str) -> ProtocolError:
        """An error for a broken protocol; makes the connection unusable."""
        self._broken = True
        return ProtocolError(f"{self.peer}: {message}", reason=reason, hint="check that both ends are of one release")

    def abort(self) -> None:
        """Interrupt whatever another thread waits for on this connection."""
        self._broken = True
        # On a unix socket only reading ends: after a full shutdown a Drain could no longer tell when the peer hangs up.
        how = socket.SHUT_RD if self._socket.family == socket.AF_UNIX else socket.SHUT_RDWR
        with contextlib.suppress(OSError):  # not connected, or closed already
            self._socket.shutdown(how)

    def detach_for_drain(self) -> socket.socket:
        """Stop reading and hand over the unix socket, so that the peer's next reply fails and makes it hang up."""
        self._broken = True
        with contextlib.suppress(OSError):  # the peer is gone, or too far behind to need one more reply to fail
            # If all replies have been sent, this one's is what fails.
            self._socket.send(encode_request(Opcode.PING, 0, encode_body(Empty())), socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        return self._socket

    def close(self) -> None:
        self._broken = True
        self._socket.close()

    def _arm(self, deadline: Deadline) -> None:
        """Make the next wait on the socket end with the deadline."""
        remaining_s = deadline.remaining_s()
        if not 0 <= self._armed_s - remaining_s <= _TIMEOUT_SLACK_S:
            self._set_timeout(remaining_s)

    def _set_timeout(self, timeout_s: float) -> None:
        # Rounded up to a millisecond. A zero timeout would mean "for ever"; and calls that follow each other, each with
        # the same deadline, differ by microseconds: this timeout serves them all.
        milliseconds = math.ceil(timeout_s * 1000)
        value = struct.pack("@ll", milliseconds // 1000, milliseconds % 1000 * 1000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._armed_s = milliseconds / 1000

    def _send_all(self, views: list[memoryview], deadline: Deadline) -> None:
        start = 0
        while start < len(views):
            self._arm(deadline)
            sent_bytes = self._socket.sendmsg(views[start : start + _IOV_MAX])
            while start < len(views) and sent_bytes >= views[start].nbytes:
                sent_bytes -= views[start].nbytes
                start += 1
            if sent_bytes:
                views[start] = views[start][sent_bytes:]

    def _receive_into(self, view: memoryview, deadline: Deadline) -> None:
        while view.nbytes:
            self._arm(deadline)
            received_bytes = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not received_bytes:
                raise self._ended()
            view = view[received_bytes:]

    def _decode(self, data: bytes) -> Header:
        try:
            return decode_header(data)
        except ProtocolError:
            self._broken = True
            raise

    def _received_error(self, header: Header, body: bytes) -> SalternError:
        return error_from_body(self.decode(ErrorBody, body), header.status)

    def _ended(self) -> UnavailableError:
        return UnavailableError(
            f"{self.peer} closed the session", reason="SESSION_CLOSED", hint="the client connects again by itself"
        )

    def _fail(self, error: OSError, deadline: Deadline) -> SalternError:
        self._broken = True
        return self._translate(error, deadline)

    def _translate(self, error: OSError, deadline: Deadline) -> SalternError:
        # In a blocking socket EAGAIN (and EINPROGRESS of connect) is the kernel's report of SO_RCVTIMEO or SO_SNDTIMEO.
        if isinstance(error, BlockingIOError | TimeoutError) or deadline.expired:
            return deadline.error()
        return UnavailableError(
            f"cannot reach {self.peer}: {error.strerror or error}",
            reason="NODE_UNREACHABLE",
            hint="check that the node runs and that its endpoint is reachable from here",
        )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
