"""A session on a node's wire protocol, by hand and without help: no renewal, no retry, no placement.

For probes (``saltern doctor``) and for playing the attacker (``saltern demo``): whoever would misuse a node does not
use our SDK. Applications want :class:`saltern.client.Client`.
"""

from __future__ import annotations

import socket
import ssl
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from saltern.endpoints import parse_endpoint
from saltern.errors import ProtocolError, StatusCode, UnavailableError
from saltern.transport.tls import require_agreement, tls_failure
from saltern.wire import (
    HEADER_BYTES,
    ErrorBody,
    Opcode,
    decode_body,
    decode_header,
    encode_body,
    encode_request,
    error_from_body,
)

if TYPE_CHECKING:
    from saltern.tls import ClientTls

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class BareSession:
    """One connection to ``host:port``, or to the unix socket at a path. Use it as a context manager.

    Args:
        address: the wire endpoint, or an absolute path.
        timeout_ms: for connecting and for every send and receive.
        tls: whom to trust over TCP; None for plain text.
        server_name: what the node's certificate must be for; empty for a node that serves plain text.

    Raises:
        UnavailableError: nobody answers there, or not in the way that the client was told (``TLS_...``).
        InvalidArgumentError: the address is malformed.
    """

    def __init__(self, address: str, *, timeout_ms: int, tls: ClientTls | None = None, server_name: str = "") -> None:
        if not address.startswith("/"):
            require_agreement(address, is_tls_client=tls is not None, server_name=server_name)
        self._address = address
        self._socket = _connect(address, timeout_ms / 1000)
        if tls is not None and not address.startswith("/"):
            self._socket = _secured(self._socket, address, tls, server_name)
        self._last_request_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def call(self, opcode: Opcode, body: msgspec.Struct, reply: type[ReplyT]) -> tuple[ReplyT, bytes]:
        """Send one request and wait for its reply: the decoded body and the payload.

        Raises:
            SalternError: what the node answered, UnavailableError if the connection ended, ProtocolError for an
                answer that is none.
        """
        self._last_request_id += 1
        try:
            self._socket.sendall(encode_request(opcode, self._last_request_id, encode_body(body)))
            header = decode_header(self._receive(HEADER_BYTES))
            answer, payload = self._receive(header.body_bytes), self._receive(header.payload_bytes)
        except ssl.SSLError as error:
            raise tls_failure(error, self._address) from None
        except OSError as error:
            raise UnavailableError(
                f"the connection failed: {error.strerror or error}", reason="CONNECTION_LOST", hint="try again"
            ) from None
        if not header.is_reply:
            raise ProtocolError("the peer answers with a request", reason="UNEXPECTED_REPLY")
        if header.status != StatusCode.OK:
            raise error_from_body(decode_body(ErrorBody, answer), header.status)
        return decode_body(reply, answer), payload

    def _receive(self, size_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < size_bytes:
            chunk = self._socket.recv(size_bytes - len(received))
            if not chunk:
                raise ConnectionResetError("closed by the node")
            received += chunk
        return bytes(received)


def _secured(sock: socket.socket, address: str, tls: ClientTls, server_name: str) -> ssl.SSLSocket:
    from saltern.tls import client_context  # it brings cryptography: only who uses TLS pays for its import

    try:
        return client_context(tls).wrap_socket(sock, server_hostname=server_name)
    except ssl.SSLError as error:
        sock.close()
        raise tls_failure(error, address) from None
    except OSError as error:
        sock.close()
        raise UnavailableError(
            f"no TLS handshake with {address}: {error.strerror or error}",
            reason="TLS_FAILED",
            hint="check that a Saltern node listens there",
        ) from None
    except BaseException:
        sock.close()
        raise


def _connect(address: str, timeout_s: float) -> socket.socket:
    try:
        if not address.startswith("/"):
            return socket.create_connection(parse_endpoint(address, port_min=1), timeout=timeout_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise UnavailableError(
            f"cannot connect to {address}: {error.strerror or error}",
            reason="ENDPOINT_UNREACHABLE",
            hint="check that the node runs, and that this machine may reach it",
        ) from None
