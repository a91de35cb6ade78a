"""The keys that sign tokens: kept in the database, the private halves wrapped under the key-encryption key.

All control planes on one database share them: a token that one has issued, every other verifies. What each process
holds in memory is a copy; which key signs is read in the transaction that issues a token, so that no replica goes on
with an old one. When a key does what: :mod:`controlplane.core.key_rotation`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock, utc_now
from controlplane.core.key_rotation import KeyLife, KeyState
from controlplane.db import Database, models
from controlplane.db.locks import lock_signing_keys
from controlplane.db.session import driver_of
from controlplane.secrets import KeyEncryptionKey, signing_key_context
from saltern.errors import UnavailableError
from saltern.keys import frame
from tenants.tokens import KeySet, public_key_from_x, public_key_to_x

#: A caller with a made-up ``kid`` makes the keys be read again at most so often.
REFRESH_INTERVAL_S: Final = 1.0
_KID_BYTES: Final = 8
_ISSUER_LABEL: Final = "saltern/issuer/1"
_ISSUER_BYTES: Final = 8
_SIGNS_NOW: Final = "SELECT 1 FROM signing_keys WHERE kid = %s AND sign_time IS NOT NULL AND retire_time IS NULL"


@dataclass(frozen=True, slots=True)
class KeyRing:
    """What signs and what verifies tokens.

    Attributes:
        kid: names ``private_key`` in a token's header.
        key_set: the public keys that tokens may be signed with now, and the issuer.
    """

    kid: str
    private_key: Ed25519PrivateKey = field(repr=False)
    key_set: KeySet


class SigningKeys:
    """The deployment's keys as this process knows them.

    Attributes:
        ring: the copy read last.
    """

    def __init__(
        self, database: Database, key_encryption_key: KeyEncryptionKey, ring: KeyRing, clock: Clock = utc_now
    ) -> None:
        self.ring = ring
        self._database = database
        self._key_encryption_key = key_encryption_key
        self._clock = clock
        self._refreshed_s = monotonic()

    async def refresh(self) -> KeyRing:
        """Read the keys again; raises what the database driver raises."""
        self._refreshed_s = monotonic()
        async with self._database.transaction() as session:
            return await self._read(session)

    async def refresh_if_due(self) -> bool:
        """Read the keys again unless that was done a moment ago; whether it was done now."""
        if monotonic() - self._refreshed_s < REFRESH_INTERVAL_S:
            return False
        await self.refresh()
        return True

    async def signing(self, session: AsyncSession) -> KeyRing:
        """The ring whose key signs now, as the caller's transaction sees it.

        Raises:
            UnavailableError: NO_SIGNING_KEY: between two keys; it lasts for moments.
        """
        cursor = await (await driver_of(session)).execute(_SIGNS_NOW, (self.ring.kid,))
        return self.ring if await cursor.fetchone() else await self._read(session)

    async def _read(self, session: AsyncSession) -> KeyRing:
        rows = await load_rows(session, self._clock())
        if not rows or rows[0].wrapped_private_key is None:
            raise UnavailableError(
                "no key signs tokens at the moment", reason="NO_SIGNING_KEY", hint="try again", retry_after_ms=1000
            )
        private_key = self.ring.private_key
        if rows[0].kid != self.ring.kid:
            private_key = await unwrap(self._key_encryption_key, rows[0])
        issuer = self.ring.key_set.issuer
        self.ring = KeyRing(rows[0].kid, private_key, to_key_set(issuer, rows))
        return self.ring


async def load_key_ring(database: Database, key_encryption_key: KeyEncryptionKey, clock: Clock = utc_now) -> KeyRing:
    """Load the signing keys of the deployment; on a fresh database make the first one.

    Raises:
        FailedPreconditionError: the key-encryption key is not the one of this database.
        DataLossError: a stored key is damaged.
        UnavailableError: the database cannot be reached.
    """
    async with database.transaction() as session:
        # Of two control planes that start on a fresh database, one makes the key and the other waits and reads it.
        await lock_signing_keys(session)
        now = clock()
        rows = await load_rows(session, now)
        if not rows or rows[0].wrapped_private_key is None:
            await create(session, key_encryption_key, now, publish_version=0, sign_now=True)
            rows = await load_rows(session, now)
        issuer = await load_issuer(session)
    return KeyRing(rows[0].kid, await unwrap(key_encryption_key, rows[0]), to_key_set(issuer, rows))


async def load_rows(session: AsyncSession, now: datetime) -> list[models.SigningKey]:
    """Every key of which tokens may be good at ``now``: the one that signs first, then the newest first."""
    good = or_(models.SigningKey.not_after_time.is_(None), models.SigningKey.not_after_time > now)
    rows = await session.scalars(
        select(models.SigningKey)
        .where(good)
        .order_by(models.SigningKey.create_time.desc(), models.SigningKey.kid)
        .execution_options(populate_existing=True)
    )
    return sorted(rows, key=lambda row: to_life(row).state(now) is not KeyState.SIGNING)


async def create(
    session: AsyncSession,
    key_encryption_key: KeyEncryptionKey,
    now: datetime,
    *,
    publish_version: int,
    sign_now: bool,
) -> models.SigningKey:
    """Make a key; it signs at once with ``sign_now``, else once it is told to."""
    kid = secrets.token_hex(_KID_BYTES)
    private_key = Ed25519PrivateKey.generate()
    row = models.SigningKey(
        kid=kid,
        wrapped_private_key=await key_encryption_key.wrap(private_key.private_bytes_raw(), signing_key_context(kid)),
        public_x=public_key_to_x(private_key.public_key()),
        create_time=now,
        not_after_time=None,
        publish_version=publish_version,
        sign_time=now if sign_now else None,
        retire_time=None,
    )
    session.add(row)
    await session.flush()
    return row


async def unwrap(key_encryption_key: KeyEncryptionKey, row: models.SigningKey) -> Ed25519PrivateKey:
    """The private half; raises FailedPreconditionError or DataLossError if it cannot be unwrapped."""
    assert row.wrapped_private_key is not None, "a key that signs has its private half"
    raw = await key_encryption_key.unwrap(row.wrapped_private_key, signing_key_context(row.kid))
    return Ed25519PrivateKey.from_private_bytes(raw)


async def load_issuer(session: AsyncSession) -> str:
    """The identifier of this deployment, which its tokens carry as ``iss``.

    Derived from the bootstrap row: random, written once before anything else, never changed and never deleted, so the
    identifier lasts as long as the database does. One way, so it says nothing about the bootstrap token.
    """
    token_sha256 = (await session.execute(select(models.Bootstrap.token_sha256))).scalar_one()
    return f"saltern-{hashlib.sha256(frame(_ISSUER_LABEL, token_sha256)).digest()[:_ISSUER_BYTES].hex()}"


async def load_key_set(session: AsyncSession) -> KeySet:
    """The key set as the transaction sees it; a key that is about to be withdrawn is still in it."""
    return to_key_set(await load_issuer(session), await session.scalars(select(models.SigningKey)))


def to_life(row: models.SigningKey) -> KeyLife:
    """A row as the rules of rotation take it."""
    return KeyLife(
        kid=row.kid,
        create_time=row.create_time,
        publish_version=row.publish_version,
        sign_time=row.sign_time,
        retire_time=row.retire_time,
        not_after_time=row.not_after_time,
    )


def to_key_set(issuer: str, rows: Iterable[models.SigningKey]) -> KeySet:
    """The public halves."""
    return KeySet(issuer=issuer, keys={row.kid: public_key_from_x(row.public_x) for row in rows})
