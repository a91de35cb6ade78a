"""Which transport a session uses: RDMA where both ends have it, shared memory with a node on this host, else TCP."""

from __future__ import annotations

import logging
import os
import stat
import time
from enum import StrEnum
from pathlib import Path

from saltern.credentials import Grant, NodeEndpoint
from saltern.deadline import Deadline
from saltern.errors import SalternError, UnauthenticatedError, UnavailableError
from saltern.transport.registry import BufferRegistry
from saltern.transport.session import Session
from saltern.transport.shm import ShmSession
from saltern.transport.tcp import TcpSession
from saltern.transport.tls import TlsDialer

logger = logging.getLogger("saltern")
#: Which RDMA device of this host to use, as ``DEVICE[:PORT[:GID_INDEX]]``; ``off`` for none.
RDMA_DEVICE_VARIABLE = "SALTERN_RDMA_DEVICE"
#: Where the kernel lists RDMA devices; the folder is not there where it knows of none.
_RDMA_DEVICES = Path("/sys/class/infiniband")
#: For so long after RDMA did not work with a node, ``auto`` does not try it with that node again.
_RDMA_RETRY_S = 60.0
_no_rdma_until_s: dict[NodeEndpoint, float] = {}


class Transport(StrEnum):
    """What the caller asks for."""

    AUTO = "auto"
    RDMA = "rdma"
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
    """Open a session over the transport asked for.

    ``auto`` takes RDMA if this host has an active device and the node offers it, then shared memory if the node's own
    socket is here, then TCP. Whatever of RDMA does not work (no library, memlock, GID, MTU) is logged, and the next is
    taken. A client that was told to use TLS, which does not cover RDMA, takes that only where ``SALTERN_RDMA_DEVICE``
    names a device.

    Args:
        tls: what the client was told of TLS; None for plain text over TCP. Shared memory never leaves the host.

    Raises:
        UnavailableError, DeadlineExceededError: the node is not reachable that way.
        UnauthenticatedError, PermissionDeniedError: the node refused the token.
        SalternError: with ``rdma`` asked for, a reason ``RDMA_*`` that says what it lacks.
    """
    if transport is Transport.RDMA:
        return _open_rdma(node, grant, registry, deadline, tls)
    if transport is Transport.AUTO and _may_use_rdma(node, tls):
        try:
            return _open_rdma(node, grant, registry, deadline, tls)
        except SalternError as error:
            if deadline.expired or isinstance(error, UnauthenticatedError):
                raise
            _leave_rdma(node, time.monotonic())
            logger.info("node %s: rdma not usable (%s: %s)", node.node_id, error.reason, error.message)
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
        node.wire_endpoint, grant, registry, deadline, node_id=node.node_id, tls=tls, server_name=node.tls_server_name
    )


def _may_use_rdma(node: NodeEndpoint, tls: TlsDialer | None) -> bool:
    """Whether trying is worth it: no library is loaded and no connection made on a host without a device."""
    chosen = os.environ.get(RDMA_DEVICE_VARIABLE, "")
    if not node.wire_endpoint or chosen == "off":
        return False
    if tls is not None and chosen in ("", "auto"):
        return False  # I10: entries would leave in the clear, and nobody asked for that
    if not any(_RDMA_DEVICES.glob("*")):
        return False
    return time.monotonic() >= _no_rdma_until_s.get(node, 0.0)


def _leave_rdma(node: NodeEndpoint, now_s: float) -> None:
    for known in [known for known, until_s in list(_no_rdma_until_s.items()) if until_s <= now_s]:
        _no_rdma_until_s.pop(known, None)
    _no_rdma_until_s[node] = now_s + _RDMA_RETRY_S


def _open_rdma(
    node: NodeEndpoint, grant: Grant, registry: BufferRegistry, deadline: Deadline, tls: TlsDialer | None
) -> Session:
    # Here, since most hosts have no use for it.
    from saltern.rdma import DeviceChoice
    from saltern.transport.rdma import RdmaSession

    if not node.wire_endpoint:
        raise _no_endpoint(node, "rdma")
    chosen = os.environ.get(RDMA_DEVICE_VARIABLE, "")
    return RdmaSession.open(
        node.wire_endpoint,
        grant,
        registry,
        deadline,
        node_id=node.node_id,
        tls=tls,
        server_name=node.tls_server_name,
        choice=DeviceChoice.parse("" if chosen == "off" else chosen),
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
