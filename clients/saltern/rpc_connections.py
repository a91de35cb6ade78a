"""How many connections a gRPC server takes, and how long one may be open without a call.

Whoever can reach a port can open connections, speak enough HTTP/2 to keep them, and call nothing. Each takes a
descriptor; where there are none left, a server can neither take the next caller nor reach its own database. So there
are fewer of them than descriptors, and one without a call is closed: those who mean it connect again with their next
call, by themselves (I10).
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

#: At a time, in one process.
CONNECTIONS_MAX: Final = 4096
#: Without a call in progress; a node's policy stream is one.
IDLE_MS: Final = 300_000
#: Connections have at most one part in so many of the process's descriptors.
_DESCRIPTOR_PARTS: Final = 2


def connection_limits(
    *, connections_max: int = CONNECTIONS_MAX, idle_ms: int = IDLE_MS
) -> tuple[tuple[str, int], tuple[str, int]]:
    """Options of a gRPC server; call :func:`raise_descriptor_limit` before."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        ("grpc.max_allowed_incoming_connections", min(connections_max, descriptors // _DESCRIPTOR_PARTS)),
        ("grpc.max_connection_idle_ms", idle_ms),
    )


def raise_descriptor_limit() -> None:
    """Let the process open as many descriptors as the system permits: each connection, session and region takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
