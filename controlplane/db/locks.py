"""Locks that rows cannot express; each is held to the end of the transaction that takes it.

To be free of deadlocks every transaction takes what it needs in this order: its request id, the rows it changes, the
quota lock, the audit chain, the policy version.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

# First of the two numbers of an advisory lock: what it is for.
_AUDIT_CHAIN = 1
_QUOTAS = 2


async def lock_audit_chain(session: AsyncSession, chain: str) -> None:
    """One writer of a chain at a time. Chains whose hashes collide only wait for each other."""
    await session.execute(select(func.pg_advisory_xact_lock(_AUDIT_CHAIN, func.hashtext(chain))))


async def lock_quotas(session: AsyncSession) -> None:
    """One change of any reservation at a time: the sum over all tenants must hold still while it is checked (I5)."""
    await session.execute(select(func.pg_advisory_xact_lock(_QUOTAS, 0)))
