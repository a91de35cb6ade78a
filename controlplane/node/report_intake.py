"""What nodes report of their tenants, taken in apart from their leases: the one may take seconds, the other must not.

::

    ReportUsage ── lease, versions: one row ──> committed ──> answered, within ``ANSWER_WITHIN_S`` of that
                                                    │              ^
                                                    └─> books and meters, of the newest report ──────┘ if they are done

Where 10,000 tenants all move, books and meters of one report take a second of CPU, and more of the database. A node
that waited for that would let its lease run out, and every node with it. So each node has one report at work and one
that waits; a newer one takes the place of that. Nothing is lost by it: books are absolute, and counters too (I8). Of
what has not changed since the last one nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import structlog

from controlplane.db import Database
from controlplane.metering import MeterIntake, Registration
from controlplane.node import registry
from controlplane.node.books import write_books
from controlplane.node.decode import decode_books
from controlplane.rpc import to_saltern_error
from saltern.names import NodeId
from saltern.node.v1 import node_pb2

#: So long an answer waits for what it reported to be stored, so that whoever asks next sees it; then it goes out.
ANSWER_WITHIN_S: Final = 1.0
#: Longest wait for reports at work when the process stops.
FINISH_WITHIN_S: Final = 5.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """A report whose lease is renewed.

    Attributes:
        said: what it says of each tenant, checked and encoded.
        came: by the control plane's clock.
        stored: done when it is stored, or overtaken by a newer one; fails as storing it did.
    """

    node: NodeId
    message: node_pb2.ReportUsageRequest
    said: Mapping[str, bytes]
    came: datetime
    stored: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ReportIntake:
    """Stores reports: of each node one at a time, and always the newest next."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._metering = MeterIntake()
        self._waiting: dict[NodeId, Report] = {}
        self._working: dict[NodeId, asyncio.Task[None]] = {}

    async def take_in(self, report: Report) -> None:
        """Store ``report``; return when that is done, or after ``ANSWER_WITHIN_S`` while it goes on.

        Raises:
            SalternError: it is not one to be stored: INVALID_NODE_FIELD, FENCED.
            sqlalchemy.exc.DBAPIError: it could not be stored; the node's next report makes up for it.
        """
        overtaken = self._waiting.get(report.node)
        if overtaken is not None and not overtaken.stored.done():
            overtaken.stored.set_result(None)
        self._waiting[report.node] = report
        if report.node not in self._working:
            self._working[report.node] = asyncio.create_task(self._work(report.node), name=f"reports of {report.node}")
        await asyncio.wait({report.stored}, timeout=ANSWER_WITHIN_S)
        if report.stored.done():
            report.stored.result()

    async def finish(self) -> None:
        """Return when everything that was answered is stored, in ``FINISH_WITHIN_S`` at the latest.

        What is given up then is rolled back, and the node's next report, to whichever control plane, makes up for it.
        """
        if not self._working:
            return
        _, left = await asyncio.wait(set(self._working.values()), timeout=FINISH_WITHIN_S)
        for task in left:
            task.cancel()
        if left:
            _log.warning("report of a node not stored", node=",".join(map(str, self._working)), reason="STOPPING")
            await asyncio.wait(left)

    async def _work(self, node: NodeId) -> None:
        try:
            while (report := self._waiting.pop(node, None)) is not None:
                try:
                    await self._store(report)
                except Exception as error:
                    self._failed(report, error)
                else:
                    report.stored.set_result(None)
        finally:
            del self._working[node]

    def _failed(self, report: Report, error: Exception) -> None:
        """Whoever still waits is told; the log, whether anybody does or not."""
        reason = to_saltern_error(error, method="ReportUsage").reason
        _log.warning("report of a node not stored", node=report.node, reason=reason)
        report.stored.set_exception(error)
        report.stored.exception()  # looked at: nobody may be left to do so

    async def _store(self, report: Report) -> None:
        """Books and meters in one transaction, so that what is remembered of the one holds for the other (I8)."""
        node, message, said, came = report.node, report.message, report.said, report.came
        async with self._database.transaction() as session:
            row = await registry.hold_epoch(session, node, message.fencing_epoch)
            registration = Registration(node, row.uid, row.fencing_epoch)
            difference = await self._metering.differ(session, registration, message, said)
            if difference is None:
                return
            books = [decode_books(usage) for usage in difference.changed]
            await write_books(session, node, books, came, gone=difference.gone)
            capacities_bytes = registry.capacities_of(row)
            await self._metering.book(session, difference, came, capacities_bytes)
