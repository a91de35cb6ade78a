"""``saltern up --tls``: everything over TLS, from the authority to blocks; nothing for whoever does not use it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from saltern.admin_client import AdminClient, read_api_key
from saltern.async_client import AsyncClient
from saltern.client import Client
from saltern.credentials import StaticCredentials
from saltern.deadline import Deadline
from saltern.errors import UnavailableError
from saltern.exchange import exchange_api_key
from saltern.names import parse_namespace_id
from saltern.results import Error, Hit, Pong
from saltern.tls import ClientTls
from tests.controlplane.test_up import up
from tests.support.certificates import Authority


def command_line(data_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "saltern", "--data-dir", str(data_dir), *words]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    return subprocess.run(command, capture_output=True, timeout=60, text=True, env=clean, check=False)


async def test_a_stack_over_tls_from_first_start_to_blocks(reachable_tmp_path: Path, tmp_path: Path) -> None:
    shape = ("--model-fingerprint", "m@1/bf16", "--block-tokens", "16", "--block-bytes", "1MiB")
    data_dir, key_file = reachable_tmp_path / "stack", reachable_tmp_path / "writer.key"
    with up(data_dir, "--dram", "16MiB", "--tls") as stack:
        run = stack.wait_ready()
        control, tls = run["control_endpoint"], ClientTls(Path(run["tls_ca"]))
        for name, mode in (("ca.key", 0o600), ("server.key", 0o600)):
            assert stat.S_IMODE((data_dir / "tls" / name).stat().st_mode) == mode

        # The command line finds the authority by itself.
        for words in (
            ("tenant", "create", "acme"),
            ("quota", "set", "acme", "--dram-limit", "8MiB"),
            ("namespace", "create", "acme", "chat", *shape),
            ("key", "create", "engine", "--tenant", "acme", "--role", "writer", "--save", str(key_file)),
        ):
            done = command_line(data_dir, *words)
            assert done.returncode == 0, done.stderr
        doctor = command_line(data_dir, "doctor", "--output", "json")
        assert doctor.returncode == 0, doctor.stdout
        checks = {check["check"]: check["state"] for check in json.loads(doctor.stdout)["checks"]}
        assert checks["certificate"] == checks["node node-1 certificate"] == checks["node node-1 gRPC"] == "OK"

        # The registry says under which name the node is to be verified.
        secret = key_file.read_text().strip()
        grant = exchange_api_key(control, secret, parse_namespace_id("chat"), timeout_ms=10_000, tls=tls)
        assert [node.tls_server_name for node in grant.nodes] == ["127.0.0.1"]
        block = os.urandom(100_000)
        with Client(control=control, api_key=secret, namespace="chat", transport="tcp", tls=tls) as client:
            keys = client.block_keys([b"block"])
            client.put_many([(keys[0], block)], deadline_ms=10_000)
        connecting = AsyncClient.connect(control=control, api_key=secret, namespace="chat", transport="tcp", tls=tls)
        async with await connecting as other:
            (hit,) = await other.get_many(keys, deadline_ms=10_000)
            assert isinstance(hit, Hit) and bytes(hit.payload) == block

        # Nobody gets anything in plain text, and a client with TLS trusts nobody else.
        with AdminClient(control, read_api_key(key_file)) as plain, pytest.raises(UnavailableError):
            plain.key_set()
        with pytest.raises(UnavailableError) as caught:
            exchange_api_key(
                control, secret, parse_namespace_id("chat"), timeout_ms=10_000, tls=Authority(tmp_path).client()
            )
        assert caught.value.reason == "TLS_CERTIFICATE_REFUSED"
        credentials = StaticCredentials(grant.access_token, namespace="chat", nodes=grant.nodes)
        with Client.from_credentials(credentials, transport="tcp") as plain_client:
            answer = plain_client.ping()
            assert isinstance(answer, Error) and answer.error.reason == "TLS_REQUIRED"

        # A node that lies about TLS in the registry gets no plain text out of a client that was told to use it.
        lied = tuple(replace(node, tls_server_name="") for node in grant.nodes)
        credentials = StaticCredentials(grant.access_token, namespace="chat", nodes=lied)
        with Client.from_credentials(credentials, transport="tcp", tls=tls) as told:
            answer = told.ping()
            assert isinstance(answer, Error) and answer.error.reason == "TLS_NOT_OFFERED"
        # Shared memory stays on this host and works as ever.
        credentials = StaticCredentials(grant.access_token, namespace="chat", nodes=grant.nodes)
        with Client.from_credentials(credentials, transport="shm", tls=tls) as local:
            assert isinstance(local.ping(deadline_ms=Deadline(10_000)), Pong)
        status, printed, _ = stack.end(signal.SIGINT)
        assert status in (0, 130) and "clients are to trust" in printed
