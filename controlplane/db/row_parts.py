"""Many rows of one select, fetched in parts: between two parts others have the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeVarTuple

from sqlalchemy import Row, Select, text
from sqlalchemy.ext.asyncio import AsyncSession

#: At most one is open in a transaction, and ends with it.
_CURSOR: Final = "row_parts"

Columns = TypeVarTuple("Columns")


async def in_parts(
    session: AsyncSession, statement: Select[*Columns], rows_at_once: int
) -> AsyncIterator[Sequence[Row[*Columns]]]:
    """The rows of ``statement``, which has no parameters, as of now: at most ``rows_at_once`` in a part.

    ``AsyncSession.stream`` would do the same with a cursor object of the driver, which SQLAlchemy leaves open where the
    task is cancelled in the middle of a statement. Here the cursor is the database's alone: whatever ends the
    transaction ends it (https://www.postgresql.org/docs/15/sql-declare.html). Two at a time in one transaction are
    refused by the database.
    """
    connection = await session.connection()
    select = statement.compile(dialect=connection.dialect)
    assert not select.params, "a cursor is declared without parameters"
    await connection.exec_driver_sql(f"DECLARE {_CURSOR} NO SCROLL CURSOR FOR {select}")
    fetch = text(f"FETCH FORWARD {rows_at_once} FROM {_CURSOR}").columns(*statement.selected_columns)
    while rows := (await session.execute(fetch)).all():
        yield rows
    await connection.exec_driver_sql(f"CLOSE {_CURSOR}")
