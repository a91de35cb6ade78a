"""A TLS socket with the calls that both ends of the wire protocol make: gathered sends, whole receives.

:class:`ssl.SSLSocket` refuses ``sendmsg`` and flags. Here ``sendmsg`` cuts what it is given into TLS records: the bytes
of one large buffer are encrypted from where they lie, small buffers are joined into one record first (at most 16 KiB
are copied), or each would cost a record and a system call of its own.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: The most that one TLS record holds (RFC 8446, section 5.1).
RECORD_BYTES: Final = 16 * 1024
#: One call encrypts or decrypts no more than this, so that an event loop gets its turn: about 0.1 ms.
CALL_BYTES: Final = 128 * 1024


class TlsSocket(ssl.SSLSocket):
    """Non-blocking or with a timeout; a call that would block raises BlockingIOError, as plain sockets do.

    A non-blocking call goes on while there is something to do, up to CALL_BYTES. One with a timeout moves at most one
    record: its caller looks at the deadline before the next, or a peer could stretch it record by record (I10).

    A peer that makes a *receive* wait for room to *send* (by asking for new keys while it reads nothing) is given up:
    that is an OSError like any other broken connection.
    """

    def recv_into(self, buffer: Buffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Decrypt into ``buffer`` and return how many bytes came, 0 at the end; flags mean nothing here."""
        view = memoryview(buffer)[: nbytes or None]
        limit = min(len(view), CALL_BYTES)
        filled = 0
        while filled < limit:
            try:
                count = super().recv_into(view[filled:limit])
            except (ssl.SSLWantReadError, BlockingIOError):  # the latter after ``say_goodbye``
                if filled:
                    break
                raise BlockingIOError from None
            filled += count
            if not count or self.gettimeout() != 0:
                break
        return filled

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """As ``recv_into``, at most one record, into memory of its own."""
        try:
            return super().recv(buflen)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def send(self, data: Buffer, flags: int = 0) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Buffer], *_: Any) -> int:  # type: ignore[override]
        """Encrypt and send the head of ``buffers``; return how many bytes were taken.

        After BlockingIOError, or where not all was taken, the next call must offer what is left again, or that and
        more: OpenSSL may have encrypted a record of it already, goes on with it, and says how many bytes that were.
        """
        sent = 0
        for record in _records(buffers):
            try:
                count = super().send(record)
            except ssl.SSLWantWriteError:
                if sent:
                    return sent
                raise BlockingIOError from None
            sent += count
            if count < len(record) or self.gettimeout() != 0:
                break
        return sent

    def is_silent(self) -> bool:
        """Whether nothing has come and the peer is there: neither decrypted bytes nor anything below them."""
        if self.pending():
            return False
        arrival = select.poll()  # a socket with a timeout would wait for it, MSG_DONTWAIT or not
        arrival.register(self, select.POLLIN)
        return not arrival.poll(0)

    def interrupt(self) -> None:
        """End both directions below TLS, from any thread: whoever waits in a call gets an error."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self, socket.SHUT_RDWR)

    def say_goodbye(self) -> None:
        """Send close_notify if it can be sent at once; after that the socket is a plain one."""
        with contextlib.suppress(OSError, ValueError):
            self.unwrap()


def wrap(
    context: ssl.SSLContext, sock: socket.socket, *, server_side: bool = False, server_hostname: str | None = None
) -> TlsSocket:
    """Take over a connected socket; the handshake is the caller's to do. Raises OSError if the peer is gone already."""
    context.sslsocket_class = TlsSocket
    wrapped = context.wrap_socket(
        sock, server_side=server_side, server_hostname=server_hostname, do_handshake_on_connect=False
    )
    assert isinstance(wrapped, TlsSocket)
    return wrapped


def _records(buffers: Sequence[Buffer]) -> Iterator[bytes | memoryview]:
    """Cut the head of ``buffers`` into records, CALL_BYTES in all."""
    left_bytes = CALL_BYTES
    room = RECORD_BYTES
    pieces: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            piece, view = view[:room], view[room:]
            pieces.append(piece)
            room -= len(piece)
            if not room:
                yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces, room = [], RECORD_BYTES
                left_bytes -= RECORD_BYTES
                if left_bytes <= 0:
                    return
    if pieces:
        yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
