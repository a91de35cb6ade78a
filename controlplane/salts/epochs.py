"""A tenant's salt epochs as rows: read, rotated and purged in the caller's transaction, by the rules of the core.

Whoever changes them holds the tenant's row: two rotations at a time take turns, and neither's epoch is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.salt_rotation import Epoch, next_rotation_time, rotate
from controlplane.db.models import SaltEpoch, SaltPolicy
from controlplane.salts.roots import new_root
from controlplane.secrets import KeyEncryptionKey, root_secret_context
from saltern.names import TenantId


class EpochOfTenant(Protocol):
    """A row of ``SaltEpoch``, or as much of it as nodes are told of."""

    @property
    def tenant_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...


def readable_epochs(rows: Iterable[EpochOfTenant]) -> dict[str, tuple[int, ...]]:
    """The epochs of each tenant in ascending order, the current one last: all that nodes are told of salts."""
    epochs: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        epochs[row.tenant_id].append(row.epoch)
    return {tenant: tuple(sorted(numbers)) for tenant, numbers in epochs.items()}


async def load_epochs(session: AsyncSession, tenant: TenantId) -> list[SaltEpoch]:
    """Every epoch of the tenant, ascending; the last one is current, and a tenant always has one."""
    statement = select(SaltEpoch).where(SaltEpoch.tenant_id == tenant).order_by(SaltEpoch.epoch)
    return list(await session.scalars(statement))


def to_epoch(row: SaltEpoch) -> Epoch:
    return Epoch(row.epoch, row.create_time, row.read_until_time)


async def begin_epoch(
    session: AsyncSession,
    key_encryption_key: KeyEncryptionKey,
    *,
    tenant_uid: UUID,
    policy: SaltPolicy,
    epochs: Sequence[SaltEpoch],
    grace: timedelta,
    now: datetime,
) -> list[SaltEpoch]:
    """Begin the next epoch with a new root, destroy what ends with it (I12), and return the epochs as they are then."""
    rotation = rotate([to_epoch(row) for row in epochs], now, grace)
    await destroy_epochs(session, epochs, rotation.ended)
    kept = {row.epoch: row for row in epochs if row.epoch not in rotation.ended}
    *earlier, begun = rotation.epochs
    for epoch in earlier:
        kept[epoch.number].read_until_time = epoch.read_until_time
    # The unit of work inserts before it updates, and only one epoch at a time may be current.
    await session.flush()
    wrapped = await new_root(key_encryption_key, root_secret_context(tenant_uid, begun.number))
    row = SaltEpoch(
        tenant_id=policy.tenant_id, epoch=begun.number, wrapped_root_secret=wrapped, create_time=begun.create_time
    )
    session.add(row)
    policy.epoch = begun.number
    note_change(policy, begun, now)
    await session.flush()
    return [kept[epoch.number] for epoch in earlier] + [row]


async def destroy_epochs(session: AsyncSession, epochs: Iterable[SaltEpoch], numbers: Collection[int]) -> None:
    """Delete the rows of ``numbers``, and with each the only copy of its root (I12)."""
    for row in epochs:
        if row.epoch in numbers:
            await session.delete(row)
    await session.flush()


def note_change(policy: SaltPolicy, current: Epoch, now: datetime) -> None:
    """Bring revision and schedule of a changed policy up to date."""
    period = timedelta(seconds=policy.rotation_period_s)
    policy.next_rotation_time = next_rotation_time(current, period)
    policy.update_time = now
    policy.revision += 1
