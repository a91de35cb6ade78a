"""A private Saltern: ``saltern up`` as a child process, on free ports, in a folder that goes with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from saltern.cli.failure import one_line
from saltern.cli.stack import read_run_file
from saltern.errors import FailedPreconditionError, SalternError, UnavailableError

#: Far beyond any healthy start, for emulated machines too: a start that fails is noticed at once, by its exit code.
START_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05
_LOG_TAIL_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a running stack is: what its run.json says."""

    control: str
    admin_api_key_file: Path
    wire_endpoint: str
    grpc_endpoint: str
    node_pid: int


@dataclass(frozen=True, slots=True)
class RunningUp:
    """A running ``saltern up``: its folder, which is removed with it, and what its run.json says."""

    folder: Path
    run: Mapping[str, Any]


@contextlib.contextmanager
def running_stack(*, dram_bytes: int, environment: Mapping[str, str]) -> Iterator[Stack]:
    """Start a stack with one node, yield it when it serves, stop it and remove its data at the end of the block.

    Raises:
        UnavailableError: it did not start; the hint holds the last line that it said.
    """
    with running_up(("--dram", str(dram_bytes), "--nodes", "1"), environment=environment) as up:
        node = up.run["nodes"][0]
        yield Stack(
            control=up.run["control_endpoint"],
            admin_api_key_file=Path(up.run["admin_api_key_file"]),
            wire_endpoint=node["wire_endpoint"],
            grpc_endpoint=node["grpc_endpoint"],
            node_pid=node["pid"],
        )


@contextlib.contextmanager
def running_up(options: Sequence[str], *, environment: Mapping[str, str], purpose: str = "demo") -> Iterator[RunningUp]:
    """Run ``saltern up OPTIONS`` for the time of the block; it is stopped and gone afterwards, also after kill -9.

    Raises:
        UnavailableError, FailedPreconditionError: as :func:`running_stack`.
    """
    # Postgres refuses to run as root and then runs as another user, who must be able to pass through this folder.
    folder = Path(tempfile.mkdtemp(prefix=f"saltern-{purpose}-"))
    data_dir, log_path = folder / "data", folder / "up.log"
    try:
        folder.chmod(0o755)
        with log_path.open("wb") as log:
            process = start_bound(
                folder, ("up", "--data-dir", str(data_dir), *options, "--ports", "auto"), log, environment
            )
        try:
            yield RunningUp(folder, _wait_ready(process, data_dir, log_path))
        finally:
            _stop(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_bound(
    folder: Path, arguments: Sequence[str], log: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Run ``saltern ARGUMENTS``, which ends when this process does; ``folder`` is removed if that was by kill -9."""
    return subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
        [sys.executable, "-P", "-m", "saltern.demo.bound_child", str(os.getpid()), str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**_clean_environment(), **environment},
        # Ctrl-C is for us: we then stop what we started in order, instead of all at once.
        start_new_session=True,
    )


def _clean_environment() -> dict[str, str]:
    """Our environment without settings of another stack: a private one has its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}


def _wait_ready(process: subprocess.Popen[bytes], data_dir: Path, log_path: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if (data_dir / "run.json").exists():
            return read_run_file(data_dir)
        if process.poll() is not None:
            raise _start_error(f"`saltern up` ended with exit code {process.returncode} instead of serving", log_path)
        time.sleep(_POLL_S)
    raise _start_error(f"`saltern up` did not serve within {START_TIMEOUT_S:g} s", log_path)


def _start_error(message: str, log_path: Path) -> SalternError:
    tail = log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
    said = [line for line in tail.splitlines() if line.startswith(("error:", "hint:"))] or tail.splitlines()[-1:]
    if "SERVER_NOT_INSTALLED" in tail or "saltern-server is not installed" in tail:
        return FailedPreconditionError(
            "this runs a server, and saltern-server is not installed here",
            reason="SERVER_NOT_INSTALLED",
            hint="pip install 'saltern-server[embedded]' into this environment",
        )
    return UnavailableError(message, reason="STACK_NOT_STARTED", hint=one_line("; ".join(said)) or "run `saltern up`")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # Its children watch it and die with it.
        process.kill()
        process.wait()
