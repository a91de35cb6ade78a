"""Finds out that the database was restored to an earlier state, and makes what nodes hold from after it harmless.

A backup is of the past: its policy version is lower than the one that nodes go by, they would refuse everything older
(POLICY_STALE) and go on with changes that are no more, and once the version has passed theirs, a delta of the new
history would be applied to a policy of the lost one. So the version is moved far past everything that anybody can
hold. Every policy from then on is newer than any of the lost history, and no row of ``policy_changes`` leads there, so
that nodes get a whole snapshot.

Three things tell of a restore, because a backup itself cannot: what this process has seen, what the state directory
says that an earlier process has seen, and what nodes say that they go by.

::

    version of the database < newest version seen  ──>  lease lock ─> nodes fenced ─> tokens end ─> audit ─> version

What else is lost with a backup only people can make up for: docs/operating.md, "Backup and restore".
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import record
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, ServiceScope, ServiceTask, bump_policy_version, models
from controlplane.db.locks import lock_leases
from controlplane.files import write_private_file
from saltern.names import NodeId, node_name

FILE_NAME: Final = "newest-policy"
INTERVAL_S: Final = 2.0
ACTOR: Final = "control-plane"
METHOD: Final = "saltern.control.RestoreWatch/DatabaseRestored"
RESOURCE: Final = "policy"
#: More changes than are ever lost with a backup, and than nodes that were cut off can be ahead.
GAP: Final = 2**20
#: A node's word is taken at most once in so long.
TOLD_EVERY: Final = timedelta(hours=1)
#: No deployment gets there; what says that it has is wrong and must not use up the versions that there are.
_VERSION_MAX: Final = 2**60
_SCOPE: Final = ServiceScope(ServiceTask.RESTORE)

_log = structlog.get_logger(__name__)


class RestoreWatch:
    """One for each process.

    Args:
        state_dir: keeps the newest version seen over a restart; not a part of the database's backup.
    """

    def __init__(self, database: Database, state_dir: Path, clock: Clock = utc_now) -> None:
        self._database = database
        self._file = state_dir / FILE_NAME
        self._clock = clock
        self._written = _read(self._file)
        self._seen = self._written
        self._told_time: datetime | None = None

    async def run(self) -> None:
        """Look every two seconds, until cancelled, through every absence of the database."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.look()
            except (SQLAlchemyError, OSError) as error:
                _log.warning("newest policy version not noted", error_type=type(error).__name__)

    async def told(self, version: int, node: NodeId) -> None:
        """``node`` says that it goes by policy ``version``, which this database may not have come to.

        Its word ends every token, so it is taken seldom, and the trail says whose it was: no node that follows the
        policy has two restores to tell of within ``TOLD_EVERY``.
        """
        if version <= self._seen:
            return
        if version > _VERSION_MAX:
            _log.error("a node names a policy version that cannot be", policy_version=version)
            return
        async with self._database.transaction() as session:
            if version <= await _version(session):
                return  # nothing but a moment older than what another control plane has pushed
        now = self._clock()
        if self._told_time is not None and now - self._told_time < TOLD_EVERY:
            _log.error(
                "a node names a policy version of no history, again: it is not believed",
                node=node,
                policy_version=version,
            )
            return
        self._told_time = now
        self._seen = max(self._seen, version)
        await self.look(told_by=node)

    async def look(self, *, told_by: str = "") -> bool:
        """Compare, and move past a lost history; return whether there was one. Raises what the database raises.

        ``told_by``: the node that has told of it, if one has.
        """
        async with self._database.transaction() as session:
            version = await _version(session)
        was_restored = version < self._seen and await self._move_past(self._seen, told_by)
        if not was_restored:
            self._seen = max(self._seen, version)
        if self._seen > self._written:
            await asyncio.to_thread(write_private_file, self._file, f"{self._seen}\n")
            self._written = self._seen
        return was_restored

    async def _move_past(self, lost_version: int, told_by: str) -> bool:
        """One of many control planes does it; all in one transaction (I11)."""
        now = self._clock()
        async with self._database.transaction(_SCOPE) as session:
            await lock_leases(session)
            before = await _version(session)
            if before >= lost_version:
                return False
            nodes = list(await session.scalars(select(models.Node).order_by(models.Node.id).with_for_update()))
            for node in nodes:
                # Registrations are lost too: an epoch that was given out since the backup must not be given out again.
                node.fencing_epoch += GAP
            # Revocations are lost: end every token instead of finding out which were revoked (I10).
            await session.execute(select(models.Tenant.id).order_by(models.Tenant.id).with_for_update())
            await session.execute(update(models.Tenant).values(min_issue_time=now))

            async def bump() -> int:
                self._seen = await bump_policy_version(session, now, past=lost_version + GAP)
                return self._seen

            await record(
                session,
                tenant=None,
                actor=ACTOR,
                method=METHOD,
                resource=RESOURCE,
                now=now,
                before={"policy_version": before, "policy_version_seen": lost_version},
                after={"nodes_fenced": len(nodes), "told_by": node_name(NodeId(told_by)) if told_by else ""},
                bump_policy=bump,
            )
        _log.error(
            "the database was restored to an earlier state: every node registers again, and every token has ended;"
            " see Backup and restore in docs/operating.md",
            policy_version=before,
            policy_version_seen=lost_version,
        )
        return True


async def _version(session: AsyncSession) -> int:
    return (await session.execute(select(models.PolicyState.version))).scalar_one()


def _read(file: Path) -> int:
    """What an earlier process has seen; 0 where there was none, or where the file says nothing sensible."""
    try:
        version = int(file.read_text())
    except (FileNotFoundError, ValueError):
        return 0
    return version if 0 <= version <= _VERSION_MAX else 0
