"""A cache node as an operator starts it, beside a control plane of a test."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def real_node(control: str, api_key: str, folder: Path, *, node_id: str = "node-1") -> Iterator[None]:
    """``saltern serve node`` as an operator starts it; ready when the block begins."""
    folder.mkdir(exist_ok=True)
    key_file, ready_file = folder / "node.key", folder / "ready.json"
    key_file.write_text(api_key)
    key_file.chmod(0o600)
    command = [
        *(sys.executable, "-m", "saltern", "serve", "node", "--node-id", node_id, "--control", control),
        *("--api-key-file", str(key_file), "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0"),
        *("--metrics-listen", "off", "--dram-bytes", "32MiB", "--state-dir", str(folder / "state"), "--no-prefault"),
        *("--shm-path", str(folder / "node.sock"), "--ready-file", str(ready_file)),
    ]
    with (folder / "node.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            end_s = time.monotonic() + 60
            while not ready_file.exists():
                assert process.poll() is None and time.monotonic() < end_s, (folder / "node.log").read_text()
                time.sleep(0.02)
            json.loads(ready_file.read_text())
            yield
        finally:
            process.terminate()
            process.wait(30)
