"""The TCP door: payload in the frame (WIRE.md, section 1)."""

from __future__ import annotations

import errno
import socket
from typing import Final

from saltern.endpoints import Endpoint
from saltern.errors import FailedPreconditionError, SalternError

_BACKLOG: Final = 256


def listen_tcp(endpoint: Endpoint, *, option: str) -> socket.socket:
    """Bind and listen; port 0 takes a free one.

    Raises:
        FailedPreconditionError: PORT_TAKEN or ADDRESS_NOT_AVAILABLE; the message names the ``option`` to change.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise bind_error(endpoint, option, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise bind_error(endpoint, option, error) from None
    return listener


def bound_endpoint(listener: socket.socket) -> Endpoint:
    """Where a listening socket can be reached, with the port that it got."""
    host, port = listener.getsockname()[:2]
    return Endpoint(host, port)


def bind_error(endpoint: Endpoint, option: str, error: OSError) -> SalternError:
    if error.errno == errno.EADDRINUSE:
        return FailedPreconditionError(
            f"cannot listen on {endpoint}: the port is taken",
            reason="PORT_TAKEN",
            hint=f"stop the process that holds it, or choose another with {option} (port 0 takes a free one)",
        )
    return FailedPreconditionError(
        f"cannot listen on {endpoint}: {error.strerror or error}",
        reason="ADDRESS_NOT_AVAILABLE",
        hint=f"give {option} an address of this host and a port above 1023",
    )
