"""Reports of nodes become usage, in the transaction of the report itself: books and meters are stored, or neither (I8).

What was reported last is remembered between reports, because nearly all of it comes again unchanged, and only what is
new is stored (:class:`Difference`). The row of the process says whether it is still so, since another control plane may
have taken in a report meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.metering import Process, Reading, Subject, take_in
from controlplane.db import models
from controlplane.metering.readings import decode_readings, parse_counters_id
from controlplane.metering.store import (
    add_to_hours,
    lock_process,
    read_open_from_s,
    read_process,
    to_unix_s,
    write_meters,
    write_process,
)
from saltern.errors import InvalidArgumentError
from saltern.names import NodeId, TenantId
from saltern.node.v1 import node_pb2
from tenants.quota import Tier

#: Processes that are remembered; more nodes than so cost a read of their meters with each report.
_PROCESSES_MAX: Final = 64

_TenantReadings: TypeAlias = tuple[tuple[Subject, Reading], ...]


@dataclass(frozen=True, slots=True)
class Registration:
    """Of one node: nobody else stores what it reports before the next one."""

    node: NodeId
    node_uid: UUID
    fencing_epoch: int


@dataclass(slots=True)
class _Remembered:
    """A process as of ``write_id``.

    Attributes:
        registration: of its node, under which its last report came.
        reported: what that said of each tenant, as bytes and decoded.
    """

    write_id: UUID
    registration: Registration
    process: Process
    reported: Mapping[str, tuple[bytes, _TenantReadings]]


@dataclass(frozen=True, slots=True)
class Difference:
    """What a report says that is not stored.

    Attributes:
        said: all that it says, as :func:`encode_tenants` gives it.
        changed: what it says of tenants that is new.
        gone: tenants that it names no more; None: nobody knows what is stored, and ``changed`` is all that it says.
        row, known: of the process; None for a new one, and one that was reported to another control plane.
    """

    registration: Registration

    report: node_pb2.ReportUsageRequest
    said: Mapping[str, bytes]
    changed: Sequence[node_pb2.TenantUsage]
    gone: frozenset[TenantId] | None = None
    row: models.MeteredProcess | None = None
    known: _Remembered | None = None


class MeterIntake:
    """Takes in the reports of every node that reports to this control plane."""

    def __init__(self) -> None:
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()

    async def take_in(
        self,
        session: AsyncSession,
        registration: Registration,
        report: node_pb2.ReportUsageRequest,
        now: datetime,
        capacities_bytes: Mapping[Tier, int],
    ) -> None:
        """:meth:`differ`, then :meth:`book`."""
        difference = await self.differ(session, registration, report, encode_tenants(report))
        if difference is not None:
            await self.book(session, difference, now, capacities_bytes)

    async def differ(
        self,
        session: AsyncSession,
        registration: Registration,
        report: node_pb2.ReportUsageRequest,
        said: Mapping[str, bytes],
    ) -> Difference | None:
        """What ``report`` says that is not stored yet; None for one that is late or repeated.

        Args:
            session: the report's transaction, in which all of that is to be stored. The node's row is locked, and the
                report's fencing epoch current. It holds the process to its end.
            said: the report as :func:`encode_tenants` gives it.

        Raises:
            InvalidArgumentError: INVALID_NODE_FIELD.
        """
        if not report.counters_id or report.sequence <= 0:
            return Difference(registration, report, said, report.tenants)  # a node of an earlier version
        counters_id = parse_counters_id(report.counters_id)
        row = await lock_process(session, counters_id)
        if row is None:
            return Difference(registration, report, said, report.tenants)
        if row.node_id != registration.node:
            raise InvalidArgumentError(
                f"the counters {counters_id} are those of another node",
                reason="INVALID_NODE_FIELD",
                hint="each process makes the id of its counters at random",
                metadata={"field": "counters_id"},
            )
        if report.sequence <= row.sequence:
            return None
        known = self._remembered.get(counters_id)
        if known is None or known.write_id != row.write_id:
            return Difference(registration, report, said, report.tenants, row=row)
        if known.registration != registration:
            # Another process may have reported for the node since, or the node was removed with all that was stored.
            return Difference(registration, report, said, report.tenants, row=row, known=known)
        before = known.reported
        return Difference(
            registration,
            report,
            said,
            [usage for usage in report.tenants if _is_news(usage, said, before)],
            frozenset(TenantId(tenant) for tenant in before if tenant not in said),
            row,
            known,
        )

    async def book(
        self, session: AsyncSession, difference: Difference, now: datetime, capacities_bytes: Mapping[Tier, int]
    ) -> None:
        """Book what a report adds; nothing for one that does not say what it counts.

        Args:
            session: as in :meth:`differ`, which has given ``difference``; the report has passed
                :class:`controlplane.node.decode.ReportChecker`.
            now: when it came, by the control plane's clock.
            capacities_bytes: of the node: more than that no tenant holds there, whatever the node says.

        Raises:
            InvalidArgumentError: INVALID_NODE_FIELD.
        """
        report, said, row, known = difference.report, difference.said, difference.row, difference.known
        if not report.counters_id or report.sequence <= 0:
            return
        counters_id = report.counters_id
        self._remembered.pop(counters_id, None)
        reported: dict[str, tuple[bytes, _TenantReadings]] = {}
        if known is not None:
            process = known.process
            reported.update((tenant, known.reported[tenant]) for tenant in said if tenant in known.reported)
        else:
            process = Process() if row is None else await read_process(session, row)
        for usage in difference.changed:
            readings = tuple(decode_readings(usage, capacities_bytes))
            reported[usage.tenant_id] = (said[usage.tenant_id], readings)
        open_from_s = await read_open_from_s(session)
        of_all = dict(pair for _, pairs in reported.values() for pair in pairs)
        taken = take_in(process, report.sequence, to_unix_s(now), open_from_s, of_all)
        if taken is None:
            return
        write_id = await write_process(session, row, counters_id, difference.registration.node, taken.process)
        await write_meters(session, counters_id, taken.changed, taken.gone)
        await add_to_hours(session, counters_id, taken.booked)
        # If this transaction comes to nothing, the row keeps another write_id, and this is forgotten.
        self._remembered[counters_id] = _Remembered(write_id, difference.registration, taken.process, reported)
        while len(self._remembered) > _PROCESSES_MAX:
            self._remembered.popitem(last=False)


def encode_tenants(report: node_pb2.ReportUsageRequest) -> dict[str, bytes]:
    """What a report says of each tenant, byte for byte the same where it says the same."""
    return {usage.tenant_id: usage.SerializeToString(deterministic=True) for usage in report.tenants}


def _is_news(
    usage: node_pb2.TenantUsage, said: Mapping[str, bytes], before: Mapping[str, tuple[bytes, _TenantReadings]]
) -> bool:
    known = before.get(usage.tenant_id)
    # Without a uid it may be another tenant of the name, of which nothing is stored.
    return known is None or known[0] != said[usage.tenant_id] or not usage.tenant_uid
