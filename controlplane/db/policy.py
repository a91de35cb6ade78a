"""The policy version: raised with every change that nodes must hear of, in the same transaction."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.models import PolicyChange, PolicyState
from controlplane.db.row_security import TenantScope
from controlplane.db.session import scope_of_session
from saltern.names import TenantId

#: LISTEN on it; the payload is the new version, sent when the transaction commits.
POLICY_CHANNEL = "saltern_policy"


async def bump_policy_version(
    session: AsyncSession, now: datetime, tenant: TenantId | None = None, *, past: int = 0
) -> int:
    """Raise the version, tell the listeners at commit, and return the new version.

    It locks the one row until the commit, so do it last.

    Args:
        tenant: the only one that the change is about; None if it may be any, or what is no tenant's. In a transaction
            that may touch the rows of one tenant it is that one.
        past: the new version is above this one too; what it skips was never a version of this database.
    """
    statement = update(PolicyState).values(version=func.greatest(PolicyState.version, past) + 1, update_time=now)
    version = (await session.execute(statement.returning(PolicyState.version))).scalar_one()
    scope = scope_of_session(session)
    changed = scope.tenant if isinstance(scope, TenantScope) else tenant
    await session.execute(insert(PolicyChange).values(version=version, tenant_id=changed))
    await session.execute(select(func.pg_notify(POLICY_CHANNEL, str(version))))
    return version
