"""Whose cache a request of an engine uses: the seam between the connector and who is trusted (I1).

The scheduler asks for a request's :class:`Ticket`, sends it along to the workers, and each side turns it into a client
for itself. No ticket is no remote cache for that request (I10: fail closed on trust), no client is a miss.

==========  =============================================================================================
mode        whose
==========  =============================================================================================
instance    one tenant for the whole engine: the API key of the engine's own configuration (here)
request     the tenant whose token the request carries (:mod:`saltern.vllm.request_tenancy`)
==========  =============================================================================================
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from saltern.errors import InternalError, SalternError

if TYPE_CHECKING:
    from saltern.client import Client

logger = logging.getLogger(__name__)

#: Between attempts to open a client that could not be opened, in seconds: doubled up to the second.
_RETRY_FIRST_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0


class Ticket(msgspec.Struct, frozen=True):
    """Names the connection that serves a request; goes from the scheduler to the workers.

    Attributes:
        connection: tells connections apart; equal tickets share a client. May be logged.
        secret: what a worker needs to open that connection itself, or empty. In no repr, log or error.
    """

    connection: str
    secret: str = ""

    def __repr__(self) -> str:
        return f"Ticket({self.connection!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Tracebacks of rich show local variables: hide the secret there too."""
        return [("connection", self.connection)]


class Tenancy(Protocol):
    """Decides whose cache each request uses. Thread-safe; one object in the scheduler and one in each worker."""

    def ticket_for(self, cache_salt: str | None, kv_transfer_params: Mapping[str, object] | None) -> Ticket | None:
        """The ticket of a request, or None for no remote cache. On the scheduler; never blocks long, never raises.

        Args:
            cache_salt: of the request. It is part of vLLM's block hashes already.
            kv_transfer_params: of the request, as its caller wrote it: nothing here is trusted.
        """

    def client(self, ticket: Ticket) -> Client | None:
        """The client of a ticket, on either side; None where there is none now, which is a miss. Never raises."""

    def close(self) -> None:
        """Close all clients."""


class OpeningClient:
    """A client that is opened in the background, and again until it succeeds: an engine waits for no control plane.

    Args:
        open_client: makes the client; raises SalternError. Called in a thread of its own.
        what: names the connection in log lines.
    """

    def __init__(self, open_client: Callable[[], Client], what: str) -> None:
        self._open_client = open_client
        self._what = what
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._client: Client | None = None
        self._error: SalternError | None = None
        self._thread = threading.Thread(target=self._keep_trying, name="saltern-open", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "open" if self._client is not None else "failed" if self._error is not None else "opening"
        return f"OpeningClient({self._what}, {state})"

    @property
    def error(self) -> SalternError | None:
        """Why the last attempt failed; None while there was none or the client is open."""
        return self._error

    def get(self) -> Client | None:
        """The client, or None while it could not be opened."""
        return self._client

    def wait(self, timeout_s: float) -> Client | None:
        """The client once the first attempt is over, whatever came of it; None also when ``timeout_s`` is."""
        self._settled.wait(timeout_s)
        return self._client

    def close(self) -> None:
        """Stop trying and close the client; an attempt in flight ends by itself and closes what it opened."""
        with self._lock:
            self._closing.set()
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _keep_trying(self) -> None:
        backoff_s = _RETRY_FIRST_S
        while not self._closing.is_set():
            started_s = time.monotonic()
            try:
                client = self._open_client()
            except SalternError as error:
                self._failed(error)
            except Exception as error:
                logger.exception("cannot open %s", self._what)
                self._failed(InternalError(f"cannot open {self._what}: {type(error).__name__}"))
            else:
                self._opened(client, started_s)
                return
            self._closing.wait(backoff_s)
            backoff_s = min(2 * backoff_s, _RETRY_MAX_S)

    def _opened(self, client: Client, started_s: float) -> None:
        with self._lock:
            is_wanted = not self._closing.is_set()
            if is_wanted:
                self._client, self._error = client, None
        if not is_wanted:
            client.close()
        logger.info("%s is open after %.0f ms", self._what, (time.monotonic() - started_s) * 1000)
        self._settled.set()

    def _failed(self, error: SalternError) -> None:
        # One line for each new reason: a control plane that stays away does not fill the engine's log.
        if self._error is None or self._error.reason != error.reason:
            logger.warning("no remote cache for now: cannot open %s: %s", self._what, error)
        self._error = error
        self._settled.set()


class InstanceTenancy:
    """One tenant for the whole engine.

    Args:
        open_client: makes the client of the engine's own credentials; raises SalternError.
        what: names the connection in log lines, such as ``namespace 'llama' at 127.0.0.1:7700``.
        require_cache_salt: a request without a ``cache_salt`` gets no remote cache.
        wait_s: how long the constructor waits for the client to open.
    """

    def __init__(
        self, open_client: Callable[[], Client], *, what: str, require_cache_salt: bool = False, wait_s: float = 0.0
    ) -> None:
        self.ticket = Ticket(connection="instance")
        self._require_cache_salt = require_cache_salt
        self._opening = OpeningClient(open_client, what)
        self._opening.wait(wait_s)

    def __repr__(self) -> str:
        return f"InstanceTenancy({self._opening!r})"

    @property
    def error(self) -> SalternError | None:
        """Why there is no client, as far as known."""
        return self._opening.error

    def ticket_for(self, cache_salt: str | None, kv_transfer_params: Mapping[str, object] | None) -> Ticket | None:
        return None if self._require_cache_salt and not cache_salt else self.ticket

    def client(self, ticket: Ticket) -> Client | None:
        return self._opening.get() if ticket == self.ticket else None

    def close(self) -> None:
        self._opening.close()
