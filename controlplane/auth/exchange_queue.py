"""Exchanges that arrive while a transaction runs share the next one: group commit.

::

    exchange() ─┐
    exchange() ─┼─> waiting ─> one transaction: keys, tenants, tokens, audit events, commit ─> every answer
    exchange() ─┘      ^                                                                           |
                       '------------- those that arrived meanwhile are the next batch <------------'

Nobody waits for a batch to fill: an exchange that comes alone has a transaction of its own. No answer leaves before its
audit event is committed (I11). One that is refused is refused alone; if the transaction fails, each is tried by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeAlias

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import Act, record_many
from controlplane.auth.exchange import (
    Credential,
    NamespaceGrant,
    derive_grant,
    issue_token,
    narrowed_fields,
    require_active,
    verify_api_key,
)
from controlplane.auth.exchange_read import Known, Wanted, note_uses, read_known, read_live_nodes
from controlplane.auth.facts import NodeFacts
from controlplane.auth.signing_keys import KeyRing, SigningKeys
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, ServiceScope, ServiceTask
from controlplane.secrets import KeyEncryptionKey, parse_api_key
from controlplane.sharing.salts import GroupName
from saltern.errors import FailedPreconditionError, PermissionDeniedError, UnauthenticatedError
from saltern.keys import NOT_NARROWED, Narrowing
from saltern.names import NamespaceId, TenantId, namespace_name, sharing_group_name
from tenants.tokens import Audience, Claims

EXCHANGE_METHOD: Final = "saltern.auth.v1.AuthService/ExchangeApiKey"
BATCH_MAX: Final = 64
#: Of one exchange alone; the rest of its batch goes on.
REFUSALS: Final = (UnauthenticatedError, PermissionDeniedError, FailedPreconditionError)
#: What a grant depends on, within one batch: the lookup of a credential, the namespace, the narrowing, the group.
_GrantKey: TypeAlias = tuple[str, NamespaceId, Narrowing, GroupName | None]


@dataclass(frozen=True, slots=True)
class Ask:
    """One exchange as it was asked for.

    Attributes:
        namespace: for the audience node, None otherwise.
        peer: where the call came from.
        narrowing: what its salts are to be narrowed to, besides what its API key is bound to.
        group: the sharing group whose salts it is for; None for the namespace's own.
    """

    api_key: str = field(repr=False)
    audience: Audience
    namespace: NamespaceId | None
    peer: str
    narrowing: Narrowing = NOT_NARROWED
    group: GroupName | None = None


@dataclass(frozen=True, slots=True)
class Granted:
    """What an exchange gives. ``nodes``: the live ones, where the token is for nodes."""

    token: str = field(repr=False)
    claims: Claims
    credential: Credential
    grant: NamespaceGrant | None
    nodes: Sequence[NodeFacts]


@dataclass(frozen=True, slots=True)
class Denied:
    """A refusal, and whose it is as far as that is known: the credential's name and tenant."""

    error: UnauthenticatedError | PermissionDeniedError | FailedPreconditionError
    credential: Credential | None

    @property
    def tenant(self) -> TenantId | None:
        return None if self.credential is None else self.credential.tenant_id


@dataclass(slots=True)
class _Waiting:
    ask: Ask
    answer: asyncio.Future[Granted | Denied]


