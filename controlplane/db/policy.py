"""The policy version: raised with every change that nodes must hear of, in the same transaction."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from datetime import datetime
from typing import Final

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.models import Concern, PolicyChange, PolicyState
from controlplane.db.row_security import TenantScope
from controlplane.db.session import scope_of_session
from saltern.names import TenantId

#: LISTEN on it; the payload is the new version, sent when the transaction commits.
POLICY_CHANNEL = "saltern_policy"
#: A change of more tenants than this is written down as one of any.
CHANGED_TENANTS_MAX: Final = 1_000

_raised: ContextVar[int] = ContextVar("policy version raised by this call", default=0)


def raised_policy_version() -> int:
    """The newest policy version that the call in progress has raised, or waits to be told of; 0 for none."""
    return _raised.get()


async def note_policy_version(session: AsyncSession) -> None:
    """The call in progress is answered by what an earlier one did, which the present version holds."""
    _raised.set((await session.execute(select(PolicyState.version))).scalar_one())


async def bump_policy_version(
    session: AsyncSession,
    now: datetime,
    tenant: TenantId | None = None,
    *,
    concern: Concern | None = None,
    past: int = 0,
) -> int:
    """Raise the version, tell the listeners at commit, and return the new version.

    It locks the one row until the commit, so do it last.

    Args:
        tenant: the only one that the change is about; None if it may be any, or ``concern`` says whom it concerns. In
            a transaction that may touch the rows of one tenant it is that one.
        past: the new version is above this one too; what it skips was never a version of this database.
    """
    statement = update(PolicyState).values(version=func.greatest(PolicyState.version, past) + 1, update_time=now)
    version = (await session.execute(statement.returning(PolicyState.version))).scalar_one()
    scope = scope_of_session(session)
    changed = scope.tenant if isinstance(scope, TenantScope) else tenant
    whom = None if changed is not None else concern
    await session.execute(insert(PolicyChange).values(version=version, tenant_id=changed, concern=whom))
    await _tell(session, version)
    return version


def versions_of(tenants: Collection[TenantId]) -> int:
    """By how much :func:`bump_policy_versions` raises the version for a change of so many tenants."""
    return len(tenants) if 1 <= len(tenants) <= CHANGED_TENANTS_MAX else 1


async def bump_policy_versions(session: AsyncSession, now: datetime, tenants: Collection[TenantId]) -> int:
    """Raise the version for a change that is about ``tenants`` and no others; otherwise as :func:`bump_policy_version`.

    Each takes a version of its own, of which only the last one, which is returned, is ever seen. Of too many tenants
    it becomes a change of any.
    """
    if not 1 <= len(tenants) <= CHANGED_TENANTS_MAX:
        return await bump_policy_version(session, now)
    statement = update(PolicyState).values(version=PolicyState.version + len(tenants), update_time=now)
    version: int = (await session.execute(statement.returning(PolicyState.version))).scalar_one()
    rows = [{"version": version - later, "tenant_id": tenant} for later, tenant in enumerate(sorted(tenants))]
    await session.execute(insert(PolicyChange), rows)
    await _tell(session, version)
    return version


async def _tell(session: AsyncSession, version: int) -> None:
    _raised.set(version)
    await session.execute(select(func.pg_notify(POLICY_CHANNEL, str(version))))
