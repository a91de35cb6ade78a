"""Endpoints to socket addresses, within a deadline."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from saltern.deadline import Deadline
from saltern.endpoints import parse_endpoint
from saltern.errors import UnavailableError


def resolve(endpoint: str, deadline: Deadline) -> tuple[str, int]:
    """Numeric host and port of an endpoint.

    Names are resolved in a thread of their own, because getaddrinfo knows no timeout and a slow name server must not
    hold the engine (I10).

    Raises:
        UnavailableError: the name does not resolve.
        DeadlineExceededError: not in time.
    """
    host, port = parse_endpoint(endpoint, port_min=1)
    try:
        return _lookup(host, socket.AI_NUMERICHOST), port
    except socket.gaierror:
        pass
    found: Future[str] = Future()

    def run() -> None:
        try:
            found.set_result(_lookup(host, 0))
        except OSError as error:
            found.set_exception(error)

    threading.Thread(target=run, name="saltern-resolve", daemon=True).start()
    try:
        return found.result(timeout=deadline.remaining_s()), port
    except FutureTimeoutError:
        raise deadline.error() from None
    except OSError as error:
        raise UnavailableError(
            f"cannot resolve {host[:128]!r}: {error.strerror}",
            reason="NAME_NOT_RESOLVED",
            hint="check the node's advertised endpoint",
        ) from None


def _lookup(host: str, flags: int) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)[0][4][0])
