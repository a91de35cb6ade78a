"""A connection of the wire protocol inside TLS."""

from __future__ import annotations

import logging
import ssl
import threading
from typing import TYPE_CHECKING, Final

from saltern.deadline import Deadline
from saltern.errors import SalternError, UnavailableError
from saltern.tls_socket import TlsSocket, wrap
from saltern.transport.connection import Connection

if TYPE_CHECKING:
    from saltern.tls import ClientTls

logger = logging.getLogger("saltern")

_CHECK_HINT: Final = "check the CA file that this client was given, and the node's --tls-cert"
#: What OpenSSL calls it when the other end answers something that is no TLS, ours and that of the peer.
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
_CERTIFICATE_WANTED: Final = frozenset({"TLSV13_ALERT_CERTIFICATE_REQUIRED"})
_CERTIFICATE_REFUSED: Final = frozenset(
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "TLSV1_ALERT_DECRYPT_ERROR",
    }
)  # fmt: skip


class TlsDialer:
    """Makes TLS connections; reads the client's files with the first, and again when they are others. Thread-safe.

    Files that cannot be used any more change nothing: what was read before is good until the node says otherwise.
    """

    def __init__(self, tls: ClientTls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._stamps: tuple[object, ...] = ()

    def dial(self, address: tuple[str, int], deadline: Deadline, *, peer: str, server_name: str) -> TlsConnection:
        """Connect to a node whose certificate must be for ``server_name``.

        Raises:
            UnavailableError, DeadlineExceededError: as :class:`TlsConnection`.
            SalternError: the client's own files cannot be used.
        """
        context = self._current_context()
        return TlsConnection(address, deadline, peer=peer, context=context, server_name=server_name)

    def _current_context(self) -> ssl.SSLContext:
        from saltern.tls import client_context, file_stamps  # cryptography: only who uses TLS pays for its import

        with self._lock:
            stamps = file_stamps(self._tls.files)
            if self._context is None or stamps != self._stamps:
                try:
                    self._context = client_context(self._tls)
                except SalternError as error:
                    if self._context is None:
                        raise
                    logger.warning("changed TLS files cannot be used; the old ones stay: %s", error.message)
                self._stamps = stamps
            return self._context


class TlsConnection(Connection):
    """A connection whose node has shown a certificate of the right authority, for the right name."""

    def __init__(
        self,
        address: tuple[str, int],
        deadline: Deadline,
        *,
        peer: str,
        context: ssl.SSLContext,
        server_name: str,
    ) -> None:
        """Connect and shake hands.

        Raises:
            DeadlineExceededError: not done in time.
            UnavailableError: NODE_UNREACHABLE, TLS_CERTIFICATE_REFUSED (authority, name or time of the node's
                certificate), TLS_NOT_SPOKEN (the node serves plain text), TLS_FAILED.
        """
        self._tls: TlsSocket | None = None
        super().__init__(address, deadline, peer=peer)
        try:
            self._socket.settimeout(deadline.remaining_s())
            self._tls = self._socket = wrap(context, self._socket, server_hostname=server_name)
            self._tls.do_handshake()
        except (OSError, ValueError) as error:
            self.close()
            raise self._translate(error if isinstance(error, OSError) else OSError(str(error)), deadline) from None
        except BaseException:
            self.close()
            raise

    def is_stale(self) -> bool:
        return self._tls is None or not self._tls.is_silent()

    def abort(self) -> None:
        self._broken = True
        if self._tls is None:
            super().abort()
        else:
            self._tls.interrupt()

    def _look_for_reply(self) -> bytes | None:
        """Records come in pieces: looking for one again and again is not worth it."""
        return None

    def _set_timeout(self, timeout_s: float) -> None:
        if self._tls is None:
            super()._set_timeout(timeout_s)
        else:
            # OpenSSL begins again after SO_RCVTIMEO: here the timeout is Python's. Zero would mean "do not wait".
            self._tls.settimeout(max(timeout_s, 0.001))
            self._armed_s = timeout_s

    def _translate(self, error: OSError, deadline: Deadline) -> SalternError:
        if not isinstance(error, ssl.SSLError) or isinstance(error, TimeoutError) or deadline.expired:
            return super()._translate(error, deadline)
        return tls_failure(error, self.peer)


def tls_failure(error: ssl.SSLError, peer: str) -> UnavailableError:
    """Why a handshake with ``peer`` failed, or a connection broke, in words."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UnavailableError(
            f"{peer} showed a certificate that is not accepted: {error.verify_message.rstrip('.')}",
            reason="TLS_CERTIFICATE_REFUSED",
            hint=_CHECK_HINT,
        )
    if reason in _NOT_TLS:
        return UnavailableError(
            f"{peer} does not speak TLS",
            reason="TLS_NOT_SPOKEN",
            hint="start the node with --tls-cert and --tls-key; this client was told to use TLS and nothing else",
        )
    if reason in _CERTIFICATE_WANTED:
        return UnavailableError(
            f"{peer} accepts nobody without a client certificate",
            reason="TLS_CLIENT_CERTIFICATE_REQUIRED",
            hint="give this client a certificate of the authority in the node's --tls-client-ca",
        )
    if reason in _CERTIFICATE_REFUSED:
        return UnavailableError(
            f"{peer} does not accept this client's certificate ({reason.rpartition('ALERT_')[2].lower()})",
            reason="TLS_CLIENT_CERTIFICATE_REFUSED",
            hint="use a certificate of the authority in the node's --tls-client-ca that is valid now",
        )
    return UnavailableError(
        f"TLS with {peer} failed: {(reason or type(error).__name__).lower().replace('_', ' ')}",
        reason="TLS_FAILED",
        hint="check that both ends are Saltern and take TLS 1.3",
    )


def dial(
    address: tuple[str, int], deadline: Deadline, *, peer: str, tls: TlsDialer | None, server_name: str
) -> Connection:
    """Connect in the one way that client and node agree on; nothing is tried out, and nobody falls back.

    Args:
        tls: what the client was told; None for plain text.
        server_name: what the registry says of the node; empty for plain text.

    Raises:
        UnavailableError: TLS_REQUIRED: the node wants TLS and the client was not told to; TLS_NOT_OFFERED: the reverse;
            else as :class:`TlsConnection`.
    """
    require_agreement(peer, is_tls_client=tls is not None, server_name=server_name)
    if tls is None:
        return Connection(address, deadline, peer=peer)
    return tls.dial(address, deadline, peer=peer, server_name=server_name)


def require_agreement(peer: str, *, is_tls_client: bool, server_name: str) -> None:
    """Raise UnavailableError (TLS_REQUIRED, TLS_NOT_OFFERED) unless client and node both use TLS, or neither does."""
    if server_name and not is_tls_client:
        raise UnavailableError(
            f"{peer} serves over TLS only, and this client was not told whom to trust",
            reason="TLS_REQUIRED",
            hint="give the client the CA of the deployment: Client(tls=ClientTls(ca=...)), --tls-ca or SALTERN_TLS_CA",
        )
    if is_tls_client and not server_name:
        raise UnavailableError(
            f"{peer} serves plain text, and this client was told to use TLS",
            reason="TLS_NOT_OFFERED",
            hint="start the node with --tls-cert and --tls-key",
        )
