"""A database of its own for each test, and reports of nodes to take in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from controlplane.db import Database, PlatformScope, connect
from controlplane.metering import HourCloser, MeterIntake, Registration
from saltern.names import NodeId
from saltern.node.v1 import node_pb2
from tenants.quota import Tier
from tests.support.control import migrate

#: An hour that is long over by the database's own clock: only such are closed, and only records so old may be removed.
START = (datetime.now(UTC) - timedelta(days=90)).replace(hour=12, minute=0, second=0, microsecond=0)

REGISTRATION = Registration(NodeId("n1"), UUID(int=1), fencing_epoch=1)
CAPACITIES_BYTES = {Tier.DRAM: 2**53, Tier.SSD: 2**44}


class Metering:
    """A control plane's metering without the control plane, by a clock that the test sets."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now = START
        self.intake = MeterIntake()
        self.closer = HourCloser(database, lambda: self.now)

    async def report(
        self,
        *usages: node_pb2.TenantUsage,
        sequence: int,
        after_s: float = 0,
        counters: int = 1,
        node: str = "n1",
        intake: MeterIntake | None = None,
    ) -> None:
        """Take in a report that comes ``after_s`` after the one before; ``counters`` tells processes apart."""
        self.now += timedelta(seconds=after_s)
        request = node_pb2.ReportUsageRequest(
            node_id=node, counters_id=f"{counters:032x}", sequence=sequence, tenants=usages
        )
        async with self.database.transaction(PlatformScope()) as session:
            registration = replace(REGISTRATION, node=NodeId(node))
            await (intake or self.intake).take_in(session, registration, request, self.now, CAPACITIES_BYTES)


@pytest.fixture
async def metering(postgres: Any) -> AsyncIterator[Metering]:
    with postgres.fresh_database(migrate) as fresh:
        database = connect(fresh.app)
        try:
            yield Metering(database)
        finally:
            await database.close()
