from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from controlplane.postgres import EmbeddedPostgres, PostgresConfig

# Starts a server, says so, and keeps it until its input ends.
LAUNCHER = """
import sys
from pathlib import Path
from controlplane.postgres import EmbeddedPostgres, PostgresConfig
with EmbeddedPostgres(PostgresConfig(Path(sys.argv[1]), bin_dir=Path(sys.argv[2]) if sys.argv[2:] else None)):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def initialized() -> Iterator[Path]:
    """A data directory that a server has run in, stopped; only to be copied."""
    with tempfile.TemporaryDirectory(prefix="saltern-test-") as name:
        Path(name).chmod(0o755)
        data_dir = Path(name) / "postgres"
        with EmbeddedPostgres(PostgresConfig(data_dir)):
            pass
        yield data_dir


@pytest.fixture
def used_data_dir(initialized: Path, reachable_tmp_path: Path) -> Path:
    """A data directory of one's own that a server has run in, in a tenth of the time that making one takes."""
    subprocess.run(["cp", "-a", initialized, reachable_tmp_path / "postgres"], check=True)
    return reachable_tmp_path / "postgres"


class LauncherProcess:
    """A launcher in a process of its own, to be killed."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self.data_dir = data_dir
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(data_dir), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def launch() -> Iterator[Callable[..., LauncherProcess]]:
    with ExitStack() as stack:

        def launch(data_dir: Path, *arguments: str) -> LauncherProcess:
            launcher = LauncherProcess(data_dir, *arguments)
            stack.callback(launcher.kill)
            return launcher

        yield launch


def postmaster_pid(data_dir: Path) -> int:
    return int((data_dir / "cluster" / "postmaster.pid").read_text().splitlines()[0])


def wait_gone(pidfd: int, timeout_s: float = 30.0) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


@pytest.fixture
def watch() -> Iterator[Callable[[Path], Callable[[], bool]]]:
    """``watch(data_dir)`` holds on to the running postmaster; the result, called, waits until that process is gone."""
    with ExitStack() as stack:

        def watch(data_dir: Path) -> Callable[[], bool]:
            pidfd = os.pidfd_open(postmaster_pid(data_dir))
            stack.callback(os.close, pidfd)

            def end(pidfd: int = pidfd) -> None:
                if not wait_gone(pidfd, 0):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

            stack.callback(end)
            return lambda: wait_gone(pidfd)

        yield watch
