"""A node process, scraped while its control plane comes and goes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from saltern.endpoints import Endpoint
from tests.dataplane.test_node_process import connect, node_key, serve_node, writer_token
from tests.support.control import control_plane, migrate
from tests.support.scraping import Scrape, readiness
from tests.support.wire_client import block, key

DEADLINE_S = 40


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def test_i9_a_node_without_its_control_plane_is_degraded_and_ready_and_tells_so(  # type: ignore[no-untyped-def]
    postgres, tmp_path: Path
) -> None:
    with postgres.fresh_database(migrate) as database, ExitStack() as stack:
        async with control_plane(database, tmp_path / "control") as first:
            await first.redeem()
            await first.add_tenant("acme", "chat", limit_bytes=16 * 1024 * 1024)
            token, endpoint, secret = await writer_token(first), first.plane.endpoint, await node_key(first)
            node = stack.enter_context(serve_node(tmp_path / "node", str(endpoint), secret))
            metrics = (await node.ready())["metrics_endpoint"]
            assert await asyncio.to_thread(readiness, metrics) == (200, "ready", [])
            assert (await asyncio.to_thread(Scrape, metrics)).value("control_connected") == 1
        await until(lambda: readiness(metrics) == (200, "degraded", ["CONTROL_PLANE_LOST"]))
        with connect((await node.ready())["wire_endpoint"]) as client:
            await asyncio.to_thread(client.hello, token)
            assert client.put({key(1): block(1)}).codes == b"\x00"
        await until(lambda: Scrape(metrics).value("put_bytes_total", tenant="acme") == 4096)
        page = await asyncio.to_thread(Scrape, metrics, openmetrics=True)
        assert page.value("control_connected") == 0
        assert page.value("health_state", state="degraded") == 1
        assert (page.value("policy_version") or 0) > 0 and (page.value("policy_applied_timestamp_seconds") or 0) > 0
        assert page.value("limit_bytes", tenant="acme", tier="dram") == 16 * 1024 * 1024
        listen = Endpoint(endpoint.host, endpoint.port)
        async with control_plane(database, tmp_path / "control", listen=listen):
            await until(lambda: readiness(metrics) == (200, "ready", []))
            node.process.send_signal(signal.SIGTERM)
            status, printed = await node.end()
        assert status == 0, printed
        assert all(held not in printed + page.text for held in (token, secret))
