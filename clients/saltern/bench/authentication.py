"""What authentication costs: it is always on, so its price is measured instead of a run without it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from statistics import median
from typing import Final

from saltern.bench.cases import each
from saltern.credentials import Grant
from saltern.deadline import Deadline
from saltern.transport.registry import BufferRegistry
from saltern.transport.tcp import TcpSession

_SESSIONS: Final = 300
_DEADLINE_MS: Final = 10_000


def authentication_cost(wire_endpoint: str, grant: Grant) -> dict[str, float]:
    """Microseconds to open a session, beside a bare connection; and what the node's gate takes of each request.

    Returns:
        ``session_open_us`` (connect, HELLO, close; the token is one that the node has verified before),
        ``connect_us`` (connect, close), and of the node's own measurement ``token_verify_us`` (the first time that a
        token is seen) and ``gate_check_ns`` (each request of an open session).
    """
    host, _, port = wire_endpoint.rpartition(":")

    def session() -> None:
        TcpSession.open(wire_endpoint, grant, BufferRegistry(), Deadline(_DEADLINE_MS), node_id="bench").close()

    cost = {
        "session_open_us": 1e6 * median(each(_SESSIONS, session)),
        "connect_us": 1e6 * median(each(_SESSIONS, lambda: socket.create_connection((host, int(port))).close())),
    }
    # The gate is the server's, which this distribution does not import.
    done = subprocess.run([sys.executable, "-m", "dataplane.gate_cost"], capture_output=True, check=True)
    return {**cost, **json.loads(done.stdout)}
