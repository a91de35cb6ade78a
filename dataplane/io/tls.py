"""The wire protocol inside TLS (WIRE.md, section 1): the handshake as part of the script, then the same stream.

The handshake runs before HELLO, under HELLO's deadline and in the small share of sessions that nobody has opened yet;
it holds no tenant's place. Bytes that OpenSSL has decrypted and not handed out raise no event: ``hidden_bytes``.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

import structlog

from dataplane.core.work import HANDSHAKE_WORK
from dataplane.io.stream import READ, TURN, WRITE, ByteStream, HandshakeError, PeerGoneError, Script
from saltern.errors import ProtocolError
from saltern.tls_reload import ReloadingTls
from saltern.tls_socket import TlsSocket, wrap

#: The first byte of every TLS connection: a record of the kind "handshake" (RFC 8446, section 5.1).
_HANDSHAKE_RECORD: Final = 0x16
_REASON_MAX: Final = 64
_log = structlog.get_logger(__name__)


class TlsStream(ByteStream):
    """A stream whose bytes cross the network in TLS 1.3.

    Args:
        tls: asked for the certificate of the moment when the client has begun to speak.
        peer: the client's address, for the log.
    """

    __slots__ = ("_peer", "_tls", "_tls_socket")

    def __init__(
        self, sock: socket.socket, tls: ReloadingTls, *, peer: str = "", others_descriptor: int | None = None
    ) -> None:
        super().__init__(sock, others_descriptor=others_descriptor)
        self._tls = tls
        self._peer = peer
        self._tls_socket: TlsSocket | None = None

    @property
    def hidden_bytes(self) -> int:  # type: ignore[override]
        return 0 if self._tls_socket is None else self._tls_socket.pending()

    def open(self) -> Script[None]:
        """Shake hands.

        Raises:
            ProtocolError: TLS_REQUIRED: the client speaks plain text. The answer is in plain text, too.
            HandshakeError: no common version, or no client certificate that is accepted.
            PeerGoneError: the client left.
        """
        yield from self._require_tls()
        try:
            # From here on the TLS socket owns the descriptor, whatever happens.
            self._socket = sock = wrap(self._tls.context(), self._socket, server_side=True)
        except (OSError, ValueError):
            raise PeerGoneError from None
        if self.spend_turn(HANDSHAKE_WORK):
            yield TURN
        while True:
            try:
                sock.do_handshake()
                break
            except ssl.SSLWantReadError:
                yield READ
            except ssl.SSLWantWriteError:
                yield WRITE
            except ssl.SSLError as error:
                reason = (error.reason or "TLS_FAILED")[:_REASON_MAX]
                _log.info("TLS handshake failed", reason=reason, peer=self._peer)
                raise HandshakeError("TLS_HANDSHAKE_FAILED") from None
            except (OSError, ValueError):
                raise PeerGoneError from None
        self._tls_socket = sock

    def await_bytes(self, timeout_ms: int) -> bool:
        return self.hidden_bytes > 0 or super().await_bytes(timeout_ms)

    def linger(self, limit_bytes: int) -> Script[None]:
        if isinstance(self._socket, TlsSocket):
            self._socket.say_goodbye()  # the rest is thrown away unread, encrypted as it is
            self._tls_socket = None
        yield from super().linger(limit_bytes)

    def close(self) -> None:
        if isinstance(self._socket, TlsSocket):
            with contextlib.suppress(OSError, ValueError):
                self._socket.say_goodbye()
        super().close()

    def _require_tls(self) -> Script[None]:
        while True:
            try:
                first = self._socket.recv(1, socket.MSG_PEEK)
                break
            except (BlockingIOError, InterruptedError):
                yield READ
            except OSError:
                raise PeerGoneError from None
        if not first:
            raise PeerGoneError
        if first[0] != _HANDSHAKE_RECORD:
            raise ProtocolError(
                "this port takes TLS only, and the client speaks plain text",
                reason="TLS_REQUIRED",
                hint="give the client the CA of the deployment: --tls-ca, SALTERN_TLS_CA or Client(tls=...)",
            )
