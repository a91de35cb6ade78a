"""The sessions of a client with one node: bounded, shared by threads, kept from callers while the node is dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from saltern.breaker import CircuitBreaker
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
#: What a session is for is not there any more; one that is opened now may find another of the same name (WIRE.md 6).
_PARTITION_GONE = frozenset({"NAMESPACE_NOT_AVAILABLE", "EPOCH_NOT_AVAILABLE", "GROUP_NOT_AVAILABLE"})

#: Sessions that are opened at once: a node that comes back meets its clients one by one, not all of their threads.
OPENING_MAX = 2

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

    Sessions go from idle to busy and back without a lock: ``pop`` and ``append`` of a list are atomic. The condition
    guards how many sessions there are, and is where callers wait when that many are busy.

    Args:
        node: where it is.
        opener: opens a session.
        sessions_max: how many may be open; more callers wait, each to its deadline.
        breaker: of the node; every pool of sessions with it shares one.
    """

    def __init__(
        self, node: NodeEndpoint, opener: SessionOpener, *, sessions_max: int, breaker: CircuitBreaker
    ) -> None:
        self.node = node
        self._opener = opener
        self._sessions_max = sessions_max
        self._condition = threading.Condition()
        #: Most recently used last, so that the least used grow old.
        self._idle: list[Session] = []
        #: Idle and busy ones; with those that are being opened at most ``sessions_max``.
        self._open: set[Session] = set()
        self._opening = 0
        self._waiting = 0
        self._closed = False
        self.breaker = breaker

    def run(self, operation: Callable[[Session], None], grant: Grant, deadline: Deadline) -> Failure | None:
        """Run ``operation`` on a session; returns None, or why it did not finish. Never past the deadline."""
        began_s = time.monotonic()
        session: Session | None = None
        replies = 0
        try:
            self.breaker.check(began_s, patience_s=deadline.remaining_s())
            session = self._acquire(grant, deadline, began_s)
            replies = session.replies
            operation(session)
        except SalternError as error:
            answered = session is not None and session.replies > replies
            self._account(error, began_s, answered=answered)
            stale = session is not None and not session.is_fresh and isinstance(error, UnavailableError)
            rejected = grant.access_token if isinstance(error, UnauthenticatedError) else ""
            if session is not None and error.reason in _PARTITION_GONE:
                # Perhaps made anew under the same name: only another session can tell.
                stale = not session.is_fresh
                self._discard(session)
                session = None
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
            self._condition.notify_all()
        # In this order: a session that is taken or released meanwhile meets one or the other.
        self._close_idle()
        with self._condition:
            busy = list(self._open)
        for session in busy:
            session.abort()

    def let_go(self) -> None:
        """Close the sessions that nobody uses; more can be opened."""
        if self._idle:
            self._close_idle()

    def forget(self) -> None:
        """Drop sessions that a fork copied, without a word to the node: they are the parent's."""
        for session in list(self._open):
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

    def _acquire(self, grant: Grant, deadline: Deadline, now_s: float) -> Session:
        """A session to use alone until ``_release``; cancelling the deadline aborts it from now on."""
        session = self._take_idle() or self._wait_for_place(deadline)
        while session is not None and not _fits(session, grant, now_s):
            self._discard(session)
            session = self._take_idle() or self._wait_for_place(deadline)
        if session is None:
            session = self._open_session(grant, deadline)
        deadline.on_cancel(session.abort)
        if session.grant.access_token != grant.access_token:
            try:
                session.refresh(grant, deadline)
            except BaseException:
                self._discard(session)
                raise
        return session

    def _take_idle(self) -> Session | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _wait_for_place(self, deadline: Deadline) -> Session | None:
        """An idle session, or None with the right to open one: counted as opening until that is done."""
        deadline.on_cancel(self._wake)
        with self._condition:
            # Counted before looking: whoever releases a session after that look will see it and notify.
            self._waiting += 1
            try:
                while True:
                    if self._closed:
                        raise UnavailableError("the client was closed", reason="CLIENT_CLOSED")
                    session = self._take_idle()
                    if session is not None:
                        return session
                    places = self._sessions_max - len(self._open) - self._opening
                    if places > 0 and self._opening < OPENING_MAX:
                        self._opening += 1
                        return None
                    if deadline.cancelled:
                        raise deadline.error()
                    if deadline.expired or not self._condition.wait(deadline.remaining_s()):
                        raise DeadlineExceededError(
                            f"all {self._sessions_max} sessions with node {self.node.node_id} were busy",
                            reason="SESSIONS_BUSY",
                            hint="raise sessions_max or the deadline, or make larger batches in fewer threads",
                        )
                    if self.breaker.is_open:
                        # Found out by those who went ahead: nobody follows them.
                        self.breaker.check(time.monotonic(), patience_s=deadline.remaining_s())
            finally:
                self._waiting -= 1

    def _open_session(self, grant: Grant, deadline: Deadline) -> Session:
        """Open a session in a place that is counted as opening."""
        session: Session | None = None
        try:
            session = self._opener(self.node, grant, deadline)
        finally:
            with self._condition:
                self._opening -= 1
                if session is not None:
                    self._open.add(session)
                self._condition.notify()
                closed = self._closed
        if closed:
            session.abort()
        return session

    def _wake(self) -> None:
        """Make every waiting caller look again; one of them was cancelled."""
        with self._condition:
            self._condition.notify_all()

    def _release(self, session: Session) -> None:
        if not session.usable:
            self._discard(session)
            return
        self._idle.append(session)
        if self._waiting:
            with self._condition:
                self._condition.notify()
        if self._closed:
            self._close_idle()

    def _close_idle(self) -> None:
        while (session := self._take_idle()) is not None:
            self._discard(session)

    def _discard(self, session: Session) -> None:
        """Close a session; its place is free for another."""
        with self._condition:
            self._open.discard(session)
            self._condition.notify()
        session.close()


def _fits(session: Session, grant: Grant, now_s: float) -> bool:
    """Whether an idle session may serve: same epoch, used lately, and not closed by the node meanwhile."""
    idle_s = now_s - session.last_used_s
    return session.grant.epoch == grant.epoch and (
        idle_s < _FRESH_S or (idle_s < IDLE_MAX_S and not session.is_stale())
    )
