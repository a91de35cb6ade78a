"""Whether a commit that the database has answered is on its disk (I11): an act that was answered must not be forgotten.

Acts and their audit events are committed together. A server that answers before the log of the transaction is written
(``synchronous_commit=off``) or that never asks the disk to write it (``fsync=off``) forgets the last of both when it is
killed or loses power: a revocation that was confirmed is gone, and no trace is left that there was one.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import text

from controlplane.db.session import Database
from saltern.errors import FailedPreconditionError

#: https://www.postgresql.org/docs/current/runtime-config-wal.html; everything but ``off`` waits for the local disk, and
#: a server without a standby takes ``remote_write`` and ``remote_apply`` for ``on``.
_NEEDED: Final = ("fsync", "synchronous_commit")


async def require_durable_commits(database: Database) -> None:
    """Return if sessions of the service get an answer to a commit only when it is on disk.

    Raises:
        FailedPreconditionError: DATABASE_NOT_DURABLE.
        sqlalchemy.exc.DBAPIError: as ``Database.transaction``.
    """
    async with database.transaction() as session:
        for name in _NEEDED:
            value = await session.scalar(text("SELECT current_setting(:name)"), {"name": name})
            if value == "off":
                raise FailedPreconditionError(
                    f"the database has {name}=off: what it has answered would be lost when it is killed (I11)",
                    reason="DATABASE_NOT_DURABLE",
                    hint=f"set {name}=on for the server; ALTER ROLE ... RESET {name} if the role or the URL sets it",
                    metadata={"setting": name},
                )
