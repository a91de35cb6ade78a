"""A control plane and cache nodes for one replay, as processes of their own that can be stopped, killed and started.

The control plane is ``saltern up`` without nodes; each node is ``saltern serve node`` on free ports of this host. One
that is started again has its name and its folder, so it is the same node to the control plane; it has what it held only
where its memory is kept (``--arena-dir``) and it was stopped in order. Nothing outlives the block: what a killed parent
leaves behind ends by itself (:mod:`saltern.demo.bound_child`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from saltern.admin.v1 import credentials_pb2
from saltern.admin_client import AdminClient, new_request_id, read_api_key
from saltern.copy_tuning import tuned
from saltern.demo.stack import running_up, start_bound
from saltern.errors import UnavailableError
from saltern.replay.naming import node_id

_START_TIMEOUT_S: Final = 90.0
_STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02
_CLOCK_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class NodeProcess:
    """One node, running or not.

    Attributes:
        name: its identifier.
        ready: what it wrote when it began to serve.
    """

    def __init__(self, name: str, folder: Path, arena_dir: Path | None, options: Sequence[str]) -> None:
        self.name = name
        self.ready: Mapping[str, Any] = {}
        self._folder, self._arena_dir, self._options = folder, arena_dir, options
        self._ready_file = folder / f"{name}.json"
        self._log_path = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._spent_s = 0.0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def has_died(self) -> bool:
        """Whether it has ended although nobody here has stopped it."""
        if self._process is None:
            return False
        # Not taken note of (WNOWAIT): what CPU time it took can be read until then.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    @property
    def metrics_endpoint(self) -> str:
        return str(self.ready["metrics_endpoint"])

    def start(self) -> None:
        """Begin to start; :meth:`wait` waits."""
        self._ready_file.unlink(missing_ok=True)
        arena = () if self._arena_dir is None else ("--arena-dir", str(self._arena_dir))
        with self._log_path.open("ab") as log:
            self._process = start_bound(
                # A killed parent cannot remove what is kept in memory, so the node does.
                self._arena_dir or self._folder / self.name,
                ("serve", "node", "--ready-file", str(self._ready_file), *self._options, *arena),
                log,
                tuned(),
            )

    def wait(self) -> None:
        """Wait until it serves; raises UnavailableError (NODE_NOT_STARTED) if it does not."""
        assert self._process is not None
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with suppress(FileNotFoundError):
                ready = json.loads(self._ready_file.read_text())
                if ready["pid"] == self._process.pid:
                    self.ready = ready
                    return
            time.sleep(_POLL_S)
        self.kill()
        raise UnavailableError(
            f"{self.name} did not start", reason="NODE_NOT_STARTED", hint=f"it said: {self.last_words()}"
        )

    def last_words(self) -> str:
        """The last line of its log."""
        return "".join(self._log_path.read_text(errors="replace").splitlines()[-1:])[:300]

    def forget(self) -> None:
        """Remove what is kept of the memory of a node that does not run, so that it begins empty."""
        if self._arena_dir is not None:
            shutil.rmtree(self._arena_dir, ignore_errors=True)

    def ask_to_stop(self) -> None:
        """SIGTERM: a clean stop, as an operator would."""
        if self._process is not None:
            self._spent_s = self.cpu_s
            self._process.send_signal(signal.SIGTERM)

    def wait_stopped(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None  # not before: one that is not waited for to its end (Ctrl-C) is still to be killed

    def kill(self) -> None:
        """Kill -9: it writes nothing down and says goodbye to nobody."""
        process, self._process = self._process, None
        if process is not None:
            self._spent_s = _cpu_s(process.pid, self._spent_s)
            process.kill()
            process.wait()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process that runs, or of the last one: since it was started."""
        return self._spent_s if self._process is None else _cpu_s(self._process.pid, self._spent_s)


def _cpu_s(pid: int, otherwise_s: float) -> float:
    """User and system time of a process with all its threads, those that ended included (proc(5), stat 14 and 15)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return otherwise_s
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_S


class Cluster:
    """Made by :func:`running_cluster`.

    Attributes:
        admin: of the control plane, as the platform's administrator.
        nodes: by number.
    """

    def __init__(self, admin: AdminClient, nodes: Sequence[NodeProcess]) -> None:
        self.admin = admin
        self.nodes = nodes

    @property
    def running(self) -> list[NodeProcess]:
        return [node for node in self.nodes if node.is_running]

    def start(self) -> None:
        """Start every node that does not run, all at once; returns when all serve."""
        starting = [node for node in self.nodes if not node.is_running]
        for node in starting:
            node.start()
        for node in starting:
            node.wait()

    def stop(self) -> None:
        """Stop every node in order; returns when all have ended."""
        for node in self.nodes:
            node.ask_to_stop()
        for node in self.nodes:
            node.wait_stopped()

    def kill(self) -> None:
        """Kill -9 every node that runs."""
        for node in self.running:
            node.kill()

    def forget(self) -> None:
        """Let nodes that do not run begin empty."""
        for node in self.nodes:
            node.forget()


@contextmanager
def running_cluster(*, nodes: int, dram_bytes: int, eviction: str, reservations: str, keeps: bool) -> Iterator[Cluster]:
    """A control plane, and nodes that are not started yet, for the time of the block.

    Args:
        keeps: keep the nodes' memory in /dev/shm, so that it is there again after a clean stop.

    Raises:
        UnavailableError, FailedPreconditionError: the control plane did not start; saltern-server is not installed.
    """
    with ExitStack() as resources:
        up = resources.enter_context(running_up(("--nodes", "0"), environment={}, purpose="replay"))
        control = str(up.run["control_endpoint"])
        admin = resources.enter_context(AdminClient(control, read_api_key(Path(up.run["admin_api_key_file"]))))
        folder = up.folder / "nodes"
        folder.mkdir(mode=0o700)
        # Each by itself right there: of a node whose parent is killed, nothing else is left to remove.
        memory = f"/dev/shm/saltern-replay-{secrets.token_hex(8)}" if keeps else None  # noqa: S108 - the node makes it
        processes = []
        for name in map(node_id, range(nodes)):
            options = {
                "--node-id": name,
                "--control": control,
                "--api-key-file": _key_file(admin, name, folder),
                "--listen": "127.0.0.1:0",
                "--grpc-listen": "127.0.0.1:0",
                "--metrics-listen": "127.0.0.1:0",
                "--shm-path": folder / f"{name}.sock",
                "--dram-bytes": dram_bytes,
                "--state-dir": folder / name,
                "--eviction": eviction,
                "--reservations": reservations,
            }
            words = [str(word) for option in options.items() for word in option]
            processes.append(NodeProcess(name, folder, None if memory is None else Path(f"{memory}-{name}"), words))
        cluster = Cluster(admin, processes)
        resources.callback(cluster.forget)
        resources.callback(cluster.kill)  # nothing of theirs is wanted any more, and whoever interrupted us waits
        yield cluster


def _key_file(admin: AdminClient, name: str, folder: Path) -> Path:
    """A file with a new API key of this node."""
    request = credentials_pb2.CreateApiKeyRequest(
        api_key_id=f"replay-{name}",
        api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_NODE, display_name="node of a replay", node_id=name),
        request_id=new_request_id(),
    )
    path = folder / f"{name}.key"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(admin.call(admin.credentials.CreateApiKey, request).secret + "\n")
    return path
