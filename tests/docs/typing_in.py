"""Types commands of the documentation into a shell, against servers that the documentation starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent


#: Metrics have default ports that no page names: another server on this machine may have them.
FREE_PORTS = {f"SALTERN_{name}_METRICS_LISTEN": "127.0.0.1:0" for name in ("CONTROL", "NODE")}


def _environment(**values: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    return {**ours, **FREE_PORTS, "PATH": f"{BIN}:{os.environ['PATH']}", **values}


def type_in(command: str, folder: Path, *, status: int = 0, **environment: str) -> str:
    """Type one command, which must end with ``status``; its output, or a failed test with what it said."""
    done = subprocess.run(
        command, shell=True, cwd=folder, env=_environment(**environment), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def running(command: str, folder: Path, ready: Path, **environment: str) -> Iterator[dict[str, Any]]:
    """Keep a server command running for the block; yields what it announces in its ready file."""
    log = (folder / "log").open("ab")
    process = subprocess.Popen(command.split(), cwd=folder, env=_environment(**environment), stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s, (folder / "log").read_text()
            time.sleep(0.05)  # another process's file: there is no event to wait for
        yield json.loads(ready.read_text())
    finally:
        log.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130), (folder / "log").read_text()
