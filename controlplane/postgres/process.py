"""Processes of the server: started through the shim, watched and ended through pidfds.

A pidfd names one process for good, so no signal can ever reach a stranger that received a recycled pid.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from controlplane.postgres.account import ServerAccount
from saltern.errors import UnavailableError

_SHIM = Path(__file__).with_name("exec_shim.py")
# Nothing of the caller's environment may steer the server (PG*, LD_LIBRARY_PATH, locale); messages stay parseable.
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}

_KILL_TIMEOUT_S = 10.0


def shim_command(account: ServerAccount, program: Sequence[str | Path]) -> list[str]:
    """The command line that runs ``program`` as ``account`` and ends it with this process (``exec_shim.py``)."""
    identity = (os.getpid(), account.uid, account.gid)
    return [sys.executable, "-I", "-S", str(_SHIM), *map(str, identity), *map(str, program)]


def run_program(
    account: ServerAccount, program: Sequence[str | Path], *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` as ``account`` to its end; ``stdout`` of the result holds both of its output streams.

    Raises:
        UnavailableError: it did not end within ``timeout_s`` and was killed.
    """
    try:
        return subprocess.run(  # noqa: S603 - the program is PostgreSQL's own, by absolute path
            shim_command(account, program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"{Path(program[0]).name} did not finish within {timeout_s:g} s and was killed",
            reason="POSTGRES_START_FAILED",
            hint="the disk may be stalled; look at the system log, then start again",
        ) from None


class ProcessHandle:
    """One process, named by a pidfd; close it, or use it as a context manager.

    Raises:
        ProcessLookupError: there is no process ``pid``.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False where it still runs after ``timeout_s``."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def stop(self, *, timeout_s: float) -> None:
        """End a PostgreSQL server: fast, then immediate, then by force, each step bounded.

        SIGINT ends sessions and writes a checkpoint; SIGQUIT, ``timeout_s`` later, skips the checkpoint (the next start
        replays the log); SIGKILL is for a server that cannot answer. See PostgreSQL's "Shutting Down the Server".

        Raises:
            UnavailableError: it is still there after SIGKILL (blocked in the kernel).
        """
        steps = ((signal.SIGINT, timeout_s), (signal.SIGQUIT, timeout_s / 4), (signal.SIGKILL, _KILL_TIMEOUT_S))
        for number, step_timeout_s in steps:
            self.send(number)
            if self.wait(step_timeout_s):
                return
        raise UnavailableError(
            f"process {self.pid} does not end, not even after SIGKILL",
            reason="POSTGRES_STOP_FAILED",
            hint="it is blocked in the kernel, most likely by the disk; look at the system log",
        )

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> ProcessHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ServerProcess:
    """A running server, our child, with both output streams appended to a log file.

    The kernel sends the parent-death signal when the *thread* that forked ends, not the process. So one thread of our
    own starts the server and then waits for it; callers may come from short-lived threads (``asyncio.to_thread``).
    """

    def __init__(self, account: ServerAccount, program: Sequence[str | Path], log: Path) -> None:
        self._command = shim_command(account, program)
        self._log = log
        self._launched = threading.Event()
        self._exited = threading.Event()
        self._launch_error: OSError | None = None
        self._handle: ProcessHandle | None = None
        self._thread = threading.Thread(target=self._run, name="saltern-postgres", daemon=True)
        self._thread.start()
        self._launched.wait()
        if self._launch_error is not None:
            self._thread.join()
            raise self._launch_error

    @property
    def pid(self) -> int:
        assert self._handle is not None
        return self._handle.pid

    def wait_exited(self, timeout_s: float) -> bool:
        """Wait for the server to end by itself; True once it has."""
        return self._exited.wait(timeout_s)

    def stop(self, *, timeout_s: float) -> None:
        """End the server and reap it; nothing happens where it has ended already. Raises as ``ProcessHandle.stop``."""
        if self._handle is None:
            return
        if not self._exited.is_set():
            self._handle.stop(timeout_s=timeout_s)
        self._thread.join()
        self._handle.close()
        self._handle = None

    def _run(self) -> None:
        try:
            with self._log.open("ab") as log:
                child = subprocess.Popen(  # noqa: S603 - the program is PostgreSQL's own, by absolute path
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_ENVIRONMENT,
                    cwd="/",
                    # Out of the terminal's process group: Ctrl-C is for us, and we stop the server in order.
                    start_new_session=True,
                )
            self._handle = ProcessHandle(child.pid)  # before wait(): an unreaped child keeps its pid
        except OSError as error:
            self._launch_error = error
            return
        finally:
            self._launched.set()
        child.wait()
        self._exited.set()


def stop_orphans(cluster: Path, *, timeout_s: float) -> list[int]:
    """End every server process that a dead launcher left on ``cluster``; returns their pids.

    Call with the launcher lock held: a server on our cluster that is not our child then has no owner.
    """
    stopped = []
    for pid in _server_pids(cluster):
        with suppress(ProcessLookupError), ProcessHandle(pid) as process:
            if _is_server_on(cluster, pid):  # asked again now that the pidfd holds on to this very process
                process.stop(timeout_s=timeout_s)
                stopped.append(pid)
    return stopped


def _server_pids(cluster: Path) -> list[int]:
    """Pids of the server processes on ``cluster``, the postmaster first: its children end with it."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = [pid for pid in found if _is_server_on(cluster, pid)]
    try:
        postmaster = int((cluster / "postmaster.pid").read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        postmaster = -1
    return sorted(found, key=lambda pid: pid != postmaster)


def _is_server_on(cluster: Path, pid: int) -> bool:
    """True where ``pid`` is a PostgreSQL process whose working folder is ``cluster`` (all of them change into it)."""
    process = Path("/proc") / str(pid)
    try:
        return (process / "exe").readlink().name.startswith("postgres") and (process / "cwd").samefile(cluster)
    except OSError:
        return False
