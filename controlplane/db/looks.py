"""A look at the database itself: how far away it is, whether it takes writes, and whose schema it has."""

from __future__ import annotations

from time import perf_counter

from sqlalchemy import text

import migrations
from controlplane.core.readiness import DatabaseSeen, Schema
from controlplane.db.session import Database

_READ_ONLY = text("SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean")
_SCHEMA = text(migrations.SCHEMA_QUERY)


async def look_at(database: Database) -> DatabaseSeen:
    """Look once; raises as ``Database.transaction`` does."""
    async with database.transaction() as session:
        began_s = perf_counter()
        is_read_only = bool((await session.execute(_READ_ONLY)).scalar_one())
        round_trip_ms = (perf_counter() - began_s) * 1000
        found, comment = (await session.execute(_SCHEMA)).one()
    schema = Schema(migrations.schema_fit(found, comment).value)
    return DatabaseSeen(round_trip_ms, is_read_only=is_read_only, schema=schema)
