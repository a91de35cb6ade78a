"""The policy version: raised with every change that nodes must hear of, in the same transaction."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.models import PolicyState

#: LISTEN on it; the payload is the new version, sent when the transaction commits.
POLICY_CHANNEL = "saltern_policy"


async def bump_policy_version(session: AsyncSession, now: datetime) -> int:
    """Raise the version, tell the listeners at commit, and return the new version.

    It locks the one row until the commit, so do it last.
    """
    statement = update(PolicyState).values(version=PolicyState.version + 1, update_time=now)
    version = (await session.execute(statement.returning(PolicyState.version))).scalar_one()
    await session.execute(select(func.pg_notify(POLICY_CHANNEL, str(version))))
    return version
