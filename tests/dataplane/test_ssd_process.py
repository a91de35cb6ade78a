"""``saltern serve node`` with an SSD tier, on a real control plane: quota, usage, kill -9, restart, deletion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from saltern.admin.v1 import quotas_pb2, tenants_pb2, usage_pb2
from tests.dataplane.test_node_process import connect, node_key, serve_node, writer_token
from tests.dataplane.test_node_process import control as control
from tests.support.control import Control
from tests.support.live_files import live_sizes
from tests.support.wire_client import WireClient, block, key

MIB = 1024 * 1024
SIZE = 60_000
ENTRIES = {key(n): block(n, SIZE + n) for n in range(120)}
DEADLINE_S = 40


async def set_quotas(control: Control, dram_bytes: int, ssd_bytes: int) -> None:
    tiers = [
        quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=dram_bytes),
        quotas_pb2.TierQuota(tier=quotas_pb2.TIER_SSD, limit_bytes=ssd_bytes),
    ]
    request = quotas_pb2.UpdateQuotaRequest(quota=quotas_pb2.Quota(name="tenants/acme/quota", tiers=tiers))
    await control.quotas.UpdateQuota(request, metadata=await control.bearer(control.admin_key))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def ssd_use_reaches(control: Control, least_bytes: int) -> None:
    request = usage_pb2.GetUsageRequest(tenant="tenants/acme")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            usage = await control.usage.GetUsage(request, metadata=await control.bearer(control.admin_key))
            if any(tier.tier == quotas_pb2.TIER_SSD and tier.used_bytes >= least_bytes for tier in usage.tiers):
                return
            await asyncio.sleep(0.05)


def all_there(client: WireClient) -> bool:
    return client.lookup(*ENTRIES).prefix == len(ENTRIES)


async def test_i7_i8_kill_9_of_a_node_keeps_what_is_on_ssd_and_a_deleted_tenant_leaves_no_file(
    control: Control, tmp_path: Path
) -> None:
    ssd_dir = tmp_path / "ssd"
    arguments = ["--ssd-dir", str(ssd_dir), "--ssd-bytes", "64MiB"]
    secret, endpoint, token = await node_key(control), str(control.plane.endpoint), await writer_token(control)
    with serve_node(tmp_path / "node", endpoint, secret, *arguments) as node:
        ready = await node.ready()
        await set_quotas(control, 2 * MIB, 32 * MIB)
        with connect(ready["wire_endpoint"]) as client:
            await asyncio.to_thread(client.hello, token)
            # Until both quotas have arrived; what a smaller DRAM quota displaces before is only gone.
            await until(lambda: put_all(client) and all_there(client) and on_disk(ssd_dir) > 90 * SIZE)
            await ssd_use_reaches(control, 90 * SIZE)
            on_ssd = on_disk(ssd_dir)
            node.process.kill()
            await node.end()
    assert on_disk(ssd_dir) == on_ssd
    assert not any(value[:4096] in path.read_bytes() for path in ssd_dir.rglob("*.seg") for value in ENTRIES.values())

    node.ready_file.unlink()
    with serve_node(tmp_path / "node", endpoint, secret, *arguments) as node:
        ready = await node.ready()
        with connect(ready["wire_endpoint"]) as client:
            await asyncio.to_thread(client.hello, token)
            found = {name: value for name in ENTRIES for name, value in client.get(name).items()}
            assert len(found) >= 80, "DRAM is lost, SSD is not"
            assert all(ENTRIES[name] == value for name, value in found.items())
            delete = tenants_pb2.DeleteTenantRequest(name="tenants/acme")
            await control.tenants.DeleteTenant(delete, metadata=await control.bearer(control.admin_key))
            await until(lambda: not (ssd_dir / "acme").exists())


def put_all(client: WireClient) -> bool:
    for name, value in ENTRIES.items():
        client.put({name: value})
    return True


def on_disk(folder: Path) -> int:
    return sum(live_sizes(folder, ".seg").values())
