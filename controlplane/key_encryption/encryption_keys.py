"""The deployment's key-encryption keys as this process knows them, and where it has them from.

::

    file, environment ──────────────┐
                                    ├─> Keyring ── wraps with the one that the database says is current
    database: sealed ──> KMS ───────┘

The database names every key that is, or was, in use; it holds none but those that a key management service has sealed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock, utc_now
from controlplane.core.key_encryption import KeyLife, current_key
from controlplane.db import Database
from controlplane.db.locks import lock_key_encryption_keys
from controlplane.db.models import KeyEncryptionKey
from controlplane.key_encryption.kms import KmsClient, SealedKey
from controlplane.secrets import Keyring, LocalKeyEncryptionKey
from controlplane.secrets.local_keys import has_local_keys, load_local_keys
from controlplane.secrets.wrapping import KEY_BYTES
from saltern.errors import DataLossError, FailedPreconditionError

_log = structlog.get_logger(__name__)


class EncryptionKeys:
    """Keys of a file or the environment, and keys that a key management service has sealed.

    Attributes:
        ring: the keys that are loaded; what secrets are wrapped with.
        kms: the service; None where there is none.
    """

    def __init__(self, local: Callable[[], list[LocalKeyEncryptionKey]], kms: KmsClient | None, ring: Keyring) -> None:
        """``local``: reads the keys that lie outside the database, the newest last; each call reads them again."""
        self.ring = ring
        self.kms = kms
        self._local = local

    async def follow(self, rows: Iterable[KeyEncryptionKey]) -> None:
        """Hold what ``rows`` name and can be had, give up what was removed, wrap with the current one.

        A key that cannot be had is left out; whoever waits for this process to hold it waits on.

        Raises:
            FailedPreconditionError: the current key is not to be had, or the file is not as it must be.
        """
        rows = list(rows)
        missing = [row for row in rows if row.remove_time is None and row.id not in self.ring.held]
        if any(row.sealed_key is None for row in missing):
            named = {row.id for row in missing}
            for key in self._local():
                if key.key_id in named:
                    self.ring.add(key)
        for row in missing:
            if row.sealed_key is not None and self.kms is not None:
                self.ring.add(await _open_sealed(self.kms, row))
        current = current_key(map(to_life, rows))
        if current is not None:
            self.ring.use(current)
        for row in rows:
            if row.remove_time is not None:
                self.ring.forget(row.id)

    async def next_key(self, rows: Iterable[KeyEncryptionKey], now: datetime) -> KeyEncryptionKey:
        """A row for the key that is to follow: one that was added here, else one that the service seals.

        Raises:
            FailedPreconditionError: reason NO_NEW_KEY: none was added, and there is no service.
            UnavailableError: the service does not answer.
        """
        known = {row.id for row in rows}
        added = [key for key in self._local() if key.key_id not in known]
        if added:
            self.ring.add(added[-1])
            return KeyEncryptionKey(id=added[-1].key_id, annotations={}, sealed_by="", create_time=now)
        if self.kms is not None:
            key, row = await _seal_new(self.kms, now)
            self.ring.add(key)
            return row
        raise FailedPreconditionError(
            "there is no new key-encryption key to rotate to",
            reason="NO_NEW_KEY",
            hint="append one to the file on every host (`openssl rand -hex 32 >> key-encryption-key`), or give it as"
            " the last one of SALTERN_KEY_ENCRYPTION_KEY and restart; then rotate again",
        )


async def load_encryption_keys(
    database: Database, state_dir: Path, kms: KmsClient | None = None, clock: Clock = utc_now
) -> EncryptionKeys:
    """Load the keys of the deployment; on a fresh database make the first one, sealed where there is a service.

    Raises:
        FailedPreconditionError: a key that is needed is not here, or is another.
        UnavailableError: the service does not answer.
        DataLossError: a sealed key is damaged.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached.
    """
    async with database.transaction() as session:
        # Of two control planes that start on a fresh database, one makes the key and the other waits and reads it.
        await lock_key_encryption_keys(session)
        rows = await load_rows(session)

        def local() -> list[LocalKeyEncryptionKey]:
            if kms is not None and not has_local_keys(state_dir):
                return []
            return load_local_keys(state_dir, create=not rows)

        added, sealed = local(), []
        if not rows and added:
            rows = [KeyEncryptionKey(id=added[-1].key_id, create_time=clock(), use_time=clock())]
            session.add(rows[0])
        elif not rows and kms is not None:
            key, row = await _seal_new(kms, clock())
            row.use_time = row.create_time
            session.add(row)
            rows, added = [row], [key]
        known = {row.id: row for row in rows}
        for row in rows:
            if row.sealed_key is not None and row.id not in {key.key_id for key in added}:
                if kms is None:
                    raise _no_service(row)
                sealed.append(await _open_sealed(kms, row))
    for key in added:
        if known.get(key.key_id) is not None and known[key.key_id].remove_time is not None:
            _log.warning("a removed key-encryption key is still here; delete it", key_id=key.key_id)
    held = [key for key in (*added, *sealed) if key.key_id in known and known[key.key_id].remove_time is None]
    current = current_key(map(to_life, rows))
    assert current is not None, "a database that has keys has a current one"
    return EncryptionKeys(local, kms, Keyring(held, current))


async def load_rows(session: AsyncSession) -> list[KeyEncryptionKey]:
    """Every key that is or was in use, oldest first."""
    statement = select(KeyEncryptionKey).order_by(KeyEncryptionKey.create_time, KeyEncryptionKey.id)
    return list(await session.scalars(statement.execution_options(populate_existing=True)))


def to_life(row: KeyEncryptionKey) -> KeyLife:
    """A row as the rules take it."""
    return KeyLife(row.id, row.create_time, row.use_time, row.retire_time, row.remove_time)


async def _seal_new(kms: KmsClient, now: datetime) -> tuple[LocalKeyEncryptionKey, KeyEncryptionKey]:
    raw = secrets.token_bytes(KEY_BYTES)
    sealed, key = await kms.seal(raw), LocalKeyEncryptionKey(raw)
    row = KeyEncryptionKey(
        id=key.key_id,
        sealed_key=sealed.ciphertext,
        sealed_by=sealed.sealed_by,
        annotations=dict(sealed.annotations),
        create_time=now,
    )
    return key, row


async def _open_sealed(kms: KmsClient, row: KeyEncryptionKey) -> LocalKeyEncryptionKey:
    assert row.sealed_key is not None
    raw = await kms.open(SealedKey(row.sealed_key, row.sealed_by, row.annotations))
    key = LocalKeyEncryptionKey(raw) if len(raw) == KEY_BYTES else None
    if key is None or key.key_id != row.id:  # the id is its hash: a swapped row does not pass for another
        raise DataLossError(
            f"the key management service opens the key {row.id} to another one",
            reason="WRAPPED_SECRET_DAMAGED",
            hint="restore the database from a backup, or point --kms-endpoint to the plug-in of this deployment",
        )
    return key


def _no_service(row: KeyEncryptionKey) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the key-encryption key {row.id} is sealed by a key management service, and none is named here",
        reason="KMS_REQUIRED",
        hint="give --kms-endpoint or SALTERN_KMS_ENDPOINT as on the other control planes",
    )
