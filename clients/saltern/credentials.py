"""Where a client's token, salt keys and node endpoints come from.

:class:`ApiKeyCredentials` exchanges an API key at the control plane and renews ahead of expiry, in the background, once
for all threads: no caller waits for the control plane while its token is good (I9). :class:`StaticCredentials` holds
what was obtained elsewhere. Secrets are in no repr, log line or error.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from saltern.breaker import BreakerPolicy, CircuitBreaker
from saltern.deadline import Deadline
from saltern.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    SalternError,
    UnauthenticatedError,
    UnavailableError,
)
from saltern.grant import WHOLE_NAMESPACE, EpochSalt, Grant, NodeEndpoint, SaltScopeChoice
from saltern.keys import SaltKey
from saltern.names import TenantId, parse_namespace_id
from saltern.wire import ENTRY_MAX_BYTES

if TYPE_CHECKING:
    from saltern.tls import ClientTls

__all__ = [
    "ApiKeyCredentials",
    "Credentials",
    "EpochSalt",
    "Grant",
    "NodeEndpoint",
    "RenewingCredentials",
    "SaltScopeChoice",
    "StaticCredentials",
]

logger = logging.getLogger("saltern")

#: A token is renewed when this part of its lifetime has passed.
RENEW_AFTER_PART = 0.7
EXCHANGE_TIMEOUT_MS = 5_000
#: A grant whose nodes do not answer is renewed ahead of time, but not before it is so old.
RENEW_SOON_AFTER_S = 2.0


class Credentials(Protocol):
    """A source of grants. Implementations are thread-safe."""

    def grant(self, deadline: Deadline) -> Grant:
        """The current grant; raises a SalternError within the deadline where there is no valid one."""

    def reject(self, access_token: str) -> None:
        """Note that a node refused this token: the next ``grant`` gives another one or raises."""

    def renewed(self, stale: Grant, deadline: Deadline) -> Grant:
        """A grant newer than ``stale``, which stays usable; ``stale`` itself where it is new enough to be the truth.

        Raises a SalternError within the deadline where the exchange fails.
        """

    def renew_soon(self) -> None:
        """Note that the grant's nodes seem to have moved: renew in the background, not too often."""

    def after_fork(self) -> None:
        """Forget threads and locks of the parent process; called in the child."""

    def close(self) -> None:
        """Stop background work; no ``grant`` after this."""


class StaticCredentials:
    """A token and endpoints that were obtained elsewhere; there is no control plane to renew them.

    Args:
        access_token: of the audience node; ``replace_token`` gives a new one.
        namespace: the namespace that the token is for.
        nodes: where to find it.
        tenant: for display only: nodes take the tenant from the token (I1).
        expires_at_s: Unix seconds; None leaves expiry to the node.
        salt_key: to derive block keys with ``Client.block_key``; not needed to read and write by key.
        sharing_group_uid: the sharing group whose salt and epoch those are; empty for the namespace's own.
    """

    def __init__(
        self,
        access_token: str,
        *,
        namespace: str,
        nodes: tuple[NodeEndpoint, ...],
        tenant: str = "",
        epoch: int = 1,
        expires_at_s: float | None = None,
        salt_key: SaltKey | None = None,
        model_fingerprint: bytes = b"",
        block_tokens: int = 0,
        block_bytes: int = ENTRY_MAX_BYTES,
        sharing_group_uid: str = "",
    ) -> None:
        self._lock = threading.Lock()
        self._rejected = False
        self._grant = Grant(
            access_token=access_token,
            expires_at_s=expires_at_s if expires_at_s is not None else float("inf"),
            tenant=TenantId(tenant),
            namespace=parse_namespace_id(namespace),
            nodes=nodes,
            salts=(EpochSalt(epoch, salt_key),) if salt_key is not None else (),
            epoch=epoch,
            model_fingerprint=model_fingerprint,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            sharing_group_uid=sharing_group_uid,
        )

    def __repr__(self) -> str:
        return f"StaticCredentials({self._grant!r})"

    def replace_token(self, access_token: str, *, expires_at_s: float | None = None) -> None:
        """Use another token of the same tenant and namespace from now on."""
        with self._lock:
            self._rejected = False
            self._grant = replace(
                self._grant,
                access_token=access_token,
                expires_at_s=float("inf") if expires_at_s is None else expires_at_s,
            )

    def grant(self, deadline: Deadline) -> Grant:
        with self._lock:
            if self._rejected or time.time() >= self._grant.expires_at_s:
                raise UnauthenticatedError(
                    "the given token has expired or was refused", reason="TOKEN_EXPIRED", hint="give a new token"
                )
            return self._grant

    def reject(self, access_token: str) -> None:
        with self._lock:
            self._rejected = self._rejected or access_token == self._grant.access_token

    def renewed(self, stale: Grant, deadline: Deadline) -> Grant:
        return self.grant(deadline)

    def renew_soon(self) -> None:
        """Nothing to renew from."""

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def close(self) -> None:
        """Nothing to stop."""


