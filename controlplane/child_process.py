"""One server process under supervision: started, awaited until it serves, watched, stopped.

A child ends with its parent, also with a killed one: the kernel sends it SIGINT then (``exec_shim.py``). It runs in a
session of its own, so that Ctrl-C in the terminal reaches the supervisor alone, which stops its children in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from controlplane.postgres.account import ServerAccount
from controlplane.postgres.process import shim_command
from saltern.errors import DeadlineExceededError, InternalError

#: Far beyond any healthy start, for emulated machines too: a process that fails to start ends, and is noticed then.
READY_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 20.0
TAIL_LINES: Final = 12
_READY_POLL_S: Final = 0.02
_LOG_MAX_BYTES: Final = 16 * 1024 * 1024
_TAIL_MAX_BYTES: Final = 8192


class ChildProcess:
    """A child and its log file. Start it with :meth:`start`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, log_start_bytes: int) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._log_start_bytes = log_start_bytes
        self._exited = asyncio.create_task(process.wait(), name=f"exit of {name}")

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path
    ) -> ChildProcess:
        """Run ``python -m saltern ARGUMENTS``; both output streams are appended to ``log``.

        Args:
            environment: added to our own. Secrets go here: everybody on the host can read a command line.
        """
        account = ServerAccount("ourselves", os.geteuid(), os.getegid())
        # -P: a folder named saltern in the working directory is not the package.
        command = shim_command(account, [sys.executable, "-P", "-m", "saltern", *arguments])
        with _open_log(log) as file:
            start_bytes = file.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **environment},
                cwd="/",
                start_new_session=True,
            )
        return cls(name, process, log, start_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, ready_file: Path) -> dict[str, Any]:
        """What the child writes to ``ready_file`` once it serves.

        Raises:
            InternalError: it ended before; see :meth:`failure`.
            DeadlineExceededError: it is not ready within :data:`READY_TIMEOUT_S`.
        """
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not self._exited.done():
                    content = read_ready_file(ready_file)
                    if content is not None and content.get("pid") == self.pid:
                        return content
                    await asyncio.wait({self._exited}, timeout=_READY_POLL_S)
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self.name} is not ready after {READY_TIMEOUT_S:.0f} s",
                reason="CHILD_NOT_READY",
                hint=f"look into {self._log}",
            ) from None
        raise self.failure()

    async def ended(self) -> ChildProcess:
        """This child, when it has ended."""
        await asyncio.wait({self._exited})
        return self

    def failure(self) -> InternalError:
        """The error that says how the child ended, although nobody asked it to."""
        status = self._process.returncode
        how = f"exit status {status}"
        if status is not None and status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        return InternalError(
            f"{self.name} ended by itself ({how})", reason="CHILD_ENDED", hint=f"its whole log is {self._log}"
        )

    def log_tail(self) -> list[str]:
        """The last lines that the child has written since it was started."""
        return log_tail(self._log, self._log_start_bytes)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Ask the child to stop; kill it after 20 s, or as soon as ``hurry`` is set. Returns when it has ended."""
        if not self._exited.done():
            self._process.send_signal(signal.SIGTERM)
            hurrying = asyncio.create_task(hurry.wait())
            await asyncio.wait({self._exited, hurrying}, timeout=STOP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()
        if not self._exited.done():
            self._process.kill()
        await self._exited


def log_tail(log: Path, start_bytes: int = 0) -> list[str]:
    """The last lines of a log, none from before ``start_bytes``."""
    size_bytes = log.stat().st_size
    with log.open("rb") as file:
        file.seek(max(start_bytes, size_bytes - _TAIL_MAX_BYTES))
        return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


async def process_ended(pid: int) -> None:
    """Return when process ``pid``, which need not be a child, has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)  # a pidfd becomes readable when its process ends
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def read_ready_file(path: Path) -> dict[str, Any] | None:
    """The content of a ready file; None while there is none."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    assert isinstance(content, dict), f"{path} holds an object"
    return content


def _open_log(path: Path) -> BinaryIO:
    """Open a log (0600) to append; one that has grown large is moved aside."""
    if path.exists() and path.stat().st_size > _LOG_MAX_BYTES:
        path.replace(path.with_suffix(".log.1"))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")
