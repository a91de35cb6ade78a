"""From a call to nodes: the grant to act under, the pool of a node's sessions, several nodes at once, one more try."""

from __future__ import annotations

import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from saltern.breaker import BreakerPolicy, CircuitBreaker
from saltern.credentials import Credentials
from saltern.deadline import Deadline
from saltern.errors import SalternError, UnavailableError
from saltern.grant import Grant, NodeEndpoint
from saltern.placement import Placement, ReadLoad
from saltern.pool import Failure, NodePool
from saltern.transport.opening import Transport, open_session
from saltern.transport.registry import BufferRegistry
from saltern.transport.session import Session
from saltern.transport.tls import TlsDialer

if TYPE_CHECKING:
    from saltern.tls import ClientTls

logger = logging.getLogger("saltern")

#: One attempt, and one more where the first met an old session, an old token or an old epoch.
_ATTEMPTS = 2
#: Threads that ask further nodes while the caller's asks the first; more calls than that wait, each to its deadline.
_FAN_OUT_THREADS_MAX = 32
EPOCH_NOT_AVAILABLE = "EPOCH_NOT_AVAILABLE"

#: Node id and epoch to ask; None for whatever epoch is current.
Target: TypeAlias = tuple[str, int | None]
#: What is done on a session, within a deadline. Idempotent: run again, it takes up what the attempt before left undone.
Operation: TypeAlias = Callable[[Session, Deadline], None]


class _Node(NamedTuple):
    """What a client has of one node: its breaker, and its sessions under the current epoch and under the older one."""

    breaker: CircuitBreaker
    current: NodePool
    older: NodePool


