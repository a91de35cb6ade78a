"""``saltern serve node`` as a process of its own, for tests with a real control plane."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saltern.copy_tuning import tuned
from tests.support.wire_client import WireClient

#: Far more than a start or an end takes; a machine that is busy with other things may make them slow.
DEADLINE_S = 100


class NodeProcess:
    """A node; ``ready`` waits until it serves."""

    def __init__(self, process: subprocess.Popen[str], ready_file: Path) -> None:
        self.process = process
        self.ready_file = ready_file

    async def ready(self) -> dict[str, Any]:
        """The ready file, once it is there."""
        async with asyncio.timeout(DEADLINE_S):
            while self.process.poll() is None:
                if self.ready_file.exists():
                    ready: dict[str, Any] = json.loads(self.ready_file.read_text())
                    assert ready["pid"] == self.process.pid
                    return ready
                await asyncio.sleep(0.02)
        raise AssertionError(self.process.communicate()[1])

    async def end(self) -> tuple[int, str]:
        """Exit code and everything on stderr."""
        _, printed = await asyncio.to_thread(self.process.communicate, timeout=DEADLINE_S)
        return self.process.returncode, printed


@contextmanager
def serve_node(
    folder: Path, control: str, secret: str | None, *arguments: str, node_id: str = "node-1"
) -> Iterator[NodeProcess]:
    """Run a node until the end of the block; ``secret`` is the API key that it gets."""
    folder.mkdir(exist_ok=True)
    key_file, ready_file = folder / "node.key", folder / "ready.json"
    if secret is not None:
        key_file.write_text(secret)
    command = [sys.executable, "-m", "saltern", "serve", "node", "--node-id", node_id, "--control", control]
    command += ["--api-key-file", str(key_file), "--state-dir", str(folder), "--ready-file", str(ready_file)]
    command += ["--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    command += ["--dram-bytes", "32MiB", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    clean |= tuned()  # as `saltern up` does, so that the process does not start itself again
    with subprocess.Popen(command, env=clean, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield NodeProcess(process, ready_file)
        finally:
            process.kill()


def connect(endpoint: str) -> WireClient:
    """A connection to the wire protocol's TCP door."""
    host, port = endpoint.rsplit(":", 1)
    return WireClient(socket.create_connection((host, int(port)), timeout=10))
