"""The sessions of a client with one node: bounded, shared by threads, kept from callers while the node is dead."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from saltern.breaker import BreakerPolicy, CircuitBreaker
from saltern.credentials import Grant, NodeEndpoint
from saltern.deadline import Deadline
from saltern.errors import (
    DeadlineExceededError,
    ProtocolError,
    SalternError,
    UnauthenticatedError,
    UnavailableError,
)
from saltern.transport.session import Session

#: A node closes a session that is idle for ten minutes; the client lets go of it before that.
IDLE_MAX_S = 540.0
#: A session that was used more recently is taken without a look whether the node has closed it: if so, the call fails
#: and is made again on a new one.
_FRESH_S = 0.1
#: What a timeout says depends on how long it took: nothing about the node below the first, a quick failure below the
#: second, above it that the node holds its callers up.
_WAIT_MIN_S = 0.001
_TELLING_WAIT_S = 0.05

SessionOpener = Callable[[NodeEndpoint, Grant, Deadline], Session]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an operation did not finish.

    Attributes:
        error: what to answer.
        retry: whether another attempt may help at once: the session was an old one, or its token was.
        rejected_token: the node refused the token of this session.
    """

    error: SalternError
    retry: bool = False
    rejected_token: str = ""


class NodePool:
    """Runs operations on sessions with one node, one thread on each session at a time.

    Args:
        node: where it is.
        opener: opens a session.
        sessions_max: how many may be open; more callers wait, each to its deadline.
        breaker: thresholds of the circuit breaker.
    """

    def __init__(self, node: NodeEndpoint, opener: SessionOpener, *, sessions_max: int, breaker: BreakerPolicy) -> None:
        self.node = node
        self._opener = opener
        self._sessions_max = sessions_max
        self._condition = threading.Condition()
        self._idle: list[Session] = []
        self._busy: set[Session] = set()
        self._opening = 0
        self._closed = False
        self.breaker = CircuitBreaker(f"node {node.node_id}", breaker, random.random)

    def run(self, operation: Callable[[Session], None], grant: Grant, deadline: Deadline) -> Failure | None:
        """Run ``operation`` on a session; returns None, or why it did not finish. Never past the deadline."""
        began_s = time.monotonic()
        session: Session | None = None
        replies = 0
        try:
            self.breaker.check(began_s, patience_s=deadline.remaining_s())
            session = self._acquire(grant, deadline)
            replies = session.replies
            operation(session)
        except SalternError as error:
            answered = session is not None and session.replies > replies
            self._account(error, began_s, answered=answered)
            stale = session is not None and not session.is_fresh and isinstance(error, UnavailableError)
            rejected = grant.access_token if isinstance(error, UnauthenticatedError) else ""
            return Failure(error, retry=bool(stale or rejected) and not deadline.expired, rejected_token=rejected)
        else:
            session.is_fresh = False
            self.breaker.record_success()
            return None
        finally:
            deadline.on_cancel(None)
            if session is not None:
                self._release(session)

    def close(self) -> None:
        """Close every session; operations in progress fail at once."""
        with self._condition:
            self._closed = True
            idle, self._idle = self._idle, []
            for session in self._busy:
                session.abort()
            self._condition.notify_all()
        for session in idle:
            session.close()

    def forget(self) -> None:
        """Drop sessions that a fork copied, without a word to the node: they are the parent's."""
        for session in [*self._idle, *self._busy]:
            session.forget()

    def _account(self, error: SalternError, began_s: float, *, answered: bool) -> None:
        """Tell the breaker what an error says about the node."""
        now_s = time.monotonic()
        match error:
            case SalternError(reason="CIRCUIT_OPEN" | "SESSIONS_BUSY" | "CANCELLED" | "CLIENT_CLOSED"):
                pass  # of the client's own making
            case DeadlineExceededError():
                waited_s = now_s - began_s
                if not answered and waited_s >= _WAIT_MIN_S:
                    self.breaker.record_failure(now_s, error, waited=waited_s >= _TELLING_WAIT_S)
            case UnavailableError() | ProtocolError():
                self.breaker.record_failure(now_s, error, waited=False)
            case _:
                self.breaker.record_success()  # a refusal is an answer

    def _acquire(self, grant: Grant, deadline: Deadline) -> Session:
        session = self._take(deadline)
        try:
            if session is not None and not _fits(session, grant):
                session.close()
                session = None
            if session is None:
                session = self._opener(self.node, grant, deadline)
            deadline.on_cancel(session.abort)
            if session.grant.access_token != grant.access_token:
                session.refresh(grant, deadline)
        except BaseException:
            if session is not None:
                session.close()
            with self._condition:
                self._opening -= 1
                self._condition.notify()
            raise
        with self._condition:
            self._opening -= 1
            self._busy.add(session)
            closed = self._closed
        if closed:
            session.abort()
        return session

    def _take(self, deadline: Deadline) -> Session | None:
        """An idle session, or None with the right to open one; counts as opening until it is busy or has failed."""
        deadline.on_cancel(self._wake)
        with self._condition:
            while True:
                if self._closed:
                    raise UnavailableError("the client was closed", reason="CLIENT_CLOSED")
                if self._idle or self._opening + len(self._busy) < self._sessions_max:
                    self._opening += 1
                    return self._idle.pop() if self._idle else None
                if deadline.cancelled:
                    raise deadline.error()
                if deadline.expired or not self._condition.wait(deadline.remaining_s()):
                    raise DeadlineExceededError(
                        f"all {self._sessions_max} sessions with node {self.node.node_id} were busy",
                        reason="SESSIONS_BUSY",
                        hint="raise sessions_max or the deadline, or make larger batches in fewer threads",
                    )

    def _wake(self) -> None:
        """Make every waiting caller look again; one of them was cancelled."""
        with self._condition:
            self._condition.notify_all()

    def _release(self, session: Session) -> None:
        with self._condition:
            self._busy.discard(session)
            keep = session.usable and not self._closed
            if keep:
                self._idle.append(session)
            self._condition.notify()
        if not keep:
            session.close()


def _fits(session: Session, grant: Grant) -> bool:
    """Whether an idle session may serve: same epoch, used lately, and not closed by the node meanwhile."""
    idle_s = time.monotonic() - session.last_used_s
    return session.grant.epoch == grant.epoch and (
        idle_s < _FRESH_S or (idle_s < IDLE_MAX_S and not session.is_stale())
    )
