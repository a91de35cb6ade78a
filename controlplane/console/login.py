"""Logging in: from an API key or an access token to a session."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from controlplane.console.attempts import Attempts, source_of
from controlplane.console.calls import Calls, Services
from controlplane.console.seal import new_cookie
from controlplane.console.sessions import Login, Session, Sessions
from saltern.admin.v1 import tenants_pb2
from saltern.errors import PermissionDeniedError, SalternError, UnauthenticatedError
from tenants.roles import Role

SECRET_MAX_CHARS: Final = 4096
_API_KEY_START: Final = "sk-saltern-"
#: Three parts of base64url, as RFC 7515 writes them; what is none is not even sent on.
_TOKEN_FORM: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+", re.ASCII)
#: The last second that a date can have.
_TIME_MAX: Final = 253_402_300_799


class _Claims(msgspec.Struct, frozen=True):
    """What the console reads in a token; the door has verified it, or refuses the first call with it."""

    sub: str
    tenant: str
    role: str
    exp: Annotated[int, msgspec.Meta(ge=0, le=_TIME_MAX)]


async def log_in(
    services: Services, sessions: Sessions, attempts: Attempts, *, secret: str, address: str, now: datetime
) -> Session:
    """Begin a session for whoever shows a credential.

    Args:
        secret: an API key, or an access token of the control plane (``saltern token issue``).
        address: of the browser, ``HOST:PORT``.

    Raises:
        UnauthenticatedError: it is none, or not good any more.
        PermissionDeniedError: CONSOLE_ROLE: a node's.
        FailedPreconditionError: TENANT_SUSPENDED.
        ResourceExhaustedError: TOO_MANY_LOGINS.
    """
    source = source_of(address)
    attempts.begin(source, now.timestamp())
    try:
        session = await _begin(services, sessions, secret=secret.strip(), address=address, now=now)
    except SalternError as error:
        if not isinstance(error, UnauthenticatedError | PermissionDeniedError):
            attempts.forgive(source)  # not the credential's fault
        raise
    attempts.forgive(source)
    return session


async def _begin(services: Services, sessions: Sessions, *, secret: str, address: str, now: datetime) -> Session:
    if secret.startswith(_API_KEY_START):
        answer = await services.exchange(secret, address)
        claims = _read_claims(answer.access_token)
        login = Login(claims.sub, claims.tenant, claims.role, api_key=secret)
        session = await sessions.begin(_with_pages(login), now)
        services.remember(session, answer)
        return session
    claims = _read_claims(secret)
    login = _with_pages(Login(claims.sub, claims.tenant, claims.role, token=secret))
    end = datetime.fromtimestamp(claims.exp, UTC)
    await _try_token(services, Session(new_cookie(), login, now, end), address)
    return await sessions.begin(login, now, expire_time=end)


async def _try_token(services: Services, session: Session, address: str) -> None:
    """One call that everybody whom the console has pages for may make: from then on what the token says is verified."""
    calls = Calls(services, session, address)
    if session.tenant is None:
        await calls(services.tenants.ListTenants, tenants_pb2.ListTenantsRequest(page_size=1))
    else:
        await calls(services.tenants.GetTenant, tenants_pb2.GetTenantRequest(name=f"tenants/{session.tenant}"))


def _with_pages(login: Login) -> Login:
    if login.role == Role.NODE.value:
        raise PermissionDeniedError(
            "the console has no pages for a node's credential",
            reason="CONSOLE_ROLE",
            hint="log in with a key of the role tenant-admin, tenant-auditor or platform-admin",
        )
    return login


def _read_claims(token: str) -> _Claims:
    """What a token says, unverified; raises UnauthenticatedError (CREDENTIAL_MALFORMED) for what is none."""
    try:
        if len(token) > SECRET_MAX_CHARS or _TOKEN_FORM.fullmatch(token) is None:
            raise ValueError
        segment = token.split(".")[1].encode("ascii")
        claims = msgspec.json.decode(base64.urlsafe_b64decode(segment + b"=" * (-len(segment) % 4)), type=_Claims)
        Role(claims.role)
        return claims
    except (ValueError, IndexError, msgspec.MsgspecError):
        raise UnauthenticatedError(
            "that is neither an API key nor an access token",
            reason="CREDENTIAL_MALFORMED",
            hint="paste the whole secret: sk-saltern-..., or what `saltern token issue` printed",
        ) from None
