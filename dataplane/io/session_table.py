"""Every connection of a node, the limits on their number, and the doors that accept them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Mapping
from time import monotonic
from types import MappingProxyType
from typing import Final

import structlog

from dataplane.io import letting_go
from dataplane.io.batch_spans import BatchSpans, TracedConversation, TracedSession
from dataplane.io.connection import Connection
from dataplane.io.conversation import Conversation
from dataplane.io.session import NodeState, Session, too_many_sessions
from dataplane.io.stream import ByteStream
from dataplane.io.tls import TlsStream
from dataplane.metrics.meters import Transport
from dataplane.settings import SessionLimits
from saltern import wire
from saltern.endpoints import Endpoint
from saltern.names import TenantId
from saltern.tls_reload import ReloadingTls

_log = structlog.get_logger(__name__)
_ACCEPTS_PER_EVENT: Final = 32
_ACCEPT_PAUSE_S: Final = 0.2
_UNIX_BUFFER_BYTES: Final = 2 * 1024 * 1024


class SessionTable:
    """Every connection of the node, whatever its door, and the limits on their number.

    Args:
        tls: for connections over TCP; None for plain text. Those over unix sockets never leave the host.
        spans: which batches are traced; None for none.
    """

    def __init__(
        self,
        node: NodeState,
        limits: SessionLimits,
        tls: ReloadingTls | None = None,
        spans: BatchSpans | None = None,
    ) -> None:
        self._node = node
        self._limits = limits
        self._tls = tls
        self._spans = spans
        self._connections: set[Connection] = set()
        #: Those before HELLO, the oldest first.
        self._unopened: dict[Connection, None] = {}
        self._by_tenant: Counter[TenantId] = Counter()
        self._sweeper: asyncio.TimerHandle | None = None
        self._on_empty: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def by_tenant(self) -> Mapping[TenantId, int]:
        """How many sessions are open of each tenant that has any."""
        return MappingProxyType(self._by_tenant)

    async def drain(self, limit_s: float) -> None:
        """Close idle sessions and wait until the others have answered what they are at, at most ``limit_s``."""
        for connection in list(self._connections):
            if not connection.conversation.is_busy:
                connection.close("DRAINING")
        if self._connections:
            self._on_empty = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._on_empty.wait(), limit_s)

    def start(self) -> None:
        """Begin to give turns and to compare sessions with their deadlines; call it on the running loop."""
        self._node.traffic.scheduler.start()
        self._watch_deadlines()

    def close(self) -> None:
        """Close every session."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.close("DRAINING")
        self._node.traffic.scheduler.close()

    def adopt(self, sock: socket.socket, *, takes_descriptors: bool) -> None:
        """Serve an accepted socket, or answer TOO_MANY_SESSIONS and close it."""
        transport = Transport.SHM if takes_descriptors else Transport.TCP
        meter = self._node.meters.doors[transport]
        is_full = len(self._connections) >= self._limits.sessions_max
        if self._unopened and (is_full or len(self._unopened) >= self._limits.unopened_max):
            # Whoever means it says HELLO at once and is not the oldest for long.
            next(iter(self._unopened)).close("GAVE_WAY")
        if len(self._connections) >= self._limits.sessions_max:
            meter.ended(was_open=False, reason="TOO_MANY_SESSIONS")
            _refuse(sock, says_why=self._tls is None or takes_descriptors)
            return
        sock.setblocking(False)
        others = _epoll_descriptor(asyncio.get_running_loop())
        stream: ByteStream
        if self._tls is not None and not takes_descriptors:
            stream = TlsStream(sock, self._tls, peer=_peer_of(sock), others_descriptor=others)
        else:
            stream = ByteStream(sock, takes_descriptors=takes_descriptors, others_descriptor=others)

        def claim_place(tenant: TenantId) -> bool:
            return self._claim_place(connection, tenant)

        conversation: Conversation
        if self._spans is None:
            conversation = Conversation(stream, Session(self._node, claim_place), self._limits, meter)
        else:
            session = TracedSession(self._node, claim_place)
            conversation = TracedConversation(
                stream, session, self._limits, meter, spans=self._spans, transport=transport
            )
        connection = Connection(sock, stream, conversation, self._node.traffic, meter=meter, on_close=self._forget)
        conversation.on_connect = lambda: connection.count_by(self._node.meters.doors[Transport.RDMA])
        self._connections.add(connection)
        self._unopened[connection] = None
        connection.start()

    def _claim_place(self, connection: Connection, tenant: TenantId) -> bool:
        if self._by_tenant[tenant] >= self._limits.tenant_sessions_max:
            return False
        self._by_tenant[tenant] += 1
        del self._unopened[connection]
        connection.open(tenant, self._node.traffic.of(tenant))
        return True

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._unopened.pop(connection, None)
        if connection.tenant is not None:
            self._by_tenant[connection.tenant] -= 1
            if not self._by_tenant[connection.tenant]:
                del self._by_tenant[connection.tenant]

        if self._on_empty is not None and not self._connections:
            self._on_empty.set()

    def _sweep(self) -> None:
        now_s = monotonic()
        for connection in list(self._connections):
            connection.expire(now_s)
        self._watch_deadlines()

    def _watch_deadlines(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(self._limits.sweep_s, self._sweep)


class Door:
    """Accepts connections from one listening socket into the session table."""

    def __init__(self, listener: socket.socket, table: SessionTable, *, takes_descriptors: bool) -> None:
        self._listener = listener
        self._table = table
        self._takes_descriptors = takes_descriptors
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)

    def open(self) -> None:
        """Begin to accept; call it on the running loop."""
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting and close the listening socket; sessions go on. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            if self._takes_descriptors and letting_go.is_overloaded():
                _log.warning("clients hold up the closing of descriptors; the unix door waits")
                self._look_away()
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: the listener would stay readable, so look away for a moment instead of spinning.
                _log.error("cannot accept a connection", reason=str(error))
                self._look_away()
                return
            if sock.family == socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
            else:  # TCP buffers are left to the kernel: setting them would end their automatic growth
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._table.adopt(sock, takes_descriptors=self._takes_descriptors)

    def _look_away(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._pause = loop.call_later(_ACCEPT_PAUSE_S, self.open)


def _refuse(sock: socket.socket, *, says_why: bool) -> None:
    """Close a socket for which there is no room. Over TLS nothing is said: that would take a handshake."""
    error = too_many_sessions("the node has too many sessions open")
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        if says_why:
            sock.send(wire.encode_error_reply(wire.Opcode.PING, 0, error))
    letting_go.close_descriptor(sock.detach())  # a unix client may have sent descriptors already


def _peer_of(sock: socket.socket) -> str:
    try:
        return str(Endpoint(*sock.getpeername()[:2]))
    except OSError:
        return ""


def _epoll_descriptor(loop: asyncio.AbstractEventLoop) -> int | None:
    """The descriptor that is readable when the loop has something to do; None if the loop has no such thing.

    asyncio has no public name for the selector of a loop that it made itself.
    """
    fileno = getattr(getattr(loop, "_selector", None), "fileno", None)
    return fileno() if fileno else None
