"""Reports of nodes become usage, in the transaction of the report itself: both are stored, or neither is (I8).

What was reported last is remembered between reports, because nearly all of it comes again unchanged; the row of the
process says whether it is still so, since another control plane may have taken in a report meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.metering import Process, Reading, Subject, take_in
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
from saltern.names import NodeId
from saltern.node.v1 import node_pb2
from tenants.quota import Tier

#: Processes that are remembered; more nodes than so cost a read of their meters with each report.
_PROCESSES_MAX: Final = 64

_TenantReadings: TypeAlias = tuple[tuple[Subject, Reading], ...]


@dataclass(slots=True)
class _Remembered:
    """A process as of ``write_id``. ``reported``: what its last report said of each tenant, as bytes and decoded."""

    write_id: UUID
    process: Process
    reported: dict[str, tuple[bytes, _TenantReadings]] = field(default_factory=dict)


class MeterIntake:
    """Takes in the reports of every node that reports to this control plane."""

    def __init__(self) -> None:
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()

    async def take_in(
        self,
        session: AsyncSession,
        node: NodeId,
        report: node_pb2.ReportUsageRequest,
        now: datetime,
        capacities_bytes: Mapping[Tier, int],
    ) -> None:
        """Book what ``report`` adds; nothing for one that is late or repeated, or that does not say what it counts.

        Args:
            session: the report's transaction. The node's row is locked, and the report's fencing epoch current.
            report: has passed :func:`controlplane.node.decode.decode_books`.
            now: when it came, by the control plane's clock.
            capacities_bytes: of the node: more than that no tenant holds there, whatever the node says.

        Raises:
            InvalidArgumentError: INVALID_NODE_FIELD.
        """
        if not report.counters_id or report.sequence <= 0:
            return  # a node of an earlier version
        counters_id = parse_counters_id(report.counters_id)
        row = await lock_process(session, counters_id)
        if row is not None and row.node_id != node:
            raise InvalidArgumentError(
                f"the counters {counters_id} are those of another node",
                reason="INVALID_NODE_FIELD",
                hint="each process makes the id of its counters at random",
                metadata={"field": "counters_id"},
            )
        known = self._remembered.pop(counters_id, None)
        if row is None or known is None or known.write_id != row.write_id:
            process = Process() if row is None else await read_process(session, row)
            reported: dict[str, tuple[bytes, _TenantReadings]] = {}
        else:
            process, reported = known.process, known.reported
        reported = _decode(report, reported, capacities_bytes)
        readings = dict(pair for _, pairs in reported.values() for pair in pairs)
        open_from_s = await read_open_from_s(session)
        taken = take_in(process, report.sequence, to_unix_s(now), open_from_s, readings)
        if taken is None:
            return
        write_id = await write_process(session, row, counters_id, node, taken.process)
        await write_meters(session, counters_id, taken.changed, taken.gone)
        await add_to_hours(session, counters_id, taken.booked)
        # If this transaction comes to nothing, the row keeps another write_id, and this is forgotten.
        self._remembered[counters_id] = _Remembered(write_id, taken.process, reported)
        while len(self._remembered) > _PROCESSES_MAX:
            self._remembered.popitem(last=False)


def _decode(
    report: node_pb2.ReportUsageRequest,
    before: dict[str, tuple[bytes, _TenantReadings]],
    capacities_bytes: Mapping[Tier, int],
) -> dict[str, tuple[bytes, _TenantReadings]]:
    """Decode what is not the same as in the report before, byte for byte."""
    reported = {}
    for usage in report.tenants:
        encoded = usage.SerializeToString(deterministic=True)
        known = before.get(usage.tenant_id)
        if known is None or known[0] != encoded:
            known = (encoded, tuple(decode_readings(usage, capacities_bytes)))
        reported[usage.tenant_id] = known
    return reported
