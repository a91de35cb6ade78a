"""``saltern up``: the whole stack on one machine, as one tree of processes that starts and ends together.

::

    up ── Postgres          unless --database-url names another one
       ├─ control plane     serve control
       └─ node-1, ...       serve node

What lies in the data directory::

    up.lock             held (flock) while a stack runs here; contains its pid
    run.json            where everything is, while the stack serves; the command line finds the stack by it
    postgres/           the database
    control/            key-encryption key; until it is redeemed, the bootstrap token
    credentials/        admin.key, node-N.key (0600)
    node-N/             state of each node
    tls/                with --tls: a certificate authority and a certificate of its own
    run/                ready files and sockets of the processes, while they run
    log/                one log for each process

Everything started is pushed onto one exit stack; whatever ends the stack (a signal, a failed start, a child that died)
unwinds it, so the order of stopping is the reverse order of starting. After kill -9 the kernel ends the children, and
the next start takes up what the data directory holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.auth import bootstrap
from controlplane.child_process import ChildProcess, log_tail, process_ended
from controlplane.console.part import has_console
from controlplane.credentials_store import ADMIN_KEY_FILE, ensure_credentials, node_key_file
from controlplane.files import announced, make_folder, require_own_folder
from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from controlplane.postgres.lock import launcher_lock
from controlplane.private_ca import StackTls, ensure_certificates
from controlplane.settings import CONTROL_PORT_DEFAULT
from controlplane.tier_below import TierBelow
from saltern.copy_tuning import tuned
from saltern.errors import FailedPreconditionError, InternalError
from saltern.names import NodeId
from saltern.sizes import format_size
from saltern.tls import ClientTls

NODES_MAX: Final = 64
_SOCKET_PATH_MAX_BYTES: Final = 107  # sockaddr_un.sun_path less its NUL
_HOST: Final = "127.0.0.1"
#: Nodes take two ports each from 7701 on. Metrics are beyond the last of them: 7900, and 7901 and up for the nodes.
_METRICS_PORT_OFFSET: Final = 200
_CONSOLE_PORT_OFFSET: Final = 190
_READY_TEXT: Final = """
Saltern is ready: control plane on {endpoint}. In another terminal:

    {command} tenant create acme

{console}Ctrl-C stops it."""
_CONSOLE_TEXT: Final = """In a browser: {url}, with the key in {key_file}

"""
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to run.

    Attributes:
        data_dir: absolute; made where missing.
        nodes: number of cache nodes; none is a control plane alone.
        dram_bytes: cache memory of each node.
        below: what each node keeps below DRAM, such as in its folder of the data directory; None for nothing.
        warm: keep DRAM in /dev/shm, so that the next start serves it again.
        fixed_ports: 7700 and up, or else any free ports.
        command: how the user calls the command line so that it finds this stack.
        database_url: a PostgreSQL to use instead of a private one, or None.
        tls: serve over TLS, with certificates that the stack makes itself.
    """

    data_dir: Path
    nodes: int
    dram_bytes: int
    fixed_ports: bool
    below: TierBelow | None = None
    warm: bool = False
    command: str = "saltern"
    database_url: str | None = None
    tls: bool = False

    def port(self, offset: int) -> int:
        return CONTROL_PORT_DEFAULT + offset if self.fixed_ports else 0


