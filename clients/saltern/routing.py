"""From a call to a node: the grant to act under, the node to ask, the pool of its sessions, whether to try again."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from saltern.breaker import BreakerPolicy
from saltern.credentials import Credentials, Grant, NodeEndpoint
from saltern.deadline import Deadline
from saltern.errors import SalternError, UnavailableError
from saltern.placement import place_namespace
from saltern.pool import Failure, NodePool
from saltern.transport.opening import Transport, open_session
from saltern.transport.registry import BufferRegistry
from saltern.transport.session import Session
from saltern.transport.tls import TlsDialer

if TYPE_CHECKING:
    from saltern.tls import ClientTls

logger = logging.getLogger("saltern")

#: One attempt, and one more where the first met an old session or an old token.
_ATTEMPTS = 2


class Router:
    """Runs operations of one client on sessions with the nodes of its namespace. Thread-safe.

    Args:
        credentials: closed with the router.
        transport: how to reach nodes.
        sessions_max: open sessions with each node.
        breaker: thresholds of the circuit breaker of each node.
        tls: whom to trust at the other end of TCP connections; None for plain text.

    Attributes:
        grant: the last grant.
        registry: registered buffers, which sessions over shared memory recognise.
        chosen_transport: what the last session was opened over; empty before the first.
    """

    def __init__(
        self,
        credentials: Credentials,
        transport: Transport,
        *,
        sessions_max: int,
        breaker: BreakerPolicy,
        grant: Grant,
        tls: ClientTls | None = None,
    ) -> None:
        self.grant = grant
        self.registry = BufferRegistry()
        self.transport = transport
        self.chosen_transport = ""
        self._credentials = credentials
        self._tls = None if tls is None else TlsDialer(tls)
        self._sessions_max = sessions_max
        self._breaker_policy = breaker
        self._closed = False
        self._lock = threading.Lock()
        self._pools: dict[NodeEndpoint, NodePool] = {}
        self._placed: tuple[Grant, NodePool] | None = None
        _routers.add(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def run(self, operation: Callable[[Session], None], deadline: Deadline) -> SalternError | None:
        """Run an idempotent operation within the deadline (I10); returns why it did not finish, or None.

        An operation that is run again takes up what the attempt before it left undone.
        """
        failure: Failure | None = None
        for _ in range(_ATTEMPTS):
            try:
                grant = self.grant = self._credentials.grant(deadline)
                pool = self._pool(grant)
            except SalternError as error:
                return error
            failure = pool.run(operation, grant, deadline)
            if failure is None:
                return None
            if failure.rejected_token:
                self._credentials.reject(failure.rejected_token)
            if isinstance(failure.error, UnavailableError):
                self._credentials.renew_soon()  # the node may have come back elsewhere
            if not failure.retry:
                break
        return failure.error if failure else None

    def close(self) -> None:
        """Close every session; operations in progress in other threads end at once."""
        with self._lock:
            self._closed = True
            pools, self._pools, self._placed = list(self._pools.values()), {}, None
        _routers.discard(self)
        for pool in pools:
            pool.close()
        self._credentials.close()

    def after_fork(self) -> None:
        """In a child: drop the parent's sessions without a word, and locks that the parent's threads held."""
        pools, self._pools, self._placed = list(self._pools.values()), {}, None
        self._lock = threading.Lock()
        self._credentials.after_fork()
        for pool in pools:
            pool.forget()

    def _pool(self, grant: Grant) -> NodePool:
        placed = self._placed
        if placed is not None and placed[0] is grant:
            return placed[1]
        try:
            node = place_namespace(grant.namespace, grant.nodes)
        except UnavailableError:
            self._credentials.renew_soon()
            raise
        with self._lock:
            if self._closed:
                raise UnavailableError("the client was closed", reason="CLIENT_CLOSED")
            gone = [self._pools.pop(other) for other in list(self._pools) if other not in grant.nodes]
            pool = self._pools.get(node)
            if pool is None:
                pool = self._pools[node] = NodePool(
                    node, self._open_session, sessions_max=self._sessions_max, breaker=self._breaker_policy
                )
            self._placed = grant, pool
        for old in gone:
            old.close()
        return pool

    def _open_session(self, node: NodeEndpoint, grant: Grant, deadline: Deadline) -> Session:
        session = open_session(node, grant, self.transport, self.registry, deadline, tls=self._tls)
        if session.transport != self.chosen_transport:
            self.chosen_transport = session.transport
            logger.info("node %s: session over %s", session.node, session.transport)
        return session


_routers: weakref.WeakSet[Router] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for router in list(_routers):
        router.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
