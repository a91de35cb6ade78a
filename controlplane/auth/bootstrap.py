"""The one-time bootstrap token: how a fresh deployment gets its first administrator without a default password.

Whoever can read the state directory of the first control plane can redeem it, once, for a platform-admin API key.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import record
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, models
from controlplane.files import write_private_file
from controlplane.secrets import issue_api_key
from saltern.errors import AlreadyExistsError, UnauthenticatedError
from saltern.names import ApiKeyId, api_key_name
from tenants.roles import Role

FILE_NAME: Final = "bootstrap-token"
ACTOR: Final = "bootstrap"
REDEEM_METHOD: Final = "saltern.auth.v1.AuthService/RedeemBootstrapToken"
_PREFIX: Final = "bootstrap-saltern-"
_SHAPE: Final = re.compile(_PREFIX + r"[A-Za-z0-9_-]{43}", re.ASCII)
_SECRET_BYTES: Final = 32
_ADVISORY_LOCK_ID: Final = 0x53414C54_424F4F54


@dataclass(frozen=True, slots=True)
class FirstApiKey:
    """The platform-admin API key that a redemption makes."""

    name: str
    secret: str = field(repr=False)


async def ensure_bootstrap(database: Database, state_dir: Path, clock: Clock = utc_now) -> bool:
    """On a fresh database make the token and leave it in ``state_dir/bootstrap-token`` (0600); else do nothing.

    Returns:
        Whether the token has been made now.
    """
    async with database.transaction() as session:
        # Of two control planes that start on a fresh database, one makes the token and the other finds it made.
        await session.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK_ID)))
        if (await session.execute(select(models.Bootstrap.id))).first() is not None:
            return False
        token = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        session.add(models.Bootstrap(id=1, token_sha256=_sha256(token), create_time=clock(), redeemed_time=None))
        await session.flush()
        # Before the commit: a crash in between leaves a file without meaning, which the next start replaces. The other
        # order could leave a deployment that nobody can enter.
        write_private_file(state_dir / FILE_NAME, token + "\n")
        return True


async def redeem(session: AsyncSession, token: str, api_key_id: ApiKeyId, now: datetime) -> FirstApiKey:
    """Redeem the token for a platform-admin API key, in the caller's transaction. Exactly one of many succeeds.

    Raises:
        UnauthenticatedError: BOOTSTRAP_TOKEN_INVALID: wrong or redeemed already; one answer for both.
        AlreadyExistsError: there is a platform key of that id; the token stays good.
    """
    redeemed = None
    if isinstance(token, str) and _SHAPE.fullmatch(token):
        # The row lock of the update decides who is first; the others then see redeemed_time set and match no row.
        statement = (
            update(models.Bootstrap)
            .where(models.Bootstrap.token_sha256 == _sha256(token), models.Bootstrap.redeemed_time.is_(None))
            .values(redeemed_time=now)
            .returning(models.Bootstrap.id)
        )
        redeemed = (await session.execute(statement)).one_or_none()
    if redeemed is None:
        raise UnauthenticatedError(
            "the bootstrap token is not valid",
            reason="BOOTSTRAP_TOKEN_INVALID",
            hint=f"it works once; it lies in the file {FILE_NAME} of the state directory until then",
        )
    name = api_key_name(None, api_key_id)
    taken = select(models.ApiKey.uid).where(models.ApiKey.tenant_id.is_(None), models.ApiKey.id == api_key_id)
    if (await session.execute(taken)).first() is not None:
        raise AlreadyExistsError(f"{name} exists already", hint="choose another api_key_id")
    issued = issue_api_key()
    session.add(
        models.ApiKey(
            tenant_id=None,
            id=api_key_id,
            lookup=issued.lookup,
            secret_sha256=issued.secret_sha256,
            role=Role.PLATFORM_ADMIN,
            display_name="first administrator",
            created_by=ACTOR,
            create_time=now,
            expire_time=None,
            last_used_time=None,
        )
    )
    await session.flush()
    await record(
        session,
        tenant=None,
        actor=ACTOR,
        method=REDEEM_METHOD,
        resource=name,
        now=now,
        after={"name": name, "role": Role.PLATFORM_ADMIN.value},
    )
    return FirstApiKey(name, issued.secret)


def _sha256(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