class Router:
    """Runs operations of one client on sessions with the nodes of its namespace. Thread-safe.

    Args:
        credentials: closed with the router.
        transport: how to reach nodes.
        sessions_max: open sessions with each node, besides one of an older epoch while that is readable.
        breaker: thresholds of the circuit breaker of each node.
        tls: whom to trust at the other end of TCP connections; None for plain text.

    Attributes:
        grant: the last grant.
        registry: registered buffers, which sessions over shared memory recognise.
        load: what was read from each node lately.
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
        self.load = ReadLoad()
        self.transport = transport
        self.chosen_transport = ""
        self._credentials = credentials
        self._tls = None if tls is None else TlsDialer(tls)
        self._sessions_max = sessions_max
        self._breaker_policy = breaker
        self._closed = False
        self._lock = threading.Lock()
        self._nodes: dict[NodeEndpoint, _Node] = {}
        #: What holds for the grant that was placed last: so a call costs no search and no lock.
        self._placed: tuple[Grant, Placement, dict[str, _Node]] | None = None
        self._executor: ThreadPoolExecutor | None = None
        _routers.add(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def current(self, deadline: Deadline) -> Grant:
        """The grant to act under; raises a SalternError where there is no valid one."""
        grant = self.grant = self._credentials.grant(deadline)
        return grant

    def newer(self, stale: Grant, deadline: Deadline) -> bool:
        """Whether an exchange gives another epoch than ``stale`` has, whose own a node no longer (or not yet) knows.

        At most one exchange in two seconds: a node that lags behind the control plane must not cost one in each call.
        """
        try:
            self.grant = self._credentials.renewed(stale, deadline)
        except SalternError as error:
            logger.info("epoch %d is not available, and no new grant: %s", stale.epoch, error.message)
            return False
        return self.grant.epoch != stale.epoch

    def renew_soon(self) -> None:
        """Have the grant renewed in the background: what it says is no longer the whole truth."""
        self._credentials.renew_soon()

    def placement(self, grant: Grant) -> Placement:
        """The placement over a grant's nodes; raises UnavailableError where it has none."""
        return self._place(grant)[1]

    def run(self, target: Target, operation: Operation, deadline: Deadline) -> SalternError | None:
        """Run an operation on one node within the deadline (I10); returns why it did not finish, or None."""
        node_id, epoch = target
        failure: Failure | None = None
        for _ in range(_ATTEMPTS):
            try:
                grant = self.current(deadline)
                pool, session_grant = self._pool(grant, node_id, epoch)
            except SalternError as error:
                return error
            failure = pool.run(lambda session: operation(session, deadline), session_grant, deadline)
            if failure is None:
                return None
            if failure.rejected_token:
                self._credentials.reject(failure.rejected_token)
            if isinstance(failure.error, UnavailableError):
                self._credentials.renew_soon()  # the node may have come back elsewhere
            retry = failure.retry
            if failure.error.reason == EPOCH_NOT_AVAILABLE and epoch is None and not deadline.expired:
                retry = self.newer(grant, deadline) or retry
            if not retry:
                break
        return failure.error if failure else None

    def run_all(self, work: Sequence[tuple[Target, Operation]], deadline: Deadline) -> list[SalternError | None]:
        """Run operations on several nodes at once; returns for each why it did not finish, or None.

        The first runs in the caller's thread, so that one node costs no thread and no hand-over.
        """
        if len(work) == 1:
            return [self.run(*work[0], deadline)]
        futures = [self._submit(target, operation, deadline.share()) for target, operation in work[1:]]
        first = self.run(*work[0], deadline.share()) if work else None
        return [first, *(_outcome(future, deadline) for future in futures)] if work else []

    def close(self) -> None:
        """Close every session; operations in progress in other threads end at once."""
        with self._lock:
            self._closed = True
            nodes, self._nodes, self._placed = list(self._nodes.values()), {}, None
            executor, self._executor = self._executor, None
        _routers.discard(self)
        for node in nodes:
            node.current.close()
            node.older.close()
        if executor is not None:
            executor.shutdown(wait=False)
        self._credentials.close()

    def after_fork(self) -> None:
        """In a child: drop the parent's sessions without a word, and locks and threads that only the parent has."""
        nodes, self._nodes, self._placed = list(self._nodes.values()), {}, None
        self._lock = threading.Lock()
        self._executor = None
        self._credentials.after_fork()
        for node in nodes:
            node.current.forget()
            node.older.forget()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _submit(self, target: Target, operation: Operation, deadline: Deadline) -> Future[SalternError | None]:
        with self._lock:
            if self._closed:
                refused: Future[SalternError | None] = Future()
                refused.set_result(_client_closed())
                return refused
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_FAN_OUT_THREADS_MAX, thread_name_prefix="saltern-node")
            return self._executor.submit(self.run, target, operation, deadline)

    def _pool(self, grant: Grant, node_id: str, epoch: int | None) -> tuple[NodePool, Grant]:
        """The sessions to take one from, and the grant that they are opened with."""
        node = self._place(grant)[2].get(node_id)
        if node is None:
            raise UnavailableError(
                f"node {node_id} no longer serves namespace {grant.namespace!r}",
                reason="NODE_GONE",
                hint="go on without the cache; the next call asks the nodes that are there",
            )
        if epoch is None or epoch == grant.epoch:
            return node.current, grant
        return node.older, grant.for_epoch(epoch)

    def _place(self, grant: Grant) -> tuple[Grant, Placement, dict[str, _Node]]:
        placed = self._placed
        if placed is not None and placed[0] is grant:
            return placed
        try:
            placement = Placement(grant.tenant, grant.namespace, grant.nodes, block_tokens=grant.block_tokens)
        except UnavailableError:
            self._credentials.renew_soon()
            raise
        self._let_go_of_others(grant)
        self._placed = placed = grant, placement, {node.node_id: self._add_node(node) for node in grant.nodes}
        return placed

    def _add_node(self, endpoint: NodeEndpoint) -> _Node:
        with self._lock:
            if self._closed:
                raise _client_closed()
            node = self._nodes.get(endpoint)
            if node is None:
                breaker = CircuitBreaker(f"node {endpoint.node_id}", self._breaker_policy, random.random)
                node = self._nodes[endpoint] = _Node(
                    breaker,
                    NodePool(endpoint, self._open_session, sessions_max=self._sessions_max, breaker=breaker),
                    NodePool(endpoint, self._open_session, sessions_max=1, breaker=breaker),
                )
            return node

    def _let_go_of_others(self, grant: Grant) -> None:
        """Close sessions with nodes that a grant no longer names, and those of an older epoch that it no longer has."""
        with self._lock:
            gone = [self._nodes.pop(endpoint) for endpoint in list(self._nodes) if endpoint not in grant.nodes]
            kept = list(self._nodes.values())
        for node in gone:
            node.current.close()
            node.older.close()
        if grant.older_epoch is None:
            for node in kept:
                node.older.let_go()

    def _open_session(self, node: NodeEndpoint, grant: Grant, deadline: Deadline) -> Session:
        session = open_session(node, grant, self.transport, self.registry, deadline, tls=self._tls)
        if session.transport != self.chosen_transport:
            self.chosen_transport = session.transport
            logger.info("node %s: session over %s", session.node, session.transport)
        return session


def _outcome(future: Future[SalternError | None], deadline: Deadline) -> SalternError | None:
    """What became of a node's work. It ends by its own deadline; what no thread has begun by then is not begun."""
    try:
        return future.result(deadline.remaining_s())
    except TimeoutError:
        pass
    except SalternError:
        pass  # the deadline is over, or was cancelled
    return deadline.error() if future.cancel() else future.result()


def _client_closed() -> UnavailableError:
    return UnavailableError("the client was closed", reason="CLIENT_CLOSED")


_routers: weakref.WeakSet[Router] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for router in list(_routers):
        router.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
