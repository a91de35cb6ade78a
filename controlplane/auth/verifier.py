"""Verifies the tokens of calls to the control plane (I1): the signature once, the credential behind it every time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from sqlalchemy import select

from controlplane.auth.exchange import Credential, is_expired, lookup_of, require_active
from controlplane.caller import Caller
from controlplane.clock import Clock, ceiling_s, utc_now
from controlplane.db import Database, models, scope_of
from saltern.errors import UnauthenticatedError
from tenants.tokens import Audience, Claims, KeySet, verify_token

_CACHE_MAX_TOKENS: Final = 4096


class TokenVerifier:
    """Verifies a token and the credential behind it.

    The signature check costs about 0.4 ms, so its result is cached by the token's hash until the token expires. What
    can change meanwhile is read from the database at every call: a deleted key or a suspended tenant is refused at
    once. That is one indexed read, on a service that reads the database for every call anyway.
    """

    def __init__(self, database: Database, key_set: KeySet, clock: Clock = utc_now) -> None:
        self._database = database
        self._key_set = key_set
        self._clock = clock
        self._verified: OrderedDict[bytes, Claims] = OrderedDict()

    def verify_claims(self, token: str) -> Claims:
        """What a token of the audience control says.

        Raises:
            UnauthenticatedError: the reasons of :func:`tenants.tokens.verify_token`.
        """
        now_s = int(self._clock().timestamp())
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        claims = self._verified.get(digest)
        if claims is not None and now_s < claims.expires_at_s:
            return claims
        claims = verify_token(token, self._key_set, audience=Audience.CONTROL, now_s=now_s)
        self._verified[digest] = claims
        if len(self._verified) > _CACHE_MAX_TOKENS:
            self._verified.popitem(last=False)
        return claims

    async def check_credential(self, claims: Claims) -> None:
        """The API key that a token was exchanged for must still be there, as it was, in a tenant as it was.

        Raises:
            UnauthenticatedError: CREDENTIAL_REVOKED.
            FailedPreconditionError: TENANT_SUSPENDED.
            UnavailableError: the database cannot be reached.
        """
        statement = (
            select(models.ApiKey, models.Tenant)
            .outerjoin(models.Tenant, models.ApiKey.tenant_id == models.Tenant.id)
            .where(models.ApiKey.lookup == lookup_of(claims))
        )
        async with self._database.transaction(scope_of(to_caller(claims))) as session:
            found = (await session.execute(statement)).one_or_none()
        if (
            found is None
            or Credential(found.ApiKey, found.Tenant).name != claims.subject
            or found.ApiKey.role is not claims.role
            or is_expired(found.ApiKey, self._clock())
            or (found.Tenant is not None and claims.issued_at_s < ceiling_s(found.Tenant.min_issue_time))
        ):
            raise UnauthenticatedError(
                "the credential behind this token has been revoked",
                reason="CREDENTIAL_REVOKED",
                hint="exchange a current API key for a new token",
            )
        require_active(found.Tenant)


def to_caller(claims: Claims) -> Caller:
    """The caller that verified claims stand for."""
    return Caller(subject=claims.subject, tenant=claims.tenant, role=claims.role)
