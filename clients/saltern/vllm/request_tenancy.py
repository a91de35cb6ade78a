"""Many tenants on one engine: whose cache a request uses says the token that it carries (I1).

``kv_transfer_params["saltern_token"]`` holds a tenant's token for nodes, sealed by the gateway
(:mod:`saltern.vllm.token_seal`). The control plane is asked what it opens; the request's ``cache_salt`` must be the one
that follows from those salt keys, or a caller could find in vLLM's own cache what is another's. Whatever is not as it
should be is a request without remote cache (I10).

::

    ticket_for   scheduler    opens the seal, starts the verification in the background, never waits
    client       other threads  waits for it, ``wait_ms`` at most; then it is a miss, and the next request finds it done

A token is looked at again every ``check_every_s`` while it is used, so that a revocation is felt; while the control
plane is away the last answer holds until the token expires (I9). Tokens that open the same (tenant, namespace, salts,
role) share one client, so a thousand tokens of a tenant cost no thousand connections. Everything is bounded.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeAlias

from saltern.client import Client
from saltern.deadline import Deadline
from saltern.errors import InternalError, SalternError, UnauthenticatedError
from saltern.grant import Grant
from saltern.token_credentials import CHECK_EVERY_S, VERDICTS
from saltern.vllm.cache_salts import CacheSalt, cache_salts
from saltern.vllm.tenancy import Ticket
from saltern.vllm.token_seal import SEALED_MAX_CHARS, TOKEN_FIELD, TokenSeal, is_sealed

if TYPE_CHECKING:
    from saltern.exchange import TokenGrant

logger = logging.getLogger(__name__)

TOKENS_MAX: Final = 4096
CLIENTS_MAX: Final = 64
WAIT_MS: Final = 80.0
#: Verifications that run and that wait for a thread; more tokens than that at a time have no remote cache.
_THREADS: Final = 4
_IN_FLIGHT_MAX: Final = 256

#: Tenant, namespace, sharing group, salts and role: tokens that agree in all of them share a client.
_Identity: TypeAlias = tuple[str, str, str, tuple[CacheSalt, ...], bool]
_Digest: TypeAlias = bytes


class HandedCredentials:
    """The credentials of one client: the token that was verified last, of several that open the same. Thread-safe."""

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self._rejected_token = ""

    def __repr__(self) -> str:
        return f"HandedCredentials({self._grant!r})"

    def hand(self, grant: Grant) -> None:
        """Go on with this grant: it was just verified, whatever a node has said of its token before."""
        self._grant, self._rejected_token = grant, ""

    def offer(self, grant: Grant) -> None:
        """Go on with this grant where the present one is of no use any more and this one is."""
        if not self._is_usable(self._grant) and self._is_usable(grant):
            self._grant = grant

    def _is_usable(self, grant: Grant) -> bool:
        return time.time() < grant.expires_at_s and grant.access_token != self._rejected_token

    def grant(self, deadline: Deadline) -> Grant:
        grant = self._grant
        if not self._is_usable(grant):
            raise UnauthenticatedError(
                "the token that was handed over has expired or was refused", reason="TOKEN_EXPIRED", hint="send a newer"
            )
        return grant

    def reject(self, access_token: str) -> None:
        self._rejected_token = access_token

    def renewed(self, stale: Grant, deadline: Deadline) -> Grant:
        return self.grant(deadline)

    def renew_soon(self) -> None:
        """Grants come with the requests."""

    def after_fork(self) -> None:
        """No threads and no locks."""

    def close(self) -> None:
        """Nothing to stop."""


class _Shared:
    """A client with its credentials."""

    __slots__ = ("client", "credentials")

    def __init__(self, client: Client, credentials: HandedCredentials) -> None:
        self.client = client
        self.credentials = credentials


class _Entry:
    """What is known of one token. Changed under the tenancy's lock."""

    __slots__ = ("checked_at_s", "grant", "identity", "is_in_flight", "salts", "settled")

    def __init__(self) -> None:
        self.settled = threading.Event()
        self.grant: Grant | None = None
        self.identity: _Identity | None = None
        self.salts: frozenset[CacheSalt] = frozenset()
        self.is_in_flight = False
        self.checked_at_s = float("-inf")


