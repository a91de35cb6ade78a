"""Exchange of a token for what it is good for: salt keys and nodes, for whoever was handed it instead of an API key.

An inference server that serves many tenants holds no API key of theirs. It is handed a short-lived token with each
request, and asks here what that opens. In the spirit of RFC 8693, with one difference: no new token comes of it, so
whatever is given ends with the token that was handed over.

Never wider than what came with the token (I2): its own claims narrow, then the request, then the binding of its API key
and the salt policy. The token is verified as strictly as at a node, and what it hangs on is read each time: its API
key, tenant, signing key and revocations. So an answer is also the news that the token still holds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import Act, DenialLog, record_many
from controlplane.audit.denials import ANONYMOUS
from controlplane.auth.exchange import NamespaceGrant, find_salting, grant_namespace, narrowed_fields
from controlplane.auth.signing_keys import SigningKeys
from controlplane.auth.verifier import TokenVerifier, find_live_credential
from controlplane.caller import not_available
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, ServiceScope, ServiceTask, TenantScope, models
from controlplane.node.registry import live_nodes
from controlplane.rpc import RETRY_AFTER_MS
from controlplane.secrets import KeyEncryptionKey
from controlplane.sharing.salts import GroupName
from saltern.errors import (
    FailedPreconditionError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from saltern.keys import Narrowing
from saltern.names import NamespaceId, SharingGroupId, TenantId, namespace_name
from tenants.salts import narrow_further
from tenants.tokens import Audience, Claims

EXCHANGE_TOKEN_METHOD: Final = "saltern.auth.v1.AuthService/ExchangeToken"  # noqa: S105 (no password)
#: Transactions at a time: connections to the database are few, and exchanges of API keys use one for many.
_TRANSACTIONS_MAX: Final = 4
#: Of one tenant at a time: the other places of the door are for everybody else's exchanges (I2).
TENANT_EXCHANGES_MAX: Final = 32
_REFUSALS: Final = (UnauthenticatedError, PermissionDeniedError, FailedPreconditionError)


@dataclass(frozen=True, slots=True)
class TokenAsk:
    """One exchange as it was asked for; ``narrowing``: of the salts, besides what the token is narrowed to."""

    token: str = field(repr=False)
    narrowing: Narrowing
    peer: str


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """What a token is good for. ``nodes``: the live ones."""

    claims: Claims
    grant: NamespaceGrant
    nodes: list[models.Node]


class TokenExchange:
    """Answers exchanges of tokens. How many wait is bounded by the door's places for AuthService."""

    def __init__(
        self,
        database: Database,
        key_encryption_key: KeyEncryptionKey,
        keys: SigningKeys,
        denials: DenialLog,
        *,
        clock: Clock = utc_now,
    ) -> None:
        self._database = database
        self._key_encryption_key = key_encryption_key
        self._denials = denials
        self._clock = clock
        self._verifier = TokenVerifier(database, keys, clock, audience=Audience.NODE)
        self._transactions = asyncio.Semaphore(_TRANSACTIONS_MAX)
        self._by_tenant: Counter[TenantId] = Counter()

    async def exchange(self, ask: TokenAsk) -> TokenGrant:
        """The grant, with its audit event committed (I11); a refusal is in the trail too.

        Raises:
            UnauthenticatedError: the token does not verify, has expired or was revoked, or its API key was.
            PermissionDeniedError: OUTSIDE_TOKEN, OUTSIDE_KEY_BINDING, ROLE_REQUIRED, RESOURCE_NOT_AVAILABLE.
            FailedPreconditionError: TENANT_SUSPENDED, SALT_SCOPE_REQUIRED, SALT_SCOPE_TOO_NARROW.
            ResourceExhaustedError: TOO_MANY_CALLS: so many of the tenant are in progress.
            UnavailableError: the database cannot be reached.
        """
        claims: Claims | None = None
        try:
            claims = await self._verifier.verify_claims(ask.token)
            with self._place(_owner(claims)[0]):
                async with self._transactions:
                    return await self._grant(claims, ask)
        except _REFUSALS as error:
            # Outside of the transaction: an attempt belongs to the trail although nothing came of it.
            await self._denials.record_denied(
                error,
                method=EXCHANGE_TOKEN_METHOD,
                resource=namespace_name(*_owner(claims)) if claims else "",
                tenant=claims.tenant if claims else None,
                actor=claims.subject if claims else ANONYMOUS,
                role=claims.role if claims else None,
            )
            raise

    @contextmanager
    def _place(self, tenant: TenantId) -> Iterator[None]:
        """A place among the exchanges of a tenant, for the time of the block."""
        if self._by_tenant[tenant] >= TENANT_EXCHANGES_MAX:
            raise ResourceExhaustedError(
                f"{TENANT_EXCHANGES_MAX} exchanges of the tenant's tokens are in progress already",
                reason="TOO_MANY_CALLS",
                hint="remember what a token is good for, and wait for answers before asking again",
                retry_after_ms=RETRY_AFTER_MS,
                metadata={"limit_calls": str(TENANT_EXCHANGES_MAX)},
            )
        self._by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

    async def _grant(self, claims: Claims, ask: TokenAsk) -> TokenGrant:
        now = self._clock()
        tenant, namespace = _owner(claims)
        scope = ServiceScope(ServiceTask.GROUP_TOKEN_EXCHANGE) if claims.group_uid else TenantScope(tenant)
        async with self._database.transaction(scope) as session:
            credential = await find_live_credential(session, claims, now)
            grant = await grant_namespace(
                session,
                self._key_encryption_key,
                credential,
                namespace,
                asked=narrow_further(claims.narrowing, ask.narrowing),
                saltings=await find_salting(session, [tenant]),
                group=await _group_of(session, claims),
            )
            nodes = await live_nodes(session, now)
            await record_many(session, [_act(claims, grant, ask)], now)
        return TokenGrant(claims, grant, nodes)


async def _group_of(session: AsyncSession, claims: Claims) -> GroupName | None:
    """The sharing group of the token's salts, by the name that it has; whether it is still the tenant's is seen later.

    Raises:
        PermissionDeniedError: RESOURCE_NOT_AVAILABLE: it is gone; one made anew under its name is another.
    """
    if not claims.group_uid:
        return None
    group = await session.scalar(select(models.SharingGroup).where(models.SharingGroup.uid == claims.group_uid))
    if group is None:
        raise not_available()
    return TenantId(group.tenant_id), SharingGroupId(group.id)


def _owner(claims: Claims) -> tuple[TenantId, NamespaceId]:
    assert claims.tenant is not None and claims.namespace is not None, "verify_token demands both of a node token"
    return claims.tenant, claims.namespace


def _act(claims: Claims, grant: NamespaceGrant, ask: TokenAsk) -> Act:
    return Act(
        tenant=claims.tenant,
        actor=claims.subject,
        role=claims.role,
        peer=ask.peer,
        method=EXCHANGE_TOKEN_METHOD,
        resource=namespace_name(*_owner(claims)),
        after={
            "token_id": claims.token_id,
            "expires_at_s": claims.expires_at_s,
            **({"sharing_group_uid": grant.group_uid} if grant.group_uid else {}),
            **narrowed_fields(grant),
        },
    )
