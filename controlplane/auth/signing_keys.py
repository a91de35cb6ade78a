"""The key that signs tokens: made on the first start, kept in the database, wrapped under the key-encryption key.

All control planes on one database share it: a token that one has issued, every other verifies.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock, utc_now
from controlplane.db import Database, models
from controlplane.secrets import KeyEncryptionKey, signing_key_context
from saltern.keys import frame
from tenants.tokens import KeySet, public_key_from_x, public_key_to_x

_KID_BYTES: Final = 8
_ISSUER_LABEL: Final = "saltern/issuer/1"
_ISSUER_BYTES: Final = 8
_ADVISORY_LOCK_ID: Final = 0x53414C54_4B455953


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


async def load_key_ring(database: Database, key_encryption_key: KeyEncryptionKey, clock: Clock = utc_now) -> KeyRing:
    """Load the signing keys of the deployment; on a fresh database make the first one.

    Raises:
        FailedPreconditionError: the key-encryption key is not the one of this database.
        DataLossError: a stored key is damaged.
        UnavailableError: the database cannot be reached.
    """
    async with database.transaction() as session:
        # Of two control planes that start on a fresh database, one makes the key and the other waits and reads it.
        await session.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK_ID)))
        now = clock()
        rows = await session.scalars(
            select(models.SigningKey)
            .where(or_(models.SigningKey.not_after_time.is_(None), models.SigningKey.not_after_time > now))
            .order_by(models.SigningKey.create_time.desc(), models.SigningKey.kid)
        )
        keys = list(rows)
        if not any(key.not_after_time is None for key in keys):
            keys.insert(0, await _create(session, key_encryption_key, clock))
        newest = next(key for key in keys if key.not_after_time is None)
        issuer = await load_issuer(session)
    raw = await key_encryption_key.unwrap(newest.wrapped_private_key, signing_key_context(newest.kid))
    return KeyRing(
        kid=newest.kid,
        private_key=Ed25519PrivateKey.from_private_bytes(raw),
        key_set=KeySet(issuer=issuer, keys={key.kid: public_key_from_x(key.public_x) for key in keys}),
    )


async def load_issuer(session: AsyncSession) -> str:
    """The identifier of this deployment, which its tokens carry as ``iss``.

    Derived from the bootstrap row: random, written once before anything else, never changed and never deleted, so the
    identifier lasts as long as the database does. One way, so it says nothing about the bootstrap token.
    """
    token_sha256 = (await session.execute(select(models.Bootstrap.token_sha256))).scalar_one()
    return f"saltern-{hashlib.sha256(frame(_ISSUER_LABEL, token_sha256)).digest()[:_ISSUER_BYTES].hex()}"


async def has_signing_key(database: Database) -> bool:
    """Whether the database was in use before; then a missing key-encryption key is a loss and must not be made anew."""
    async with database.transaction() as session:
        return (await session.execute(select(models.SigningKey.kid).limit(1))).first() is not None


async def _create(session: AsyncSession, key_encryption_key: KeyEncryptionKey, clock: Clock) -> models.SigningKey:
    kid = secrets.token_hex(_KID_BYTES)
    private_key = Ed25519PrivateKey.generate()
    row = models.SigningKey(
        kid=kid,
        wrapped_private_key=await key_encryption_key.wrap(private_key.private_bytes_raw(), signing_key_context(kid)),
        public_x=public_key_to_x(private_key.public_key()),
        create_time=clock(),
        not_after_time=None,
    )
    session.add(row)
    await session.flush()
    return row
