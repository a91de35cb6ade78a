"""Wraps anew what is under retired keys, a batch at a time, and counts what is under each key.

A batch is one transaction: rows are locked, opened with the old key, wrapped with the current one and written. A crash
at any moment leaves each row under one key or the other, and since each says under which, the next batch begins where
the last one ended. Rows that others hold are passed over and come with the next pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from sqlalchemy import bindparam, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.key_encryption.registry import WRAPPED_COLUMNS, WrappedColumn
from controlplane.secrets import Keyring
from saltern.errors import DataLossError

#: Rows of one transaction: some tens of milliseconds of locks.
BATCH_ROWS: Final = 200

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch did.

    Attributes:
        damaged: rows that do not open; they stay as they are.
        is_last: the table has no more of them, but for rows that others held.
    """

    table: str
    rewrapped: int
    damaged: int
    is_last: bool


@dataclass(slots=True)
class Pass:
    """A way through every column: where it is. A new one begins from the start."""

    left: list[WrappedColumn] = field(default_factory=lambda: list(WRAPPED_COLUMNS))
    after: tuple[Any, ...] | None = None

    @property
    def is_over(self) -> bool:
        return not self.left

    async def next_batch(
        self, session: AsyncSession, keyring: Keyring, retired: Collection[str], *, limit_rows: int
    ) -> Batch:
        """Wrap the next rows that are under one of ``retired`` with the current key, in the caller's transaction.

        Raises:
            FailedPreconditionError: reason WRONG_KEY_ENCRYPTION_KEY: a key that is needed is not loaded.
        """
        column = self.left[0]
        found = (await session.execute(self._statement(column, retired, limit_rows))).all()
        keys = len(column.primary_key)
        changed: list[dict[str, object]] = []
        for row in found:
            key, wrapped, context = row[:keys], bytes(row[keys]), column.context(*row[keys + 1 :])
            try:
                secret = await keyring.unwrap(wrapped, context)
            except DataLossError as error:
                # One damaged row must not keep all others under a key that may have leaked.
                _log.error("wrapped secret damaged", table=column.table, reason=error.reason)
                continue
            anew = await keyring.wrap(secret, context)
            changed.append({f"key_{n}": part for n, part in enumerate(key)} | {"old": wrapped, "new": anew})
        if changed:
            connection = await session.connection()
            await connection.execute(_update(column), changed)
        is_last = len(found) < limit_rows
        self.after = None if is_last else tuple(found[-1][:keys])
        if is_last:
            self.left.pop(0)
        return Batch(column.table, len(changed), len(found) - len(changed), is_last)

    def _statement(self, column: WrappedColumn, retired: Collection[str], limit_rows: int) -> Any:
        statement = column.rows().where(column.column.is_not(None), column.key_id.in_(list(retired)))
        if self.after is not None:
            statement = statement.where(tuple_(*column.primary_key) > tuple_(*self.after))
        return (
            statement.order_by(*column.primary_key)
            .limit(limit_rows)
            .with_for_update(skip_locked=True, of=column.column.class_)
        )


def _update(column: WrappedColumn) -> Any:
    table = column.column.class_.__table__
    rows = [key == bindparam(f"key_{n}") for n, key in enumerate(column.primary_key)]
    # The row is locked, so it is what was read; that it still says so is the second look.
    wrapped = table.c[column.column.key]
    return update(table).where(*rows, wrapped == bindparam("old")).values({wrapped: bindparam("new")})


async def count_wrapped(session: AsyncSession) -> dict[str, Counter[str]]:
    """How many secrets are under each key, by key id and then by table, as the caller's transaction sees it."""
    counts: dict[str, Counter[str]] = {}
    for column in WRAPPED_COLUMNS:
        statement = select(column.key_id, func.count()).where(column.column.is_not(None)).group_by(column.key_id)
        for key_id, count in await session.execute(statement):
            counts.setdefault(key_id, Counter())[column.table] += count
    return counts
