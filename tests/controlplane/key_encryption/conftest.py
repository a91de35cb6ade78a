from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select

from controlplane.clock import utc_now
from controlplane.db import Database, models
from controlplane.key_encryption.encryption_keys import EncryptionKeys, load_encryption_keys
from controlplane.key_encryption.keeper import KeyEncryptionKeeper
from controlplane.key_encryption.kms import KmsClient
from controlplane.key_encryption.rewrapping import count_wrapped
from controlplane.secrets import KeyEncryptionKey, root_secret_context
from controlplane.secrets.local_keys import FILE_NAME
from tests.support.control import migrate, text_of
from tests.support.scopes import connect_to_all
from tests.support.tenant_rows import tenant_row


@dataclass
class World:
    """A database with tenants, and state folders of control planes on it."""

    database: Database
    url: str
    folder: Path

    async def plane(self, name: str = "a", kms: KmsClient | None = None) -> tuple[EncryptionKeys, KeyEncryptionKeeper]:
        """What a control plane has of key-encryption keys, with a state folder of its own that holds the same keys."""
        (self.folder / name).mkdir(exist_ok=True)
        first = self.folder / "a" / FILE_NAME
        if first.exists() and name != "a" and kms is None:
            own = self.folder / name / FILE_NAME
            own.write_text(first.read_text())
            own.chmod(0o600)
        keys = await load_encryption_keys(self.database, self.folder / name, kms)
        return keys, KeyEncryptionKeeper(self.database, keys, batch_rows=5)

    def append_key(self, digit: str, *names: str) -> None:
        for name in names:
            with (self.folder / name / FILE_NAME).open("a") as file:
                file.write(digit * 64 + "\n")

    async def publish(self, keys: EncryptionKeys) -> str:
        """As the administrator's call does."""
        async with self.database.transaction() as session:
            rows = list(await session.scalars(select(models.KeyEncryptionKey)))
            row = await keys.next_key(rows, utc_now())
            session.add(row)
        return row.id

    async def add_tenants(self, key: KeyEncryptionKey, count: int) -> dict[UUID, bytes]:
        """Tenants with a root secret each, by uid."""
        roots: dict[UUID, bytes] = {}
        async with self.database.transaction() as session:
            for _ in range(count):
                uid, root, now = uuid4(), uuid4().bytes * 2, utc_now()
                tenant = f"t{uid.hex}"
                session.add(tenant_row(tenant, now, uid))
                await session.flush()
                wrapped = await key.wrap(root, root_secret_context(uid, 1))
                session.add(models.SaltEpoch(tenant_id=tenant, epoch=1, wrapped_root_secret=wrapped, create_time=now))
                roots[uid] = root
        return roots

    async def roots(self, key: KeyEncryptionKey) -> dict[UUID, bytes]:
        """The root secrets as they open now."""
        async with self.database.transaction() as session:
            statement = select(models.Tenant.uid, models.SaltEpoch.wrapped_root_secret).join_from(
                models.SaltEpoch, models.Tenant, models.SaltEpoch.tenant_id == models.Tenant.id
            )
            rows = (await session.execute(statement)).all()
        return {uid: await key.unwrap(bytes(wrapped), root_secret_context(uid, 1)) for uid, wrapped in rows}

    async def counts(self) -> dict[str, int]:
        """Secrets under each key."""
        async with self.database.transaction() as session:
            return {key_id: counter.total() for key_id, counter in (await count_wrapped(session)).items()}

    async def key(self, key_id: str) -> models.KeyEncryptionKey:
        async with self.database.transaction() as session:
            return (
                await session.execute(select(models.KeyEncryptionKey).where(models.KeyEncryptionKey.id == key_id))
            ).scalar_one()


@pytest.fixture
async def world(postgres: Any, tmp_path: Path) -> AsyncIterator[World]:
    with postgres.fresh_database(migrate) as urls:
        database = connect_to_all(text_of(urls.app))
        yield World(database, text_of(urls.app), tmp_path)
        await database.close()
