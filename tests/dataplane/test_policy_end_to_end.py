"""A change by an administrator arrives at a node: real services, a real database, the node's own client and core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dataplane.control_client import ControlClient
from dataplane.core.cache import CacheCore
from dataplane.core.lease import Lease
from dataplane.core.usage import NodeUsage, PolicyApplied
from dataplane.registration import Registration
from saltern.admin.v1 import credentials_pb2, quotas_pb2
from saltern.admin_client import ApiKey
from saltern.names import TenantId
from tenants.policy import NodePolicy, TenantPolicy
from tenants.quota import RateLimits
from tenants.tokens import KeySet
from tests.support.control import Control, control_plane, migrate

MIB = 1024 * 1024
ACME = TenantId("acme")


class Sink:
    """A node without doors, which tells when a policy has been applied."""

    def __init__(self) -> None:
        self.core = CacheCore(MIB)
        self.changed = asyncio.Condition()

    @property
    def applied_version(self) -> int:
        return self.core.policy.version

    @property
    def policy(self) -> NodePolicy:
        return self.core.policy

    def apply(
        self, policy: NodePolicy, key_set: KeySet, *, touched: Collection[TenantId] | None = None
    ) -> PolicyApplied:
        applied = self.core.apply_policy(policy, 0, touched=touched)
        asyncio.get_running_loop().create_task(self._tell())
        return applied

    @property
    def settled_version(self) -> int:
        return self.core.settled_version

    def renew(self, lease: Lease) -> None:
        self.core.renew(lease, time.monotonic_ns())

    def usages(self) -> Iterator[NodeUsage]:
        yield self.core.usage()

    async def reaches(self, condition: Callable[[TenantPolicy], bool]) -> TenantPolicy:
        """The policy of acme, once ``condition`` holds of it."""
        async with asyncio.timeout(30), self.changed:
            while True:
                tenant = self.core.policy.tenants.get(ACME)
                if tenant is not None and condition(tenant):
                    return tenant
                await self.changed.wait()

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@pytest.fixture
async def control(postgres: Any, tmp_path: Path) -> AsyncIterator[Control]:
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path / "control") as running:
            await running.redeem()
            await running.add_tenant("acme", "chat", limit_bytes=MIB)
            yield running


@asynccontextmanager
async def node(control: Control, node_id: str, dram_bytes: int) -> AsyncIterator[Sink]:
    sink = Sink()
    key = ApiKey(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id=node_id))
    registration = Registration(node_id, "127.0.0.1:1", "127.0.0.1:2", "", "host", dram_bytes)
    async with ControlClient(str(control.plane.endpoint), key, registration, sink) as client:
        await client.join(5)
        following = asyncio.create_task(client.run())
        try:
            yield sink
        finally:
            following.cancel()
            await asyncio.wait({following})


async def set_rates(control: Control, **rates: int) -> None:
    quota = quotas_pb2.Quota(name="tenants/acme/quota", rates=quotas_pb2.RateLimits(**rates))
    metadata = await control.bearer(control.admin_key)
    await control.quotas.UpdateQuota(quotas_pb2.UpdateQuotaRequest(quota=quota), metadata=metadata)


async def test_rates_arrive_as_shares_and_follow_the_nodes_that_join(control: Control) -> None:
    async with node(control, "node-1", MIB) as first:
        assert (await first.reaches(lambda _: True)).rates == RateLimits()
        await set_rates(control, operations_per_s=1000, bytes_per_s=1)
        whole = await first.reaches(lambda tenant: tenant.rates.operations_per_s > 0)
        assert whole.rates == RateLimits(operations_per_s=1000, bytes_per_s=1)
        async with node(control, "node-2", 3 * MIB) as second:
            part = await first.reaches(lambda tenant: tenant.rates.operations_per_s == 250)
            assert part.rates.bytes_per_s == 1  # 0 would lift the limit (I4)
            assert (await second.reaches(lambda _: True)).rates == RateLimits(operations_per_s=750, bytes_per_s=1)
            await set_rates(control)
            for sink in (first, second):
                await sink.reaches(lambda tenant: tenant.rates == RateLimits())