class RequestTenancy:
    """Tickets and clients by the tokens of requests; see the module.

    Args:
        exchange: what a token is good for; raises SalternError. Called in threads of its own.
        open_client: makes a client of credentials, without waiting for a node.
        seal: of the gateway's tokens; None where there is no gateway of ours.
        accept_plain: whether tokens count that are not sealed: a gateway of another kind puts them there, and vLLM may
            log them.
        check_every_s: between two looks at a token that is used.
        wait_ms: how long ``client`` waits for a first look.
        tokens_max, clients_max: kept at a time; those that were not used for longest go.
    """

    def __init__(
        self,
        exchange: Callable[[str], TokenGrant],
        open_client: Callable[[HandedCredentials], Client],
        *,
        seal: TokenSeal | None,
        accept_plain: bool = False,
        check_every_s: float = CHECK_EVERY_S,
        wait_ms: float = WAIT_MS,
        tokens_max: int = TOKENS_MAX,
        clients_max: int = CLIENTS_MAX,
    ) -> None:
        self._exchange = exchange
        self._open_client = open_client
        self._seal = seal
        self._accept_plain = accept_plain
        self._check_every_s = check_every_s
        self._wait_s = wait_ms / 1000
        self._tokens_max = tokens_max
        self._clients_max = clients_max
        self._lock = threading.Lock()
        self._closed = False
        self._in_flight = 0
        self._entries: OrderedDict[_Digest, _Entry] = OrderedDict()
        self._shared: OrderedDict[_Identity, _Shared] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="saltern-token")
        self._last_reason = ""

    def __repr__(self) -> str:
        return f"RequestTenancy({len(self._entries)} tokens, {len(self._shared)} clients)"

    def ticket_for(self, cache_salt: str | None, kv_transfer_params: Mapping[str, object] | None) -> Ticket | None:
        """The ticket of a request; its verification may be on its way still, which ``client`` waits for."""
        if not cache_salt or not isinstance(kv_transfer_params, Mapping):
            return None
        given = kv_transfer_params.get(TOKEN_FIELD)
        if not isinstance(given, str) or not 0 < len(given) <= SEALED_MAX_CHARS:
            return None
        try:
            token = self._unsealed(given, cache_salt)
        except SalternError as error:
            self._note(error)
            return None
        entry = self._look(token)
        if entry is None or (entry.settled.is_set() and not self._fits(entry, cache_salt)):
            return None
        return Ticket(connection=cache_salt, secret=token)

    def client(self, ticket: Ticket) -> Client | None:
        entry = self._look(ticket.secret)
        if entry is None:
            return None
        if not entry.settled.wait(self._wait_s) or not self._fits(entry, ticket.connection):
            return None
        with self._lock:
            if self._closed or entry.identity is None or entry.grant is None:
                return None
            shared = self._shared.get(entry.identity)
            if shared is None:
                entry.checked_at_s = float("-inf")  # its client had to make room: the next look opens another
                return None
            self._shared.move_to_end(entry.identity)
            shared.credentials.offer(entry.grant)
            return shared.client

    def close(self) -> None:
        with self._lock:
            self._closed = True
            clients = [shared.client for shared in self._shared.values()]
            self._shared.clear()
            self._entries.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in clients:
            client.close()

    def _unsealed(self, given: str, cache_salt: str) -> str:
        if self._seal is not None and is_sealed(given):
            return self._seal.open(given, cache_salt)
        if self._accept_plain and not is_sealed(given):
            return given
        raise UnauthenticatedError(
            "the request's token is not sealed, or there is no key to open it with",
            reason="TOKEN_NOT_SEALED",
            hint="let the requests come through the gateway, or set the option plain_tokens",
        )

    @staticmethod
    def _fits(entry: _Entry, cache_salt: str) -> bool:
        """Whether a verified token is good for requests of this salt, now."""
        grant = entry.grant
        return grant is not None and time.time() < grant.expires_at_s and cache_salt in entry.salts

    def _look(self, token: str) -> _Entry | None:
        """The entry of a token, with a look at the control plane on its way if one is due; None if too many are."""
        digest = hashlib.sha256(token.encode()).digest()
        with self._lock:
            if self._closed:
                return None
            entry = self._entries.get(digest)
            if entry is None:
                if self._in_flight >= _IN_FLIGHT_MAX:
                    return None
                entry = self._entries[digest] = _Entry()
                if len(self._entries) > self._tokens_max:
                    self._entries.popitem(last=False)
            else:
                self._entries.move_to_end(digest)
            age_s = time.monotonic() - entry.checked_at_s
            if age_s < self._check_every_s or entry.is_in_flight or self._in_flight >= _IN_FLIGHT_MAX:
                return entry
            entry.is_in_flight = True
            self._in_flight += 1
            if age_s > 2 * self._check_every_s:
                entry.settled.clear()  # not used for long: wait for the news, as for a first look
            self._threads.submit(self._verify, entry, token)
        return entry

    def _verify(self, entry: _Entry, token: str) -> None:
        found: TokenGrant | None = None
        failure: SalternError | None = None
        try:
            found = self._exchange(token)
        except SalternError as error:
            failure = error
        except Exception as error:
            logger.exception("cannot verify the token of a request")
            failure = InternalError(f"cannot verify a token: {type(error).__name__}")
        if found is not None:
            self._accept(entry, found)
        with self._lock:
            self._in_flight -= 1
            entry.is_in_flight = False
            entry.checked_at_s = time.monotonic()
            if isinstance(failure, VERDICTS):
                entry.grant = None
            elif failure is not None and entry.grant is None:
                # Nobody could be asked: the next request asks again, in a second at the earliest.
                entry.checked_at_s -= self._check_every_s - min(1.0, self._check_every_s)
            entry.settled.set()
        if failure is not None:
            self._note(failure)

    def _accept(self, entry: _Entry, found: TokenGrant) -> None:
        grant = found.grant
        salts = cache_salts(grant)
        identity = (grant.tenant, grant.namespace, grant.sharing_group_uid, salts, found.can_write)
        evicted: _Shared | None = None
        with self._lock:
            if self._closed:
                return
            shared = self._shared.get(identity)
            if shared is None:
                credentials = HandedCredentials(grant)
                shared = self._shared[identity] = _Shared(self._open_client(credentials), credentials)
                if len(self._shared) > self._clients_max:
                    _, evicted = self._shared.popitem(last=False)
            shared.credentials.hand(grant)
            entry.grant, entry.identity, entry.salts = grant, identity, frozenset(salts)
        if evicted is not None:
            evicted.client.close()  # calls in progress end with a miss

    def _note(self, error: SalternError) -> None:
        # One line for each change of the reason: strangers must not fill the engine's log.
        if error.reason != self._last_reason:
            self._last_reason = error.reason
            logger.warning("a request has no remote cache: %s", error)
