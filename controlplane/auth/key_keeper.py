"""Carries out what is due of the signing keys, and forgets revocations that name nothing any more.

Every control plane has one; of those on one database the one that gets the lock leads for a moment, the others look
again a second later. All that counts is in the database, so it does not matter which, and a crash loses nothing.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

import structlog
from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import record
from controlplane.audit.trail import next_sequence
from controlplane.auth.key_set import encode_signing_keys
from controlplane.auth.signing_keys import SigningKeys, create, to_life
from controlplane.clock import Clock, utc_now
from controlplane.core.key_rotation import BeginToSign, NodeAnswer, Publish, Step, Withdraw, next_steps
from controlplane.db import Database, ServiceScope, ServiceTask, bump_policy_version, models
from controlplane.db.locks import try_lock_signing_keys
from controlplane.repeating import repeat
from controlplane.secrets import KeyEncryptionKey

INTERVAL_S: Final = 1.0
ACTOR: Final = "control-plane"
ROTATE_METHOD: Final = "saltern.admin.v1.TokenService/RotateSigningKey"
RESOURCE: Final = "signingKeys"
_REVOCATIONS_FORGOTTEN_EVERY: Final = timedelta(minutes=1)

_log = structlog.get_logger(__name__)


class KeyKeeper:
    """Rotates the signing keys of a deployment.

    Args:
        age_max: a key that has signed for so long is followed by a new one.
        token_lifetime: what tokens are issued for.
    """

    def __init__(
        self,
        database: Database,
        key_encryption_key: KeyEncryptionKey,
        keys: SigningKeys,
        *,
        age_max: timedelta,
        token_lifetime: timedelta,
        clock: Clock = utc_now,
    ) -> None:
        self._database = database
        self._key_encryption_key = key_encryption_key
        self._keys = keys
        self._age_max = age_max
        self._token_lifetime = token_lifetime
        self._clock = clock
        self._forget_time = clock()

    async def run(self) -> None:
        """Look every second, until cancelled, through every absence of the database."""

        def warn(reason: str) -> None:
            _log.warning("signing keys not looked after", reason=reason)

        await repeat(self.step, INTERVAL_S, name=type(self).__name__, warn=warn)

    async def step(self) -> list[Step]:
        """Do what is due now, unless another control plane is at it; return what was done."""
        now = self._clock()
        async with self._database.transaction(ServiceScope(ServiceTask.KEY_ROTATION)) as session:
            steps = await self._lead(session, now) if await try_lock_signing_keys(session) else []
        for step in steps:
            _log.info("signing key", step=type(step).__name__, kid=getattr(step, "kid", ""))
        await self._keys.refresh()
        return steps

    async def _lead(self, session: AsyncSession, now: datetime) -> list[Step]:
        if now >= self._forget_time:
            await session.execute(delete(models.TokenRevocation).where(models.TokenRevocation.expire_time <= now))
            self._forget_time = now + _REVOCATIONS_FORGOTTEN_EVERY
        rows = list(await session.scalars(select(models.SigningKey)))
        answers = await session.execute(select(models.Node.applied_version, models.Node.last_report_time))
        steps = next_steps(
            [to_life(row) for row in rows],
            [NodeAnswer(version, time) for version, time in answers],
            now,
            age_max=self._age_max,
            token_lifetime=self._token_lifetime,
        )
        if steps:
            await change_keys(session, self._key_encryption_key, steps, actor=ACTOR, now=now)
        return steps


async def change_keys(
    session: AsyncSession, key_encryption_key: KeyEncryptionKey, steps: list[Step], *, actor: str, now: datetime
) -> None:
    """Carry out ``steps``, audited, in the caller's transaction, which holds the lock of the signing keys (I11)."""
    before = await encode_all(session, now)
    # The chain before the version, as everywhere; and the version before the act: a key has to know in which it is.
    await next_sequence(session, None)
    version = await bump_policy_version(session, now, concern=models.Concern.NOBODY)
    for step in steps:
        await _take(session, key_encryption_key, step, version, now)
    await record(
        session,
        tenant=None,
        actor=actor,
        method=ROTATE_METHOD,
        resource=RESOURCE,
        now=now,
        before={"signing_keys": before},
        after={"signing_keys": await encode_all(session, now)},
    )


async def publish_key(session: AsyncSession, key_encryption_key: KeyEncryptionKey, now: datetime) -> models.SigningKey:
    """Make a key that signs once every node holds it; the caller audits it and holds the lock."""
    await next_sequence(session, None)
    version = await bump_policy_version(session, now, concern=models.Concern.NOBODY)
    return await create(session, key_encryption_key, now, publish_version=version, sign_now=False)


async def withdraw_all_but_new(
    session: AsyncSession, key_encryption_key: KeyEncryptionKey, now: datetime
) -> models.SigningKey:
    """An emergency: forget every key and make one that signs at once; the caller audits it and holds the lock."""
    await next_sequence(session, None)
    version = await bump_policy_version(session, now, concern=models.Concern.NOBODY)
    await session.execute(delete(models.SigningKey))
    return await create(session, key_encryption_key, now, publish_version=version, sign_now=True)


async def encode_all(session: AsyncSession, now: datetime) -> list[dict[str, object]]:
    """Every key as the audit trail keeps it."""
    rows = await session.scalars(select(models.SigningKey).order_by(models.SigningKey.create_time))
    return encode_signing_keys([to_life(row) for row in rows], now)


async def _take(
    session: AsyncSession, key_encryption_key: KeyEncryptionKey, step: Step, version: int, now: datetime
) -> None:
    match step:
        case Publish(sign_now):
            await create(session, key_encryption_key, now, publish_version=version, sign_now=sign_now)
        case BeginToSign(kid, not_after_time):
            rows = await session.scalars(select(models.SigningKey).where(models.SigningKey.retire_time.is_(None)))
            for row in rows:
                if row.kid == kid:
                    row.sign_time = now
                elif row.sign_time is not None:
                    row.retire_time, row.not_after_time = now, not_after_time
                    row.wrapped_private_key = None  # it signs nothing any more: what is not there cannot leak
        case Withdraw(kid):
            await session.execute(delete(models.SigningKey).where(models.SigningKey.kid == kid))
    await session.flush()
