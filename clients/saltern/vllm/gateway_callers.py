"""Who calls the gateway: tokens and API keys, verified by the control plane and remembered for a while (I1)."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from saltern.errors import SalternError, UnauthenticatedError, UnavailableError
from saltern.exchange import exchange_api_key, exchange_token
from saltern.grant import Grant
from saltern.keys import SaltKey
from saltern.names import NamespaceId
from saltern.token_credentials import VERDICTS
from saltern.vllm.cache_salts import CacheSalt, cache_salts

if TYPE_CHECKING:
    from saltern.tls import ClientTls

CALLERS_MAX: Final = 4096
EXCHANGE_TIMEOUT_MS: Final = 5000
_THREADS: Final = 8
#: Verifications of strangers at a time, running and waiting; more are told to come back.
_IN_FLIGHT_MAX: Final = 256
#: So long the same wrong credential is refused without asking.
_REFUSED_FOR_S: Final = 5.0
#: An API key is exchanged anew when this part of its token's lifetime is left.
_RENEW_PART: Final = 0.3
_API_KEY: Final = re.compile(r"sk-saltern-[0-9a-f]{16}-[A-Za-z0-9_-]{43}", re.ASCII)
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{86}", re.ASCII)
_TOKEN_MAX_CHARS: Final = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """A verified caller. ``token``: for the engine, which verifies it again for itself."""

    cache_salt: CacheSalt
    salt_key: SaltKey = field(repr=False)
    token: str = field(repr=False)


@dataclass(slots=True)
class _Known:
    """What is known of one credential; ``refusal`` was not raised itself, so that it keeps nobody's request."""

    digest: bytes
    grant: Grant | None = None
    lifetime_s: float = 0.0
    refusal: SalternError | None = None
    checked_at_s: float = 0.0
    look: asyncio.Task[None] | None = field(default=None, repr=False)


def is_credential(text: str) -> bool:
    """Whether a text has the form of a credential of Saltern: only those are sent to the control plane."""
    return _API_KEY.fullmatch(text) is not None or (
        len(text) <= _TOKEN_MAX_CHARS and _TOKEN.fullmatch(text) is not None
    )


