"""The console beside a real node and a real client: what its pages say is what happened."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from saltern.admin.v1 import credentials_pb2, usage_pb2
from saltern.client import Client
from saltern.keys import BlockKey
from saltern.results import Hit, Stored
from tests.controlplane.console.conftest import Console
from tests.support.browser import Browser, browser
from tests.support.real_node import real_node

BLOCK_BYTES, BLOCK_TOKENS = 64 * 1024, 16
#: What the tenant may have, and how many blocks it puts: more than that.
LIMIT_BYTES, PUT = 4 * 1024 * 1024, 100
#: Asked for: the last ones that were put, and some that nobody has put.
ASKED, UNKNOWN = 40, 10
#: What was put had been computed, and so was wanted and not there.
HIT_RATE = f"{100 * ASKED / (ASKED + PUT):.1f} %"
WAIT_S = 60


def keys(first: int, count: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32, "little")) for number in range(first, first + count)]


def work(control: str, secret: str) -> None:
    with Client(control=control, api_key=secret, namespace="chat", deadline_ms=10_000) as client:
        for key in keys(0, PUT):
            (stored,) = client.put_many([(key, bytes(BLOCK_BYTES))])
            assert isinstance(stored, Stored)
        found = client.get_many([*keys(PUT - ASKED, ASKED), *keys(10_000, UNKNOWN)])
        assert sum(isinstance(result, Hit) for result in found) == ASKED


@asynccontextmanager
async def node_beside(control: str, secret: str, folder: Path) -> AsyncIterator[None]:
    """A node in a process of its own, beside a control plane on this event loop."""
    node = real_node(control, secret, folder)
    await asyncio.to_thread(node.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(node.__exit__, None, None, None)


async def shown(visitor: Browser, path: str, *wanted: str) -> str:
    """The text of a page, as soon as it has all of ``wanted``."""
    end_s = time.monotonic() + WAIT_S
    while True:
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", (await visitor.get(path)).text))
        if all(one in text for one in wanted):
            return text
        assert time.monotonic() < end_s, (wanted, text)
        await asyncio.sleep(0.2)


async def test_hits_evictions_and_use_of_a_real_node_are_on_its_pages(console: Console, tmp_path: Path) -> None:
    control = console.control
    endpoint = str(control.plane.endpoint)
    await control.set_quota("acme", limit_bytes=LIMIT_BYTES)
    node_key = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node", node_id="node-1")
    async with (
        node_beside(endpoint, node_key, tmp_path / "node"),
        browser(console.url, console.keys["acme/auditor"]) as auditor,
        browser(console.url, console.keys["platform"]) as platform,
    ):
        await asyncio.to_thread(work, endpoint, console.keys["acme/writer"])
        overview = await shown(
            auditor,
            "/tenants/acme",
            f"Hit rate {HIT_RATE} {ASKED} hits in 24 hours",
            f"Tokens saved {ASKED * BLOCK_TOKENS}",
        )
        request = usage_pb2.GetUsageRequest(tenant="tenants/acme")
        usage = await control.usage.GetUsage(request, metadata=await control.bearer(control.admin_key))
        (dram,) = [tier for tier in usage.tiers if tier.used_bytes]
        evicted = sum(usage.evictions_by_cause.values())
        assert evicted >= PUT - LIMIT_BYTES // BLOCK_BYTES and evicted + dram.entries == PUT
        assert f"Evicted {evicted} " in overview and f"of {PUT} puts" in overview
        assert "At the own limit" in overview and "4 MiB" in overview
        fleet = await shown(platform, "/nodes", "node-1", "live")
        assert "32 MiB" in fleet
        assert HIT_RATE in await shown(platform, "/tenants", "acme")
