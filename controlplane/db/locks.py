"""Locks that rows cannot express; each is held to the end of the transaction that takes it.

To be free of deadlocks every transaction takes what it needs in this order: its request id, the rows it changes, the
quota lock or that of the signing keys, the audit chain, the policy version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.session import driver_of

# First of the two numbers of an advisory lock: what it is for.
_AUDIT_CHAIN = 1
_QUOTAS = 2
_SIGNING_KEYS = 3
_CHECKPOINT_KEYS = 4
_LEASES = 5
_METERING = 20
_WRAPPED = 11  # as ``migrations.wrapped_columns`` has it
_KEY_ENCRYPTION_KEYS = 12
_SALTS = 6

_LOCK_CHAINS: Final = f"""
SELECT pg_advisory_xact_lock({_AUDIT_CHAIN}, lock)
FROM (SELECT DISTINCT hashtext(chain) AS lock FROM unnest(%s::text[]) AS chain ORDER BY lock) AS ordered
"""  # noqa: S608 (a constant)


async def lock_audit_chain(session: AsyncSession, chain: str) -> None:
    """One writer of a chain at a time. Chains whose hashes collide only wait for each other."""
    await session.execute(select(func.pg_advisory_xact_lock(_AUDIT_CHAIN, func.hashtext(chain))))


async def lock_audit_chains(session: AsyncSession, chains: Iterable[str]) -> None:
    """As ``lock_audit_chain`` for several: in the order of the locks themselves, so that nobody waits crosswise."""
    await (await driver_of(session)).execute(_LOCK_CHAINS, (list(chains),))


async def lock_quotas(session: AsyncSession) -> None:
    """One change of any reservation at a time: the sum over all tenants must hold still while it is checked (I5)."""
    await session.execute(select(func.pg_advisory_xact_lock(_QUOTAS, 0)))


async def lock_leases(session: AsyncSession) -> None:
    """One step of the leases at a time, of all control planes on the database (I4); before any row."""
    await session.execute(select(func.pg_advisory_xact_lock(_LEASES, 0)))


async def try_lock_leases(session: AsyncSession) -> bool:
    """As ``lock_leases``, but without waiting: False if another transaction has the lock."""
    return bool(await session.scalar(select(func.pg_try_advisory_xact_lock(_LEASES, 0))))


async def lock_signing_keys(session: AsyncSession) -> None:
    """One change of the signing keys at a time, of all control planes on the database."""
    await session.execute(select(func.pg_advisory_xact_lock(_SIGNING_KEYS, 0)))


async def try_lock_signing_keys(session: AsyncSession) -> bool:
    """As ``lock_signing_keys``, but without waiting: whether it is held now. Who holds it leads."""
    return bool(await session.scalar(select(func.pg_try_advisory_xact_lock(_SIGNING_KEYS, 0))))


async def try_lock_salts(session: AsyncSession) -> bool:
    """One keeper of the salts at a time, of all control planes on the database; who holds it leads."""
    return bool(await session.scalar(select(func.pg_try_advisory_xact_lock(_SALTS, 0))))


async def lock_checkpoint_keys(session: AsyncSession) -> None:
    """One maker of a key that signs checkpoints at a time."""
    await session.execute(select(func.pg_advisory_xact_lock(_CHECKPOINT_KEYS, 0)))


async def lock_key_encryption_keys(session: AsyncSession) -> None:
    """One change of the key-encryption keys at a time, of all control planes on the database; before everything."""
    await session.execute(select(func.pg_advisory_xact_lock(_KEY_ENCRYPTION_KEYS, 0)))


async def try_lock_key_encryption_keys(session: AsyncSession) -> bool:
    """As ``lock_key_encryption_keys``, but without waiting: whether it is held now. Who holds it leads."""
    return bool(await session.scalar(select(func.pg_try_advisory_xact_lock(_KEY_ENCRYPTION_KEYS, 0))))


async def lock_wrapping(session: AsyncSession) -> None:
    """Let nobody write a wrapped secret, and wait for those who do; after the lock of the signing keys."""
    await session.execute(select(func.pg_advisory_xact_lock(_WRAPPED, 0)))


async def try_lock_metering(session: AsyncSession) -> bool:
    """One closer of hours at a time, without waiting: whether the lock is held now."""
    return bool(await session.scalar(select(func.pg_try_advisory_xact_lock(_METERING, 0))))
