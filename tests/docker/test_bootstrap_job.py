"""The bootstrap job's script, run as the job runs it: a real control plane, an API that allows what its Role does."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tests.docker.dockerfile import ROOT
from tests.docker.manifests import named
from tests.support.certificates import Authority
from tests.support.control import control_plane, migrate

SCRIPT = ROOT / "docker" / "kubernetes" / "base" / "bootstrap.py"
TOKEN = "token-of-the-service-account"


class SecretsApi(http.server.BaseHTTPRequestHandler):
    """The Secrets of one namespace: create, get and patch, as far as the job's Role allows."""

    held: ClassVar[dict[str, dict[str, str]]]
    writes: ClassVar[list[str]]

    def do_GET(self) -> None:
        name = self._name()
        if name in self.held:
            self._answer(200, {"data": {key: _encoded(value) for key, value in self.held[name].items()}})
        else:
            self._answer(404, {"reason": "NotFound"})

    def do_POST(self) -> None:
        body = self._body()
        name = body["metadata"]["name"]
        if not self._may("create", name) or name in self.held:
            self._answer(409 if name in self.held else 403, {})
            return
        self.held[name] = dict(body["stringData"])
        self.writes.append(name)
        self._answer(201, body)

    def do_PATCH(self) -> None:
        name, body = self._name(), self._body()
        if not self._may("patch", name) or self.headers["Content-Type"] != "application/merge-patch+json":
            self._answer(403, {})
            return
        self.held[name] |= body["stringData"]
        self.writes.append(name)
        self._answer(200, body)

    def _name(self) -> str:
        prefix, _, name = self.path.rpartition("/")
        assert prefix == "/api/v1/namespaces/saltern/secrets", self.path
        return name

    def _may(self, verb: str, name: str) -> bool:
        rules = named("minimal", "Role", "saltern-bootstrap")["rules"]
        allowed = any(verb in rule["verbs"] and name in rule.get("resourceNames", [name]) for rule in rules)
        return allowed and self.headers["Authorization"] == f"Bearer {TOKEN}"

    def _body(self) -> dict[str, Any]:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(body, dict)
        return body

    def _answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@contextmanager
def secrets_api(folder: Path) -> Iterator[tuple[type[SecretsApi], dict[str, str]]]:
    """The API over TLS, and what a pod is told of it."""

    class Api(SecretsApi):
        held: ClassVar[dict[str, dict[str, str]]] = {}
        writes: ClassVar[list[str]] = []

    authority = Authority(folder / "authority")
    issued = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.private_key)
    account = folder / "account"
    account.mkdir()
    (account / "token").write_text(TOKEN)
    (account / "ca.crt").write_bytes(authority.ca.read_bytes())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield (
                Api,
                {
                    "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                    "KUBERNETES_SERVICE_PORT": str(server.server_port),
                    "SERVICE_ACCOUNT_DIR": str(account),
                    "POD_NAMESPACE": "saltern",
                },
            )
        finally:
            server.shutdown()
            thread.join()


async def test_it_makes_every_key_once_in_the_order_that_others_wait_for(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as database, secrets_api(tmp_path) as (api, told):
        async with control_plane(database, tmp_path / "control") as control:
            environment = told | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "SALTERN_CONTROL": str(control.plane.endpoint),
                "BOOTSTRAP_TOKEN_FILE": str(tmp_path / "control" / "bootstrap-token"),
                "NODES_MAX": "2",
                "NODE_NAME_PREFIX": "saltern-node",
            }
            first = await asyncio.to_thread(run, environment)
            assert first.returncode == 0, first.stderr
            assert api.writes == ["saltern-admin-key", "saltern-node-keys", "saltern-bootstrapped"]
            keys = dict(api.held["saltern-node-keys"])
            assert set(keys) == {"saltern-node-0", "saltern-node-1"}
            secrets = [api.held["saltern-admin-key"]["admin.key"], *keys.values()]
            assert all(secret.startswith("sk-saltern-") for secret in secrets) and len(set(secrets)) == 3
            assert not any(secret.strip() in first.stdout + first.stderr for secret in secrets)

            # Killed after it had made a key and before the Secret was written: that key gets a new secret.
            del api.held["saltern-node-keys"]["saltern-node-1"], api.held["saltern-bootstrapped"]
            second = await asyncio.to_thread(run, environment)
            assert second.returncode == 0, second.stderr
            assert api.held["saltern-node-keys"]["saltern-node-0"] == keys["saltern-node-0"]
            assert api.held["saltern-node-keys"]["saltern-node-1"] != keys["saltern-node-1"]

            # The Secret with the administrator's key is lost: nobody gets a second one.
            del api.held["saltern-admin-key"]
            third = await asyncio.to_thread(run, environment)
            assert third.returncode == 1 and "not fresh" in third.stderr


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