class RenewingCredentials:
    """Credentials that a function renews: single flight, in the background, ahead of expiry.

    While a grant is valid every caller gets it at once, also when the control plane is down (I9). Without a valid one
    callers wait for the one exchange in flight, each to its own deadline; after a failed exchange they are answered
    UnavailableError at once until a backoff is over (I10). The first exchange runs in the constructor.

    Args:
        exchange: fetches a new grant; takes a timeout in milliseconds; raises SalternError.
        source: how errors call the other side.
        timeout_ms: for each exchange.

    Raises:
        SalternError: the first exchange failed: UnauthenticatedError, PermissionDeniedError, UnavailableError, ...
    """

    def __init__(self, exchange: Callable[[int], Grant], *, source: str, timeout_ms: int = EXCHANGE_TIMEOUT_MS) -> None:
        self._exchange = exchange
        self._timeout_ms = timeout_ms
        self._source = source
        self._closed = False
        self._rejected_token = ""
        self._renew_at_s = self._accepted_at_s = 0.0
        self.after_fork()
        self._accept(exchange(timeout_ms))

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: Future[Grant] | None = None
        self._breaker = CircuitBreaker(self._source, BreakerPolicy(quick_failures=1), random.random)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._current!r})"

    def grant(self, deadline: Deadline) -> Grant:
        current = self._current
        # No lock for what nearly every call does: a grant is immutable and judged by itself.
        if time.time() < self._renew_at_s and self._is_usable(current):
            return current
        with self._lock:
            current = self._current
            usable = self._is_usable(current)
            if usable and time.time() < self._renew_at_s:
                return current
            try:
                in_flight = self._renew()
            except UnavailableError:
                if usable:
                    return current
                raise
        if usable:
            return current
        try:
            return self._wait(in_flight, deadline)
        except DeadlineExceededError as error:
            raise UnavailableError(error.message, reason="CONTROL_PLANE_UNAVAILABLE", hint=error.hint) from None

    def _is_usable(self, grant: Grant) -> bool:
        return time.time() < grant.expires_at_s and grant.access_token != self._rejected_token

    def _wait(self, in_flight: Future[Grant], deadline: Deadline) -> Grant:
        """The grant of an exchange in flight; the wait ends with the deadline or with its cancellation."""
        over = threading.Event()
        in_flight.add_done_callback(lambda _: over.set())
        deadline.on_cancel(over.set)
        over.wait(deadline.remaining_s())
        deadline.on_cancel(None)
        if in_flight.done():
            return in_flight.result()
        raise UnavailableError(
            f"a new token is needed and {self._source} has not given one within {deadline.timeout_ms:g} ms",
            reason="CONTROL_PLANE_UNAVAILABLE",
            hint="check that the control plane runs; the cache is used again as soon as it does",
        )

    def reject(self, access_token: str) -> None:
        with self._lock:
            self._rejected_token = access_token

    def renewed(self, stale: Grant, deadline: Deadline) -> Grant:
        with self._lock:
            is_news = self._current.access_token != stale.access_token
            if is_news or time.time() < self._accepted_at_s + RENEW_SOON_AFTER_S:
                return self._current
            in_flight = self._renew()
        return self._wait(in_flight, deadline)

    def renew_soon(self) -> None:
        with self._lock:
            self._renew_at_s = min(self._renew_at_s, max(time.time(), self._accepted_at_s + RENEW_SOON_AFTER_S))

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _renew(self) -> Future[Grant]:
        """Start an exchange unless one is in flight; raises UnavailableError while backing off. Holds the lock."""
        if self._closed:
            raise FailedPreconditionError("the client is closed", reason="CLIENT_CLOSED")
        if self._in_flight is None:
            self._breaker.check(time.monotonic(), patience_s=self._timeout_ms / 1000)
            self._in_flight = Future()
            # A daemon: an exchange that hangs must not keep the engine's process from ending.
            threading.Thread(
                target=self._run_exchange, args=(self._in_flight,), name="saltern-token", daemon=True
            ).start()
        return self._in_flight

    def _run_exchange(self, future: Future[Grant]) -> None:
        try:
            grant = self._exchange(self._timeout_ms)
        except SalternError as error:
            failure = error
        except Exception as error:
            logger.exception("token exchange failed unexpectedly")
            failure = InternalError(f"token exchange failed: {type(error).__name__}")
        else:
            with self._lock:
                self._breaker.record_success()
                self._accept(grant)
                self._in_flight = None
            future.set_result(grant)
            return
        logger.warning("token not renewed: %s", failure.message)
        with self._lock:
            self._breaker.record_failure(time.monotonic(), failure, waited=True)
            self._in_flight = None
        future.set_exception(failure)

    def _accept(self, grant: Grant) -> None:
        lifetime_s = max(grant.expires_at_s - time.time(), 0.0)
        # Spread by up to a tenth, so that clients that started together do not renew together.
        self._accepted_at_s = time.time()
        self._renew_at_s = self._accepted_at_s + lifetime_s * RENEW_AFTER_PART * (0.9 + 0.1 * random.random())  # noqa: S311
        self._current = grant


class ApiKeyCredentials(RenewingCredentials):
    """Exchanges an API key at the control plane (``saltern.auth.v1.AuthService``).

    Args:
        control: ``host:port`` of the control plane.
        api_key: the secret as it was shown once.
        namespace: ``{namespace}`` of the key's own tenant; the token is narrowed to it.
        scope: what the salt is narrowed to, or the sharing group whose salt is used instead.
        timeout_ms: for each exchange.
        tls: whom to trust at the other end; None for plain text.

    Raises:
        UnauthenticatedError: the key is not (or no longer) valid.
        PermissionDeniedError: no such namespace for this key.
        UnavailableError: the control plane does not answer.
    """

    def __init__(
        self,
        *,
        control: str,
        api_key: str,
        namespace: str,
        scope: SaltScopeChoice = WHOLE_NAMESPACE,
        timeout_ms: int = EXCHANGE_TIMEOUT_MS,
        tls: ClientTls | None = None,
    ) -> None:
        namespace_id = parse_namespace_id(namespace)

        def exchange(exchange_timeout_ms: int) -> Grant:
            from saltern.exchange import exchange_api_key  # grpc is heavy: only who exchanges pays for its import

            return exchange_api_key(
                control, api_key, namespace_id, scope=scope, timeout_ms=exchange_timeout_ms, tls=tls
            )

        super().__init__(exchange, source=f"the control plane at {control}", timeout_ms=timeout_ms)
