"""Verifies the tokens of calls to the control plane (I1): the signature once, the credential behind it every time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace
from datetime import datetime
from typing import Final

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.auth.exchange import Credential, has_lookup, is_expired, lookup_of, require_active
from controlplane.auth.signing_keys import SigningKeys
from controlplane.caller import Caller
from controlplane.clock import Clock, ceiling_s, utc_now
from controlplane.db import Database, models, scope_of
from saltern.errors import UnauthenticatedError
from saltern.names import NodeId
from tenants.tokens import Audience, Claims, verify_token

_CACHE_MAX_TOKENS: Final = 4096


class TokenVerifier:
    """Verifies a token and the credential behind it.

    The signature check costs about 0.4 ms, so its result is cached by the token's hash until the token expires. What
    can change meanwhile is read from the database at every call: a deleted key or a suspended tenant is refused at
    once. That is one indexed read, on a service that reads the database for every call anyway.
    """

    def __init__(
        self,
        database: Database,
        keys: SigningKeys,
        clock: Clock = utc_now,
        *,
        audience: Audience = Audience.CONTROL,
    ) -> None:
        self._database = database
        self._keys = keys
        self._clock = clock
        self._audience = audience
        self._verified: OrderedDict[bytes, Claims] = OrderedDict()

    async def verify_claims(self, token: str) -> Claims:
        """What a token of the verifier's audience says: by default that of the control plane.

        Raises:
            UnauthenticatedError: the reasons of :func:`tenants.tokens.verify_token`.
            UnavailableError: its key is unknown, and the database cannot be asked for newer ones.
        """
        now_s = int(self._clock().timestamp())
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        claims = self._verified.get(digest)
        if claims is not None and now_s < claims.expires_at_s:
            return claims
        try:
            claims = verify_token(token, self._keys.ring.key_set, audience=self._audience, now_s=now_s)
        except UnauthenticatedError as error:
            # Another control plane may have begun to use a new key since this one looked.
            if error.reason != "TOKEN_UNKNOWN_KEY" or not await self._keys.refresh_if_due():
                raise
            claims = verify_token(token, self._keys.ring.key_set, audience=self._audience, now_s=now_s)
        self._verified[digest] = claims
        if len(self._verified) > _CACHE_MAX_TOKENS:
            self._verified.popitem(last=False)
        return claims

    async def check_credential(self, claims: Claims) -> Caller:
        """What a verified token hangs on must still hold: its API key, tenant and signing key, and no revocation.

        Returns:
            the caller, with the node that its API key is bound to.

        Raises:
            UnauthenticatedError: CREDENTIAL_REVOKED: the API key is gone or another one, or its tenant is.
                TOKEN_UNKNOWN_KEY: the key that signed it was withdrawn. TOKEN_REVOKED.
            FailedPreconditionError: TENANT_SUSPENDED.
            UnavailableError: the database cannot be reached.
        """
        async with self._database.transaction(scope_of(to_caller(claims))) as session:
            credential = await find_live_credential(session, claims, self._clock())
        bound = credential.key.node_id
        return replace(to_caller(claims), node=None if bound is None else NodeId(bound))


async def find_live_credential(session: AsyncSession, claims: Claims, now: datetime) -> Credential:
    """The API key that a verified token was exchanged for, with its tenant, if the token is still good for anything.

    Raises:
        UnauthenticatedError: CREDENTIAL_REVOKED, TOKEN_UNKNOWN_KEY, TOKEN_REVOKED.
        FailedPreconditionError: TENANT_SUSPENDED.
    """
    key_is_good = select(models.SigningKey.kid).where(
        models.SigningKey.kid == claims.kid,
        or_(models.SigningKey.not_after_time.is_(None), models.SigningKey.not_after_time > now),
    )
    is_revoked = select(models.TokenRevocation.uid).where(
        models.TokenRevocation.tenant_id.is_not_distinct_from(claims.tenant),
        models.TokenRevocation.token_id_prefix == claims.token_id,
        models.TokenRevocation.expire_time > now,
    )
    statement = (
        select(
            models.ApiKey,
            models.Tenant,
            key_is_good.exists().label("key_is_good"),
            is_revoked.exists().label("is_revoked"),
        )
        .outerjoin(models.Tenant, models.ApiKey.tenant_id == models.Tenant.id)
        .where(has_lookup(lookup_of(claims)))
    )
    found = (await session.execute(statement)).one_or_none()
    credential = None if found is None else Credential(found.ApiKey, found.Tenant, lookup_of(claims))
    if (
        found is None
        or credential is None
        or credential.name != claims.subject
        or credential.key.role is not claims.role
        or is_expired(credential.key, credential.lookup, now)
        or (credential.tenant is not None and claims.issued_at_s < ceiling_s(credential.tenant.min_issue_time))
    ):
        raise UnauthenticatedError(
            "the credential behind this token has been revoked",
            reason="CREDENTIAL_REVOKED",
            hint="exchange a current API key for a new token",
        )
    if not found.key_is_good:
        raise UnauthenticatedError(
            "the token is signed with a key that has been withdrawn",
            reason="TOKEN_UNKNOWN_KEY",
            hint="exchange the API key for a new token",
        )
    min_issue_time = credential.key.min_issue_time
    if found.is_revoked or (min_issue_time is not None and claims.issued_at_s < ceiling_s(min_issue_time)):
        raise UnauthenticatedError(
            "the token has been revoked", reason="TOKEN_REVOKED", hint="exchange the API key for a new token"
        )
    require_active(credential.tenant)
    return credential


def to_caller(claims: Claims) -> Caller:
    """The caller that verified claims stand for."""
    return Caller(subject=claims.subject, tenant=claims.tenant, role=claims.role)
