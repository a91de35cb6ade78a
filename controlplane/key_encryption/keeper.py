"""Carries a rotation of the key-encryption key through: takes up new keys, retires old ones, wraps anew what is left.

Every control plane has one. Each reports which keys it holds and wraps with; of those on one database the one that gets
the lock leads for a moment. All that counts is in the database, so it does not matter which, and a crash of any of them
at any moment costs nothing but the time until another leads.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from datetime import datetime, timedelta
from time import monotonic
from typing import Final
from uuid import uuid4

import structlog
from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import record
from controlplane.clock import Clock, utc_now
from controlplane.core.key_encryption import Holder, Retire, Step, Use, current_key, next_steps
from controlplane.db import Database, ServiceScope, ServiceTask
from controlplane.db.locks import lock_signing_keys, lock_wrapping, try_lock_key_encryption_keys
from controlplane.db.models import KeyEncryptionKey, KeyEncryptionKeyHolder
from controlplane.key_encryption.encryption_keys import EncryptionKeys, load_rows, to_life
from controlplane.key_encryption.rewrapping import BATCH_ROWS, Batch, Pass, count_wrapped
from controlplane.rpc import to_saltern_error
from saltern.errors import SalternError

INTERVAL_S: Final = 1.0
ACTOR: Final = "control-plane"
SERVICE: Final = "saltern.admin.v1.KeyEncryptionKeyService"
RESOURCE: Final = "keyEncryptionKeys"
_REPORT_EVERY_S: Final = 5.0
_STATUS_EVERY_S: Final = 30.0
_PASS_EVERY_S: Final = 30.0
#: Between two batches: others write, too.
_PAUSE_S: Final = 0.02
_HOLDERS_FORGOTTEN_AFTER: Final = timedelta(days=1)

_log = structlog.get_logger(__name__)


class KeyEncryptionKeeper:
    """Keeps the keys of one control plane as the database says, and leads rotations in turn with the others.

    Attributes:
        scope: of the transactions that a rotation takes.
        failure: why the last look did not succeed; empty if it did. ``kms_failure``: as the key management service.
    """

    def __init__(
        self, database: Database, keys: EncryptionKeys, clock: Clock = utc_now, *, batch_rows: int = BATCH_ROWS
    ) -> None:
        self._database = database
        self._batch_rows = batch_rows
        self._keys = keys
        self._clock = clock
        self._instance = uuid4()
        self.scope = ServiceScope(ServiceTask.KEY_ENCRYPTION)
        self._reported: tuple[list[str], str] | None = None
        self._reported_s = self._asked_s = float("-inf")
        self._pass: Pass | None = None
        self._rewrapped = 0  # in this pass
        self._again_s = float("-inf")
        self._done: frozenset[str] = frozenset()  # retired keys that nothing is under
        self.failure = ""
        self.kms_failure = ""

    async def run(self) -> None:
        """Look every second, until cancelled, through every absence of the database and of the service."""
        while True:
            batch = None
            try:
                batch = await self.step()
                self.failure = ""
            except Exception as error:
                self.failure = to_saltern_error(error, method=type(self).__name__).reason
                _log.warning("key-encryption keys not looked after", reason=self.failure)
            await self._ask_service()
            await asyncio.sleep(INTERVAL_S if batch is None else _PAUSE_S)

    async def leave(self) -> None:
        """Let nobody wait for this control plane; it stops."""
        with suppress(SQLAlchemyError, OSError, TimeoutError):
            async with asyncio.timeout(1.0), self._transaction() as session:
                await session.execute(
                    delete(KeyEncryptionKeyHolder).where(KeyEncryptionKeyHolder.instance == self._instance)
                )

    async def step(self) -> Batch | None:
        """Do what is due now; a batch that was wrapped anew, if there may be more.

        Raises:
            SalternError: a key cannot be had. sqlalchemy.exc.SQLAlchemyError: the database cannot be reached.
        """
        async with self._transaction() as session:
            rows = await load_rows(session)
        await self._keys.follow(rows)
        await self._report()
        async with self._transaction() as session:
            if not await try_lock_key_encryption_keys(session):
                return None
            rows = await load_rows(session)
            await self._take_steps(session, rows)
            return await self._rewrap(session, rows)

    async def _report(self) -> None:
        """Say which keys are held here, when that has changed or a moment has passed."""
        report = (sorted(self._keys.ring.held), self._keys.ring.wraps_with)
        if report == self._reported and monotonic() < self._reported_s + _REPORT_EVERY_S:
            return
        now = self._clock()
        values = {"held": report[0], "wraps_with": report[1], "report_time": now}
        statement = insert(KeyEncryptionKeyHolder).values(instance=self._instance, **values)
        async with self._transaction() as session:
            await session.execute(statement.on_conflict_do_update(index_elements=["instance"], set_=values))
            forgotten = KeyEncryptionKeyHolder.report_time < now - _HOLDERS_FORGOTTEN_AFTER
            await session.execute(delete(KeyEncryptionKeyHolder).where(forgotten))
        self._reported, self._reported_s = report, monotonic()

    async def _take_steps(self, session: AsyncSession, rows: list[KeyEncryptionKey]) -> None:
        now = self._clock()
        steps = next_steps([to_life(row) for row in rows], await load_holders(session), now)
        by_id = {row.id: row for row in rows}
        if any(isinstance(step, Retire) for step in steps):
            await lock_signing_keys(session)  # its holders write wrapped secrets after they have locked the chain
            await lock_wrapping(session)
        for step in steps:
            await _take(session, by_id[step.id], step, now)

    async def _rewrap(self, session: AsyncSession, rows: list[KeyEncryptionKey]) -> Batch | None:
        """One batch of what is under retired keys; the audit event of it in its transaction (I11)."""
        retired = {row.id for row in rows if row.retire_time is not None and row.remove_time is None}
        if not retired - self._done or monotonic() < self._again_s:
            return None
        if self._pass is None:
            counts = await count_wrapped(session)
            self._done = frozenset(key_id for key_id in retired if key_id not in counts)  # zero is final: see Retire
            if not retired - self._done:
                return None
            self._pass = Pass()
        batch = await self._pass.next_batch(session, self._keys.ring, retired - self._done, limit_rows=self._batch_rows)
        self._rewrapped += batch.rewrapped
        if self._pass.is_over:
            # What is left was locked by others, or is damaged: no reason to look every second.
            self._again_s = monotonic() + (0 if self._rewrapped else _PASS_EVERY_S)
            self._pass, self._rewrapped = None, 0
        if batch.rewrapped:
            await record(
                session,
                tenant=None,
                actor=ACTOR,
                method=f"{SERVICE}/RewrapSecrets",
                resource=f"{RESOURCE}/{self._keys.ring.wraps_with}",
                now=self._clock(),
                after={"table": batch.table, "rewrapped": batch.rewrapped},
            )
            _log.info("secrets wrapped anew", table=batch.table, rewrapped=batch.rewrapped)
        return batch

    async def _ask_service(self) -> None:
        """Ask the key management service now and then: whoever needs it at the next start should know before."""
        if self._keys.kms is None or monotonic() < self._asked_s + _STATUS_EVERY_S:
            return
        self._asked_s = monotonic()
        try:
            await self._keys.kms.status()
            self.kms_failure = ""
        except SalternError as error:
            self.kms_failure = error.reason
            _log.warning("key management service not well", reason=error.reason, detail=error.message)

    async def look(self) -> tuple[list[KeyEncryptionKey], dict[str, int]]:
        """Every key, and how many secrets are under each."""
        async with self._transaction() as session:
            counts = await count_wrapped(session)
            return await load_rows(session), {key_id: counter.total() for key_id, counter in counts.items()}

    def _transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        return self._database.transaction(self.scope)


async def load_holders(session: AsyncSession) -> list[Holder]:
    """Every control plane that has reported, lost ones too."""
    rows = await session.scalars(select(KeyEncryptionKeyHolder))
    return [Holder(frozenset(map(str, row.held)), row.wraps_with, row.report_time) for row in rows]


async def _take(session: AsyncSession, row: KeyEncryptionKey, step: Step, now: datetime) -> None:
    match step:
        case Use():
            row.use_time = now
        case Retire():
            row.retire_time = now
    await session.flush()
    await record(
        session,
        tenant=None,
        actor=ACTOR,
        method=f"{SERVICE}/{'UseKeyEncryptionKey' if isinstance(step, Use) else 'RetireKeyEncryptionKey'}",
        resource=f"{RESOURCE}/{row.id}",
        now=now,
        after={"id": row.id, "current": current_key(map(to_life, await load_rows(session))) or ""},
    )
    _log.info("key-encryption key", step=type(step).__name__, key_id=row.id)
