"""The service ``postgres`` with this environment's own server: first start, scripts of the file, health check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controlplane.postgres.account import ServerAccount, choose_account
from controlplane.postgres.binaries import find_binaries
from tests.docker import compose
from tests.docker.dockerfile import ROOT
from tests.support.network import Host

_STARTED_S = 30.0


class DatabaseContainer:
    """A running server, made as the image's entry point does: on an empty folder the scripts run, then it listens."""

    def __init__(self, service: Mapping[str, Any], host: Host, volume: Path, log: Path) -> None:
        for folder in (volume.parent, volume.parent.parent):
            folder.chmod(0o711)
        self._host = host
        self._data = volume / "data"
        self._account: ServerAccount = choose_account(self._data)
        os.chown(volume, self._account.uid, self._account.gid)
        self._environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", **service["environment"]}
        self._bin = find_binaries(None, self._account, volume).initdb.parent
        self._log = log
        if not self._data.exists():
            self._initialize(service)
        self._server = self._start("*")

    def _initialize(self, service: Mapping[str, Any]) -> None:
        password = self._data.parent / "password"
        password.write_text(self._environment["POSTGRES_PASSWORD"])
        os.chown(password, self._account.uid, self._account.gid)
        self._run(
            "initdb",
            "-D",
            str(self._data),
            "-U",
            "postgres",
            "-A",
            "scram-sha-256",
            f"--pwfile={password}",
            "--no-sync",
        )
        with (self._data / "pg_hba.conf").open("w") as rules:
            rules.write("local all all trust\nhost all all all scram-sha-256\n")
        server = self._start("")
        for mount in compose.mounts(service):
            if mount.target.startswith("/docker-entrypoint-initdb.d/"):
                script = (ROOT / "docker" / mount.source).read_text()
                # Through a pipe: the server's account may not be able to read the repository.
                self._run("/bin/sh", "-s", stdin=script)
        _end(server)

    def _start(self, listen: str) -> subprocess.Popen[bytes]:
        settings = [f"listen_addresses={listen}", f"unix_socket_directories={self._data.parent}"]
        command = ["postgres", "-D", str(self._data), *(word for setting in settings for word in ("-c", setting))]
        with self._log.open("ab") as log:
            server = subprocess.Popen(
                self._command(command), env=self._env(), stdout=log, stderr=log, pass_fds=self._host.descriptors
            )
        self._run("pg_isready", "-h", str(self._data.parent), "-U", "postgres", "-t", "1", until_s=_STARTED_S)
        return server

    def _env(self) -> dict[str, str]:
        path = f"{self._bin}:{self._environment['PATH']}"
        return {**self._environment, "PATH": path, "PGHOST": str(self._data.parent)}

    def _command(self, words: Sequence[str]) -> list[str]:
        as_account = ["setpriv", f"--reuid={self._account.uid}", f"--regid={self._account.gid}", "--clear-groups", "--"]
        program = words[0] if "/" in words[0] else str(self._bin / words[0])
        return self._host.command([*as_account, program, *words[1:]])

    def _run(self, *words: str, stdin: str = "", until_s: float = 0.0) -> None:
        command = self._command(words)
        if until_s:
            command = [
                "sh",
                "-c",
                f'for _ in $(seq {until_s * 20:.0f}); do "$@" && exit 0; sleep 0.05; done; exit 1',
                "-",
                *command,
            ]
        result = subprocess.run(
            command,
            input=stdin,
            env=self._env(),
            pass_fds=self._host.descriptors,
            capture_output=True,
            text=True,
            cwd="/",
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, f"{words[0]}: {result.stdout} {result.stderr} {sys.stderr}"

    def is_healthy(self, command: Sequence[str]) -> bool:
        """Whether the file's health check passes."""
        result = subprocess.run(
            self._command(list(command)),
            env=self._env(),
            pass_fds=self._host.descriptors,
            capture_output=True,
            check=False,
        )
        return result.returncode == 0

    def stop(self) -> None:
        _end(self._server)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)
    server.wait(20)
