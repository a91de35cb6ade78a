"""The key that signs checkpoints of audit chains: its own, kept in the database, wrapped under the key-encryption key.

Whoever can write to the database but has not the key-encryption key can sign nothing. Keys that sign tokens are other
keys: what may be replaced every month must not decide whether a trail of years verifies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.db import Database
from controlplane.db.locks import lock_checkpoint_keys
from controlplane.db.models import AuditCheckpointKey
from controlplane.secrets import KeyEncryptionKey
from controlplane.secrets.wrapping import WrapContext
from saltern.audit.checkpoints import key_id_of


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """A key that signs."""

    id: str
    private_key: Ed25519PrivateKey = field(repr=False)


class CheckpointKeys:
    """The key that signs now, of however many control planes and rotations."""

    def __init__(self, database: Database, key_encryption_key: KeyEncryptionKey, key: CheckpointKey) -> None:
        """``key``: what :func:`load_checkpoint_key` gave."""
        self._database = database
        self._key_encryption_key = key_encryption_key
        self._key = key

    async def current(self) -> CheckpointKey:
        """Look which one it is; raises as :func:`load_checkpoint_key`."""
        async with self._database.transaction() as session:
            row = await _newest(session)
        if row is not None and row.id != self._key.id:
            self._key = await _unwrapped(self._key_encryption_key, row)
        return self._key


def checkpoint_key_context(key_id: str) -> WrapContext:
    """Context of the private half of a key that signs checkpoints."""
    return WrapContext("audit-checkpoint-key", key_id)


async def load_checkpoint_key(database: Database, key_encryption_key: KeyEncryptionKey, clock: Clock) -> CheckpointKey:
    """Load the key that signs; make one where there is none.

    Raises:
        FailedPreconditionError: the key-encryption key is not the one of this database.
        DataLossError: the stored key is damaged, or its halves do not belong together.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached.
    """
    async with database.transaction() as session:
        # Of two control planes that start on a fresh database, one makes the key and the other waits and reads it.
        await lock_checkpoint_keys(session)
        row = await _newest(session) or await _create(session, key_encryption_key, clock())
    return await _unwrapped(key_encryption_key, row)


async def rotate_checkpoint_key(
    session: AsyncSession, key_encryption_key: KeyEncryptionKey, now: datetime
) -> AuditCheckpointKey:
    """Retire the key that signs and make another; checkpoints of the old one from before ``now`` stay good."""
    await lock_checkpoint_keys(session)
    for row in await session.scalars(select(AuditCheckpointKey).where(AuditCheckpointKey.retire_time.is_(None))):
        row.retire_time = now
    return await _create(session, key_encryption_key, now)


async def _newest(session: AsyncSession) -> AuditCheckpointKey | None:
    statement = (
        select(AuditCheckpointKey)
        .where(AuditCheckpointKey.retire_time.is_(None))
        .order_by(AuditCheckpointKey.create_time.desc(), AuditCheckpointKey.id)
        .limit(1)
    )
    return (await session.scalars(statement)).one_or_none()


async def _create(session: AsyncSession, key_encryption_key: KeyEncryptionKey, now: datetime) -> AuditCheckpointKey:
    private_key = Ed25519PrivateKey.generate()
    key_id = key_id_of(private_key.public_key())
    raw = private_key.private_bytes_raw()
    row = AuditCheckpointKey(
        id=key_id,
        wrapped_private_key=await key_encryption_key.wrap(raw, checkpoint_key_context(key_id)),
        public_key=private_key.public_key().public_bytes_raw(),
        create_time=now,
        retire_time=None,
    )
    session.add(row)
    await session.flush()
    return row


async def _unwrapped(key_encryption_key: KeyEncryptionKey, row: AuditCheckpointKey) -> CheckpointKey:
    raw = await key_encryption_key.unwrap(row.wrapped_private_key, checkpoint_key_context(row.id))
    return CheckpointKey(row.id, Ed25519PrivateKey.from_private_bytes(raw))