async def run_stack(options: StackOptions, say: Say, report: Say) -> None:
    """Run the stack until SIGINT, SIGTERM or SIGHUP; a second signal kills instead of waiting.

    Args:
        say: called with each line of progress.
        report: called with the last log lines of a child that failed.

    Raises:
        FailedPreconditionError: the data directory is in use (names the pid) or not usable.
        InternalError: a child ended by itself; its last log lines were reported.
        SalternError: a part cannot start.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    _prepare_data_dir(options.data_dir)
    with launcher_lock(options.data_dir / "up.lock"):
        serving = asyncio.create_task(_Stack(options, say, report, hurry).run(), name="stack")
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not serving.done():
            say("stopping")
            serving.cancel()
            await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()
    say(f"stopped; the data stays in {options.data_dir}")


class _Stack:
    """One run of the stack."""

    def __init__(self, options: StackOptions, say: Say, report: Say, hurry: asyncio.Event) -> None:
        self._options = options
        self._say = say
        self._report = report
        self._hurry = hurry
        self._dir = options.data_dir
        self._children: list[ChildProcess] = []
        self._tls: StackTls | None = None

    async def run(self) -> None:
        """Start everything, serve until cancelled or until a child ends by itself, stop everything."""
        async with AsyncExitStack() as exits:
            run_file = await self._start(exits)
            exits.enter_context(announced(self._dir / "run.json", run_file))
            url, key_file = run_file["console_url"], run_file["admin_api_key_file"]
            console = _CONSOLE_TEXT.format(url=url, key_file=key_file) if url else ""
            ready = {"endpoint": run_file["control_endpoint"], "command": self._options.command, "console": console}
            self._say(_READY_TEXT.format(**ready))
            raise await self._first_failure()

    async def _start(self, exits: AsyncExitStack) -> dict[str, object]:
        (self._dir / "run.json").unlink(missing_ok=True)  # of a run that was killed; we hold the lock
        self._remove_run_dir()
        exits.callback(self._remove_run_dir)
        for folder in ("run", "log", "credentials", "control"):
            (self._dir / folder).mkdir(mode=0o700, exist_ok=True)
        if self._options.tls:
            self._tls = ensure_certificates(self._dir / "tls")
            self._say(f"tls         clients are to trust {self._tls.ca}")
        environment = await self._start_database(exits)
        control = await self._start_control(exits, environment)
        endpoint = str(control["endpoint"])
        credentials_dir = self._dir / "credentials"
        await asyncio.to_thread(
            ensure_credentials,
            endpoint,
            self._dir / "control" / bootstrap.FILE_NAME,
            credentials_dir,
            [NodeId(f"node-{number}") for number in range(1, self._options.nodes + 1)],
            tls=None if self._tls is None else ClientTls(self._tls.ca),
        )
        sockets_dir = self._sockets_dir(exits)
        nodes = [
            await self._start_node(exits, number, endpoint, sockets_dir) for number in range(1, self._options.nodes + 1)
        ]
        return {
            "control_endpoint": endpoint,
            "console_url": control["console_url"],
            "nodes": nodes,
            "admin_api_key_file": str(credentials_dir / ADMIN_KEY_FILE),
            "tls_ca": "" if self._tls is None else str(self._tls.ca),
            "pid": os.getpid(),
            "log_dir": str(self._dir / "log"),
        }

    async def _start_database(self, exits: AsyncExitStack) -> dict[str, str]:
        """Start Postgres; return the environment that tells the control plane of it."""
        if self._options.database_url is not None:
            self._say("postgres    the one of --database-url")
            return {"SALTERN_DATABASE_URL": self._options.database_url}
        self._say("postgres    starting")
        server = EmbeddedPostgres(PostgresConfig(self._dir / "postgres"))
        starting = asyncio.create_task(asyncio.to_thread(server.start))

        async def stop() -> None:
            await asyncio.wait({starting})  # a start cannot be broken off: it is over within seconds
            await asyncio.to_thread(server.stop)

        exits.push_async_callback(stop)
        await asyncio.shield(starting)
        return {
            "SALTERN_DATABASE_URL": server.url("app").render_as_string(hide_password=False),
            "SALTERN_MIGRATION_DATABASE_URL": server.url("owner").render_as_string(hide_password=False),
        }

    async def _start_control(self, exits: AsyncExitStack, environment: Mapping[str, str]) -> dict[str, object]:
        """Start the control plane, with the console where it is installed; return its ready file."""
        arguments = ["serve", "control", "--listen", f"{_HOST}:{self._options.port(0)}"]
        arguments += ["--metrics-listen", f"{_HOST}:{self._options.port(_METRICS_PORT_OFFSET)}"]
        arguments += ["--state-dir", str(self._dir / "control"), *self._tls_arguments()]
        if has_console():
            arguments += ["--console-listen", f"{_HOST}:{self._options.port(_CONSOLE_PORT_OFFSET)}"]
        else:
            self._say("console     not installed: pip install 'saltern-server[console]'")
        ready = await self._start_child(exits, "control", arguments, environment)
        self._say(f"control     serves on {ready['endpoint']}")
        return ready

    async def _start_node(
        self, exits: AsyncExitStack, number: int, endpoint: str, sockets_dir: Path
    ) -> dict[str, object]:
        """Start a node; return its ready file."""
        name = NodeId(f"node-{number}")
        options: dict[str, object] = {
            "--node-id": name,
            "--control": endpoint,
            "--api-key-file": node_key_file(self._dir / "credentials", name),
            "--listen": f"{_HOST}:{self._options.port(2 * number - 1)}",
            "--grpc-listen": f"{_HOST}:{self._options.port(2 * number)}",
            "--metrics-listen": f"{_HOST}:{self._options.port(_METRICS_PORT_OFFSET + number)}",
            "--shm-path": sockets_dir / f"{name}.sock",
            "--dram-bytes": self._options.dram_bytes,
            "--state-dir": self._dir / name,
        }
        size = f"{format_size(self._options.dram_bytes)} DRAM"
        if self._options.below is not None:
            options |= self._options.below.node_options(self._dir / name)
            size += f", {self._options.below}"
        if self._options.warm:
            options["--arena-dir"] = memory_folder(self._dir) / name
            size += ", kept over a restart"
        if self._tls is not None:
            options["--tls-ca"] = self._tls.ca
        arguments = ["serve", "node", *(str(word) for option in options.items() for word in option)]
        arguments += self._tls_arguments()
        ready = await self._start_child(exits, name, arguments, tuned())
        self._say(f"{name:<11} serves on {ready['wire_endpoint']} ({size})")
        return ready

    def _tls_arguments(self) -> list[str]:
        """What a server of the stack shows; nothing for plain text."""
        if self._tls is None:
            return []
        files = self._tls.server
        return ["--tls-cert", str(files.certificate), "--tls-key", str(files.private_key)]

    async def _start_child(
        self, exits: AsyncExitStack, name: str, arguments: list[str], environment: Mapping[str, str]
    ) -> dict[str, object]:
        """Start a child, let ``exits`` stop it, return what its ready file says."""
        ready_file = self._dir / "run" / f"{name}.json"
        child = await ChildProcess.start(
            name,
            [*arguments, "--ready-file", str(ready_file)],
            environment=environment,
            log=self._dir / "log" / f"{name}.log",
        )
        exits.push_async_callback(child.stop, self._hurry)
        try:
            ready = await child.ready(ready_file)
        except InternalError:
            self._report_tail(child.name, child.log_tail())
            raise
        self._children.append(child)
        return ready

    async def _first_failure(self) -> InternalError:
        """Return when a part has ended by itself."""
        watches = [asyncio.create_task(self._until_failed(child)) for child in self._children]
        if self._options.database_url is None:
            watches.append(asyncio.create_task(self._until_postgres_failed()))
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()

    async def _until_failed(self, child: ChildProcess) -> InternalError:
        await child.ended()
        self._report_tail(child.name, child.log_tail())
        return child.failure()

    async def _until_postgres_failed(self) -> InternalError:
        """The launcher owns the server, so it is watched from outside, by the pid that the server itself wrote."""
        postgres_dir = self._dir / "postgres"
        await process_ended(int((postgres_dir / "cluster" / "postmaster.pid").read_text().split("\n", 1)[0]))
        log = postgres_dir / "server.log"
        self._report_tail("postgres", log_tail(log))
        return InternalError("postgres ended by itself", reason="CHILD_ENDED", hint=f"its whole log is {log}")

    def _report_tail(self, name: str, lines: list[str]) -> None:
        for line in lines:
            self._report(f"{name}: {line}")

    def _remove_run_dir(self) -> None:
        """Ready files and sockets: a process that was killed leaves its own behind."""
        if (self._dir / "run").exists():
            shutil.rmtree(self._dir / "run")

    def _sockets_dir(self, exits: AsyncExitStack) -> Path:
        """Where the nodes' unix sockets lie: in the data directory, if its path is short enough for one."""
        folder = self._dir / "run"
        longest = folder / f"node-{NODES_MAX}.sock"
        if len(os.fsencode(longest)) <= _SOCKET_PATH_MAX_BYTES:
            return folder
        return Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="saltern-nodes-")))


def memory_folder(data_dir: Path) -> Path:
    """Where the nodes of a stack keep their memory: one folder for each user and data directory."""
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(f"/dev/shm/saltern-{os.geteuid()}/{digest}")  # noqa: S108 - the node refuses a folder that is not safe


def _prepare_data_dir(data_dir: Path) -> None:
    """Make the data directory; root's can be passed through, because Postgres runs as another user."""
    try:
        make_folder(data_dir, 0o711 if os.geteuid() == 0 else 0o700)
        require_own_folder(data_dir)
        (data_dir / "up.lock").touch(mode=0o600)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot use the data directory {data_dir}: {(error.strerror or 'unusable').lower()}",
            reason="DATA_DIR_UNUSABLE",
            hint="choose another one with --data-dir, or set SALTERN_DATA_DIR",
        ) from None
