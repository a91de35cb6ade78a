"""Answers of nodes to pushes, stored many in one transaction: all nodes answer a change within a few milliseconds.

::

    answer of node-1 ─┐
    answer of node-2 ─┼─> waiting ─> one transaction ─> every stream goes on; who waits for a policy looks once
    answer of node-3 ─┘      ^                                           |
                             '──── those that came meanwhile are next <──'

Nobody waits for more to come: an answer that comes alone has a transaction of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import select

from controlplane.db import Database, models
from controlplane.node import registry
from controlplane.node.lease_keeper import LeaseKeeper
from controlplane.node.policy_feed import PolicyFeed
from saltern.errors import AbortedError
from saltern.names import NodeId

#: Stored in one transaction.
BATCH_MAX: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What one node says of itself.

    Attributes:
        stored: done when it is stored; fails as storing it did.
    """

    node: NodeId
    fencing_epoch: int
    applied_version: int
    settled_version: int
    stored: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AnswerBook:
    """Stores the answers that come to this process."""

    def __init__(self, database: Database, feed: PolicyFeed, keeper: LeaseKeeper) -> None:
        self._database = database
        self._feed = feed
        self._keeper = keeper
        self._waiting: list[Answer] = []
        self._storing: asyncio.Task[None] | None = None

    async def store(self, answer: Answer) -> None:
        """Return when ``answer`` is stored, and everybody is woken who waits for it.

        Raises:
            AbortedError: FENCED. sqlalchemy.exc.DBAPIError: the database; the node answers again when it is back.
        """
        self._waiting.append(answer)
        if self._storing is None:
            self._storing = asyncio.create_task(self._store_all(), name="answers of nodes")
        await answer.stored

    async def _store_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
                try:
                    refused = await self._store_batch(batch)
                except Exception as error:
                    _fail(batch, error)
                    continue
                for answer in batch:
                    if answer.stored.done():
                        continue  # its stream has ended meanwhile
                    if answer in refused:
                        answer.stored.set_exception(refused[answer])
                    else:
                        answer.stored.set_result(None)
        finally:
            self._storing = None

    async def _store_batch(self, batch: Sequence[Answer]) -> dict[Answer, AbortedError]:
        """Store those of current processes; returns why the others are not."""
        refused: dict[Answer, AbortedError] = {}
        has_settled = False
        async with self._database.transaction() as session:
            statement = select(models.Node).where(models.Node.id.in_({answer.node for answer in batch}))
            # In the order of their ids, as everybody who holds several.
            held = await session.scalars(statement.order_by(models.Node.id).with_for_update(key_share=True))
            rows = {row.id: row for row in held}
            for answer in batch:
                try:
                    row = registry.require_epoch(rows.get(answer.node), answer.node, answer.fencing_epoch)
                except AbortedError as error:
                    refused[answer] = error
                    continue
                registry.go_by(row, answer.applied_version)
                has_settled |= registry.settle(row, answer.settled_version)
        await self._feed.answered()
        if has_settled:
            self._keeper.wake()
        return refused


def _fail(batch: Sequence[Answer], error: Exception) -> None:
    for answer in batch:
        if not answer.stored.done():
            answer.stored.set_exception(error)