class ExchangeQueue:
    """Exchanges API keys for tokens, many in one transaction. How many wait is bounded by the door's places."""

    def __init__(
        self,
        database: Database,
        key_encryption_key: KeyEncryptionKey,
        keys: SigningKeys,
        *,
        token_lifetime_s: int,
        clock: Clock = utc_now,
    ) -> None:
        self._database = database
        self._key_encryption_key = key_encryption_key
        self._keys = keys
        self._token_lifetime_s = token_lifetime_s
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._running: asyncio.Task[None] | None = None

    async def exchange(self, ask: Ask) -> Granted | Denied:
        """The outcome, committed; raises what the database driver raises, and UnavailableError (NO_SIGNING_KEY)."""
        waiting = _Waiting(ask, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="exchanges")
        return await waiting.answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_MAX))]
                # Whoever has hung up is not answered, and nothing is issued for them.
                await self._answer([waiting for waiting in batch if not waiting.answer.done()])
        finally:
            self._running = None
            for waiting in self._waiting:
                waiting.answer.cancel()

    async def _answer(self, batch: list[_Waiting]) -> None:
        try:
            outcomes = await self._exchange([waiting.ask for waiting in batch])
        except Exception as error:
            if len(batch) == 1:
                if not batch[0].answer.done():
                    batch[0].answer.set_exception(error)
                return
            for waiting in batch:
                await self._answer([waiting])
            return
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(outcome)

    async def _exchange(self, asks: list[Ask]) -> list[Granted | Denied]:
        """One transaction. Its scope is every tenant: a key says whose it is only when it has been found."""
        now = self._clock()
        async with self._database.transaction(ServiceScope(ServiceTask.CREDENTIAL_LOOKUP)) as session:
            ring = await self._keys.signing(session)
            known = await read_known(session, _wanted(asks))
            nodes = await read_live_nodes(session, now) if any(ask.namespace is not None for ask in asks) else []
            # Clients of one key often come together (an engine has many processes): what they share is derived once.
            grants: dict[_GrantKey, NamespaceGrant] = {}
            outcomes = [await self._issue(session, ask, known, grants, ring=ring, nodes=nodes, now=now) for ask in asks]
            issued = [(ask, one) for ask, one in zip(asks, outcomes, strict=True) if isinstance(one, Granted)]
            used = {one.credential.lookup: one.credential for _, one in issued}
            await note_uses(session, used.values(), now)
            await record_many(session, (_act(ask, one) for ask, one in issued), now)
        return outcomes

    async def _issue(
        self,
        session: AsyncSession,
        ask: Ask,
        known: Known,
        grants: dict[_GrantKey, NamespaceGrant],
        *,
        ring: KeyRing,
        nodes: Sequence[NodeFacts],
        now: datetime,
    ) -> Granted | Denied:
        credential, grant = None, None
        try:
            credential = verify_api_key(known.credentials, ask.api_key, now)
            require_active(credential.tenant)
            if ask.namespace is not None:
                shared = (credential.lookup, ask.namespace, ask.narrowing, ask.group)
                grant = grants.get(shared)
                if grant is None:
                    grant = await derive_grant(
                        session,
                        self._key_encryption_key,
                        credential,
                        known.namespace(credential, ask.namespace),
                        asked=ask.narrowing,
                        salting=known.salting(credential),
                        group=ask.group,
                    )
                    grants[shared] = grant
        except REFUSALS as error:
            return Denied(error, credential)
        token, claims = issue_token(
            ring, credential, ask.audience, ask.namespace, now=now, lifetime_s=self._token_lifetime_s, grant=grant
        )
        return Granted(token, claims, credential, grant, nodes if ask.namespace is not None else [])


def _wanted(asks: Iterable[Ask]) -> set[Wanted]:
    wanted = set()
    for ask in asks:
        with suppress(UnauthenticatedError):  # malformed: refused when it is verified
            wanted.add((parse_api_key(ask.api_key), ask.namespace or ""))
    return wanted


def _act(ask: Ask, granted: Granted) -> Act:
    claims = granted.claims
    resource = claims.subject
    if claims.tenant is not None and ask.namespace is not None:
        resource = namespace_name(claims.tenant, ask.namespace)
    return Act(
        tenant=claims.tenant,
        actor=claims.subject,
        role=claims.role,
        peer=ask.peer,
        method=EXCHANGE_METHOD,
        resource=resource,
        after={
            "audience": ask.audience.value,
            "token_id": claims.token_id,
            "expires_at_s": claims.expires_at_s,
            **({} if ask.group is None else {"sharing_group": sharing_group_name(*ask.group)}),
            **({} if granted.grant is None else narrowed_fields(granted.grant)),
        },
    )
