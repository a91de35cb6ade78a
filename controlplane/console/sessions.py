"""Sessions: who is logged in. They lie in the database, so that every replica knows them and one word ends them.

A session ends at the first of: eight hours; a quarter of an hour without a page; logging out; the end of its
credential, because its tokens come from the ordinary exchange, which refuses a key that was revoked; the end of its
tenant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import delete, func, select, update

from controlplane.console.seal import Cookie, cookie_sha256, form_token, new_cookie, seal, unseal
from controlplane.db import Database, ServiceScope, ServiceTask
from controlplane.db.models import ConsoleSession
from saltern.errors import SalternError
from saltern.names import TenantId
from tenants.roles import Role

LIFETIME_MAX: Final = timedelta(hours=8)
IDLE_MAX: Final = timedelta(minutes=15)
#: Of one credential at a time; one more ends the one that was used least lately.
SESSIONS_PER_SUBJECT_MAX: Final = 32
#: How exactly the time of the last page is kept: each time is a write.
_USE_RESOLUTION: Final = timedelta(seconds=30)
_PURGE_ROWS: Final = 100


class Login(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whom a session acts for, and with what.

    Attributes:
        subject: resource name of the API key.
        tenant: empty for a credential of the platform.
        role: as in :class:`tenants.roles.Role`.
        api_key: its secret, where somebody logged in with one.
        token: an access token instead of it, which ends when it ends.
    """

    subject: str
    tenant: str
    role: str
    api_key: str = ""
    token: str = ""

    def __repr__(self) -> str:
        return f"Login({self.subject}, {self.role})"


@dataclass(frozen=True, slots=True)
class Session:
    """A session that somebody has shown the cookie of."""

    cookie: Cookie = field(repr=False)
    login: Login
    create_time: datetime
    expire_time: datetime

    @property
    def tenant(self) -> TenantId | None:
        """The tenant of the credential; None for one of the platform."""
        return TenantId(self.login.tenant) if self.login.tenant else None

    @property
    def role(self) -> Role:
        return Role(self.login.role)

    @property
    def key(self) -> bytes:
        """Tells sessions apart, and opens none."""
        return cookie_sha256(self.cookie)

    @property
    def form_token(self) -> str:
        return form_token(self.cookie)


class Sessions:
    """The sessions in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, login: Login, now: datetime, *, expire_time: datetime | None = None) -> Session:
        """Begin a session under a cookie that nobody has seen before.

        Args:
            expire_time: an end before that of every session, of a token.
        """
        cookie = new_cookie()
        end = min(now + LIFETIME_MAX, expire_time or now + LIFETIME_MAX)
        row = ConsoleSession(
            cookie_sha256=cookie_sha256(cookie),
            tenant_id=login.tenant or None,
            subject=login.subject,
            sealed=seal(cookie, msgspec.msgpack.encode(login)),
            create_time=now,
            use_time=now,
            expire_time=end,
        )
        ended = select(ConsoleSession.cookie_sha256).where(ConsoleSession.expire_time <= now).limit(_PURGE_ROWS)
        others = (
            select(ConsoleSession.cookie_sha256)
            .where(ConsoleSession.subject == login.subject)
            .order_by(ConsoleSession.use_time.desc())
            .offset(SESSIONS_PER_SUBJECT_MAX - 1)
        )
        async with self._database.transaction(_scope()) as session:
            for surplus in (ended, others):
                await session.execute(delete(ConsoleSession).where(ConsoleSession.cookie_sha256.in_(surplus)))
            session.add(row)
        return Session(cookie, login, now, end)

    async def find(self, cookie: Cookie, now: datetime, *, is_use: bool = True) -> Session | None:
        """The session of ``cookie``; None where there is none (any more).

        Args:
            is_use: somebody asked for a page; what a page asks for by itself keeps no session alive.
        """
        key = cookie_sha256(cookie)
        async with self._database.transaction(_scope()) as session:
            row = await session.get(ConsoleSession, key)
            if row is None:
                return None
            if row.expire_time <= now or row.use_time + IDLE_MAX <= now:
                await session.delete(row)
                return None
            if is_use and row.use_time + _USE_RESOLUTION <= now:
                await session.execute(
                    update(ConsoleSession).where(ConsoleSession.cookie_sha256 == key).values(use_time=now)
                )
        try:
            login = msgspec.msgpack.decode(unseal(cookie, row.sealed), type=Login)
        except (SalternError, msgspec.DecodeError):
            return None  # of another release, or damaged: logging in mends it
        return Session(cookie, login, row.create_time, row.expire_time)

    async def count(self, now: datetime) -> int:
        """How many have not ended."""
        is_live = (ConsoleSession.expire_time > now) & (ConsoleSession.use_time > now - IDLE_MAX)
        async with self._database.transaction(_scope()) as session:
            counted = await session.scalar(select(func.count()).select_from(ConsoleSession).where(is_live))
        return counted or 0

    async def end(self, cookie: Cookie) -> None:
        """End a session on every replica; nothing where it has ended."""
        async with self._database.transaction(_scope()) as session:
            await session.execute(delete(ConsoleSession).where(ConsoleSession.cookie_sha256 == cookie_sha256(cookie)))


def _scope() -> ServiceScope:
    return ServiceScope(ServiceTask.CONSOLE_SESSION)
