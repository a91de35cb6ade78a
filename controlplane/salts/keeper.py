"""Rotates salts by their schedules and destroys epochs whose grace has ended.

Every control plane has one; of those on one database the one that gets the lock leads for a moment, the others look
again a second later. Each tenant's step is one transaction that reads again what is due: a crash before its commit
leaves all of it to the next leader, one after it nothing.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

import structlog
from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.resources import to_salt_policy, to_snapshot
from controlplane.audit import record
from controlplane.clock import Clock, utc_now
from controlplane.core.salt_rotation import Purge, Rotate, Step, steps_due
from controlplane.db import Database, ServiceScope, ServiceTask, TenantScope, bump_policy_version
from controlplane.db.locks import try_lock_salts
from controlplane.db.models import SaltEpoch, SaltPolicy, Tenant
from controlplane.repeating import repeat
from controlplane.rpc import to_saltern_error
from controlplane.salts.epochs import begin_epoch, destroy_epochs, load_epochs, note_change, to_epoch
from controlplane.secrets import KeyEncryptionKey
from saltern.names import TenantId

INTERVAL_S: Final = 1.0
ACTOR: Final = "system/salt-rotation"
ROTATE_METHOD: Final = "saltern.admin.v1.SaltPolicyService/RotateSalt"
PURGE_METHOD: Final = "saltern.admin.v1.SaltPolicyService/PurgeSaltEpochs"
#: Tenants of one step; what is left is due a second later.
TENANTS_PER_STEP_MAX: Final = 256

_log = structlog.get_logger(__name__)


class SaltKeeper:
    """Keeps the salts of a deployment to their schedules."""

    def __init__(self, database: Database, key_encryption_key: KeyEncryptionKey, clock: Clock = utc_now) -> None:
        self._database = database
        self._key_encryption_key = key_encryption_key
        self._clock = clock

    async def run(self) -> None:
        """Look every second, until cancelled, through every absence of the database."""

        def warn(reason: str) -> None:
            _log.warning("salts not looked after", reason=reason)

        await repeat(self.step, INTERVAL_S, name=type(self).__name__, warn=warn)

    async def step(self) -> int:
        """Do what is due now of every tenant, unless another control plane is at it; return of how many it was."""
        now = self._clock()
        done = 0
        for tenant in await self._due(now):
            try:
                done += await self._keep(tenant, now)
            except Exception as error:  # one tenant's fault, such as a key that is not there, is not the others'
                reason = to_saltern_error(error, method=type(self).__name__).reason
                _log.warning("salts of a tenant not looked after", tenant=tenant, reason=reason)
        return done

    async def _due(self, now: datetime) -> list[TenantId]:
        async with self._database.transaction(ServiceScope(ServiceTask.SALT_ROTATION)) as session:
            ended = select(SaltEpoch.tenant_id).where(SaltEpoch.read_until_time <= now)
            statement = (
                select(SaltPolicy.tenant_id)
                .where(or_(SaltPolicy.next_rotation_time <= now, SaltPolicy.tenant_id.in_(ended)))
                .order_by(SaltPolicy.tenant_id)
                .limit(TENANTS_PER_STEP_MAX)
            )
            return [TenantId(tenant) for tenant in await session.scalars(statement)]

    async def _keep(self, tenant: TenantId, now: datetime) -> bool:
        """One tenant, in a transaction that can touch no other's rows; False if there was nothing to do in the end."""
        async with self._database.transaction(TenantScope(tenant)) as session:
            if not await try_lock_salts(session):
                return False
            owner = await session.get(Tenant, tenant, with_for_update={"key_share": True})
            if owner is None:
                return False
            policy = await session.get_one(SaltPolicy, tenant)
            epochs = await load_epochs(session, tenant)
            steps = steps_due([to_epoch(row) for row in epochs], policy.next_rotation_time, now)
            for step in steps:
                epochs = await self._take(session, step, owner, policy, epochs=epochs, now=now)
        for step in steps:
            _log.info("salt", step=type(step).__name__, tenant=tenant, epoch=policy.epoch)
        return bool(steps)

    async def _take(
        self,
        session: AsyncSession,
        step: Step,
        owner: Tenant,
        policy: SaltPolicy,
        *,
        epochs: list[SaltEpoch],
        now: datetime,
    ) -> list[SaltEpoch]:
        """Carry out one step, audited in the tenant's own chain in the same transaction (I11)."""
        before = to_salt_policy(owner, policy, epochs)
        match step:
            case Purge(numbers):
                method = PURGE_METHOD
                await destroy_epochs(session, epochs, numbers)
                epochs = [row for row in epochs if row.epoch not in numbers]
                note_change(policy, to_epoch(epochs[-1]), now)
                await session.flush()
            case Rotate():
                method = ROTATE_METHOD
                epochs = await begin_epoch(
                    session,
                    self._key_encryption_key,
                    tenant_uid=owner.uid,
                    policy=policy,
                    epochs=epochs,
                    grace=timedelta(seconds=policy.grace_period_s),
                    now=now,
                )
        await record(
            session,
            tenant=TenantId(owner.id),
            actor=ACTOR,
            method=method,
            resource=before.name,
            now=now,
            before=to_snapshot(before),
            after=to_snapshot(to_salt_policy(owner, policy, epochs)),
            bump_policy=lambda: bump_policy_version(session, now),
        )
        return epochs