class Callers:
    """Verifies credentials; one for each server process, used from its event loop.

    Args:
        control: ``host:port`` of the control plane.
        namespace: what API keys are exchanged for; a token is for a namespace already. Empty: no API keys.
        check_every_s: between two looks at a credential that is used.
        tls: whom to trust at the control plane; None for plain text.
    """

    def __init__(self, control: str, *, namespace: str, check_every_s: float, tls: ClientTls | None = None) -> None:
        self._control = control
        self._namespace = namespace
        self._check_every_s = check_every_s
        self._tls = tls
        # Strangers have places and threads of their own: whoever makes up credentials takes none of those that callers
        # need who were verified before, while the control plane is away too (I9, I10).
        self._verified: OrderedDict[bytes, _Known] = OrderedDict()
        self._strangers: OrderedDict[bytes, _Known] = OrderedDict()
        self._strangers_in_flight = 0
        self._verified_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="saltern-gateway")
        self._strangers_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="saltern-stranger")

    def close(self) -> None:
        """Ask nobody any more."""
        for threads in (self._verified_threads, self._strangers_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def verify(self, credential: str) -> Caller:
        """The caller of a credential.

        While the control plane is away the last answer holds, until the token expires (I9).

        Raises:
            UnauthenticatedError, PermissionDeniedError, FailedPreconditionError: it opens nothing, or not any more.
            UnavailableError, DeadlineExceededError: it is not known yet, and the control plane cannot be asked.
        """
        if not is_credential(credential):
            raise UnauthenticatedError(
                "the credential is neither an API key nor a token of Saltern",
                reason="CREDENTIAL_MALFORMED",
                hint="send Authorization: Bearer with a token of `saltern token issue --namespace`",
            )
        known = self._find(hashlib.sha256(credential.encode()).digest())
        age_s = time.monotonic() - known.checked_at_s
        if known.refusal is not None and age_s < _REFUSED_FOR_S:
            raise known.refusal.again()
        has_expired = known.grant is not None and time.time() >= known.grant.expires_at_s
        if known.grant is None or has_expired or age_s >= self._check_every_s:
            await self._look(known, credential)
        grant = known.grant
        if grant is None or time.time() >= grant.expires_at_s:
            raise known.refusal.again() if known.refusal is not None else _expired()
        return Caller(cache_salts(grant)[-1], grant.salts[-1].key, grant.access_token)

    def _find(self, digest: bytes) -> _Known:
        for kept in (self._verified, self._strangers):
            if (known := kept.get(digest)) is not None:
                kept.move_to_end(digest)
                return known
        known = _Known(digest)
        self._keep(known)
        return known

    def _keep(self, known: _Known) -> None:
        """Keep what is known where it belongs by now, and let go of what was not used for longest there."""
        kept, other = self._verified, self._strangers
        if known.grant is None:
            kept, other = other, kept
        if other.get(known.digest) is known:
            del other[known.digest]
        kept[known.digest] = known
        while len(kept) > CALLERS_MAX:
            kept.popitem(last=False)

    async def _look(self, known: _Known, credential: str) -> None:
        """Ask the control plane, once for all who wait; raises only where nothing is known."""
        if known.look is None:
            # Who was verified is always looked at: else a flood would keep a revoked credential good.
            if known.grant is None and self._strangers_in_flight >= _IN_FLIGHT_MAX:
                raise UnavailableError(
                    f"{_IN_FLIGHT_MAX} callers are being verified already",
                    reason="TOO_MANY_CALLS",
                    hint="try again in a moment",
                    retry_after_ms=1000,
                )
            is_stranger = known.grant is None
            self._strangers_in_flight += is_stranger
            known.look = asyncio.create_task(self._ask(known, credential, is_stranger), name="saltern-verify")
            known.look.add_done_callback(_note_outcome)
        # Shielded: who hangs up takes the answer from nobody else.
        await asyncio.shield(known.look)

    async def _ask(self, known: _Known, credential: str, is_stranger: bool) -> None:
        threads = self._strangers_threads if is_stranger else self._verified_threads
        try:
            grant = await asyncio.get_running_loop().run_in_executor(
                threads, self._exchange, credential, known.grant, known.lifetime_s
            )
        except VERDICTS as error:
            known.grant, known.refusal, known.checked_at_s = None, error.again(), time.monotonic()
            self._keep(known)
        except SalternError:
            if known.grant is None or time.time() >= known.grant.expires_at_s:
                raise
            known.checked_at_s = time.monotonic()
        else:
            if known.grant is None or grant.access_token != known.grant.access_token:
                known.lifetime_s = grant.expires_at_s - time.time()
            known.grant, known.refusal, known.checked_at_s = grant, None, time.monotonic()
            self._keep(known)
        finally:
            self._strangers_in_flight -= is_stranger
            known.look = None

    def _exchange(self, credential: str, present: Grant | None, lifetime_s: float) -> Grant:
        """In a thread: what a credential is good for; of an API key the token that it has is looked at again."""
        if _API_KEY.fullmatch(credential) is None:
            return exchange_token(self._control, credential, timeout_ms=EXCHANGE_TIMEOUT_MS, tls=self._tls).grant
        if not self._namespace:
            raise UnauthenticatedError(
                "this gateway takes tokens, and no API keys",
                reason="API_KEY_NOT_ALLOWED",
                hint="issue a token with `saltern token issue --namespace`, or set SALTERN_GATEWAY_NAMESPACE",
            )
        if present is not None and present.expires_at_s - time.time() > _RENEW_PART * lifetime_s:
            try:
                token = present.access_token
                return exchange_token(self._control, token, timeout_ms=EXCHANGE_TIMEOUT_MS, tls=self._tls).grant
            except UnauthenticatedError:
                pass  # the token was revoked; whether the key was, too, is seen now
        return exchange_api_key(
            self._control, credential, NamespaceId(self._namespace), timeout_ms=EXCHANGE_TIMEOUT_MS, tls=self._tls
        )


def _note_outcome(look: asyncio.Task[None]) -> None:
    """Everybody who waited may have hung up: what came of it is no news for asyncio's own log then."""
    if not look.cancelled():
        look.exception()


def _expired() -> UnauthenticatedError:
    return UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED", hint="issue a new one")
