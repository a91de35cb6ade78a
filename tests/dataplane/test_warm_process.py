"""DRAM over a restart of real processes: SIGTERM keeps it, kill -9 loses all of it, neither ever serves wrong bytes."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from saltern.admin.v1 import tenants_pb2
from tests.dataplane.test_node_process import connect, node_key, refused_soon, serve_node, writer_token
from tests.dataplane.test_node_process import control as control
from tests.support.control import Control
from tests.support.memory_folder import memory_folder
from tests.support.node_process import NodeProcess, node_process
from tests.support.wire_client import WireClient, block, key

MIB = 1024 * 1024
ENTRIES = {key(n): block(n, 60_000 + n) for n in range(100)}
LIVES = 14


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as made:
        yield made / "node-1"


async def test_a_node_that_is_stopped_by_sigterm_serves_its_dram_again(
    control: Control, folder: Path, tmp_path: Path
) -> None:
    arguments = ["--arena-dir", str(folder)]
    secret, endpoint, token = await node_key(control), str(control.plane.endpoint), await writer_token(control)
    for life in range(3):
        with serve_node(tmp_path / "node", endpoint, secret, *arguments) as node:
            ready = await node.ready()
            with connect(ready["wire_endpoint"]) as client:
                await asyncio.to_thread(client.hello, token)
                if life == 0:
                    assert client.put(ENTRIES).codes == bytes(len(ENTRIES))
                assert client.get(*ENTRIES) == ENTRIES
                if life == 2:
                    delete = tenants_pb2.DeleteTenantRequest(name="tenants/acme")
                    await control.tenants.DeleteTenant(delete, metadata=await control.bearer(control.admin_key))
                    await refused_soon(client, "NAMESPACE_NOT_AVAILABLE")
            node.process.send_signal(signal.SIGTERM)
            status, printed = await node.end()
        assert status == 0, printed
        serving = [json.loads(line) for line in printed.splitlines() if '"serving"' in line]
        assert serving[0]["dram"] == ("cold" if life == 0 else "warm with 100 entries, 5.7 MiB")


def session(node: NodeProcess) -> WireClient:
    host, port = node.wire_endpoint.rsplit(":", 1)
    client = WireClient(socket.create_connection((host, int(port)), timeout=20))
    client.hello(node.token)
    return client


def test_i7_kill_9_at_random_moments_leaves_no_wrong_byte(folder: Path) -> None:
    """Lives end at random by a clean stop or by kill -9 under load; the one after is warm or cold accordingly."""
    generator = random.Random(20261129)
    expects_warm = False
    warm_starts = 0
    for _ in range(LIVES):
        is_killed = generator.random() < 0.5
        with node_process(dram_bytes=8 * MIB, arena_dir=folder) as node, session(node) as client:
            assert node.dram_start.startswith("warm with ") == expects_warm, node.dram_start
            warm_starts += expects_warm
            names = [key(generator.randrange(300)) for _ in range(200)]
            found = client.get(*dict.fromkeys(names))
            assert bool(found) == expects_warm
            for name, value in found.items():
                assert value == content(name)
            killer = threading.Timer(generator.random() * 0.05, node.kill) if is_killed else None
            if killer is not None:
                killer.start()
            try:
                for name in names if killer is None else names * 50:
                    client.put({name: content(name)})
                    if generator.random() < 0.2:
                        client.delete(key(generator.randrange(300)))
            except (EOFError, OSError):
                if not is_killed:
                    raise
            if killer is not None:
                killer.join()
        expects_warm = not is_killed
    assert 2 < warm_starts < LIVES - 3


def content(name: bytes) -> bytes:
    """The bytes of a key; sizes differ, so that memory is used again in other shapes."""
    number = int.from_bytes(name, "little")
    return block(number, 1000 + 997 * (number % 90))
