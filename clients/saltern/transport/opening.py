"""Which transport a session uses: shared memory where the node is on this host, else TCP."""

from __future__ import annotations

import logging
import stat
from enum import StrEnum
from pathlib import Path

from saltern.credentials import Grant, NodeEndpoint
from saltern.deadline import Deadline
from saltern.errors import UnavailableError
from saltern.transport.registry import BufferRegistry
from saltern.transport.session import Session
from saltern.transport.shm import ShmSession
from saltern.transport.tcp import TcpSession
from saltern.transport.tls import TlsDialer

logger = logging.getLogger("saltern")


class Transport(StrEnum):
    """What the caller asks for."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"


def open_session(
    node: NodeEndpoint,
    grant: Grant,
    transport: Transport,
    registry: BufferRegistry,
    deadline: Deadline,
    *,
    tls: TlsDialer | None = None,
) -> Session:
    """Open a session over the transport asked for; ``auto`` takes shared memory if the node's own socket is here.

    Args:
        tls: what the client was told of TLS; None for plain text over TCP. Shared memory never leaves the host.

    Raises:
        UnavailableError, DeadlineExceededError: the node is not reachable that way.
        UnauthenticatedError, PermissionDeniedError: the node refused the token.
    """
    if transport is not Transport.TCP and node.shm_path:
        if transport is Transport.SHM or _is_socket(node.shm_path):
            try:
                return ShmSession.open(
                    node.shm_path, grant, registry, deadline, node_id=node.node_id, host_id=node.host_id
                )
            except UnavailableError as error:
                if transport is Transport.SHM or not node.wire_endpoint:
                    raise
                logger.info("node %s: shared memory not usable (%s), using tcp", node.node_id, error.message)
    elif transport is Transport.SHM:
        raise _no_endpoint(node, "shm")
    if not node.wire_endpoint:
        raise _no_endpoint(node, "tcp")
    return TcpSession.open(
        node.wire_endpoint, grant, deadline, node_id=node.node_id, tls=tls, server_name=node.tls_server_name
    )


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(Path(path).stat().st_mode)
    except OSError:
        return False


def _no_endpoint(node: NodeEndpoint, transport: str) -> UnavailableError:
    return UnavailableError(
        f"node {node.node_id} offers no {transport} endpoint",
        reason="TRANSPORT_NOT_OFFERED",
        hint="choose transport='auto', or configure the node to listen there",
    )
