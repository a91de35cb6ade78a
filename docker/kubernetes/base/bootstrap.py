"""Make the keys of a fresh deployment and keep them in Secrets, each once; run again it makes what is missing.

``saltern-admin-key`` gets the first administrator's key, ``saltern-node-keys`` one entry for each node that there may
be, all in one write: a node that finds the Secret finds its key in it. ``saltern-bootstrapped`` comes last; control
planes mount it, so none of them starts before and takes the one-time token. Runs beside a control plane of its own
(bootstrap.yaml) and ends with 0 once every Secret is as it must be.
"""

import base64
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

ACCOUNT = Path(os.environ.get("SERVICE_ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
ADMIN_SECRET, NODES_SECRET, DONE_SECRET = "saltern-admin-key", "saltern-node-keys", "saltern-bootstrapped"
TIMEOUT_S = 30


class Secrets:
    """The Secrets of this pod's namespace, over the Kubernetes API."""

    def __init__(self) -> None:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        self._url = f"https://{host}:{port}/api/v1/namespaces/{os.environ['POD_NAMESPACE']}/secrets"
        self._tls = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))

    def read(self, name: str) -> dict[str, str] | None:
        """What a Secret holds; None where there is none."""
        try:
            data = self._call("GET", f"/{name}").get("data") or {}
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def add(self, name: str, entries: dict[str, str]) -> None:
        """Add entries in one write; what else is there stays."""
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": entries}
        if self.read(name) is None:
            self._call("POST", "", body)
        else:
            self._call("PATCH", f"/{name}", body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(self._url + path, method=method)  # noqa: S310 - https, see above
        request.add_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text().strip()}")
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request.add_header("Content-Type", content_type)
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(request, data, timeout=TIMEOUT_S, context=self._tls) as response:  # noqa: S310
            answer = json.load(response)
        assert isinstance(answer, dict)
        return answer


def saltern(*words: str) -> bool:
    """Run a command; whether it went well. What it has to say goes to the log of the job."""
    return subprocess.run(["saltern", *words], check=False).returncode == 0  # noqa: S603, S607 - the image's own


def admin_key(secrets: Secrets, folder: Path) -> Path:
    """The file with the administrator's key: from its Secret, else redeemed now and kept there."""
    file = folder / "admin.key"
    kept = (secrets.read(ADMIN_SECRET) or {}).get("admin.key")
    if kept is not None:
        file.write_text(kept)
        return file
    if not saltern("key", "redeem-bootstrap", "--token-file", os.environ["BOOTSTRAP_TOKEN_FILE"], "--save", str(file)):
        sys.exit("the database is not fresh, and its administrator's key is not in the Secret " + ADMIN_SECRET)
    secrets.add(ADMIN_SECRET, {"admin.key": file.read_text()})
    return file


def node_key(folder: Path, node: str) -> str:
    """A new key for a node; one that is there without its Secret gets a new secret."""
    file = folder / f"{node}.key"
    if not saltern("key", "create", node, "--role", "node", "--node", node, "--save", str(file)) and not saltern(
        "key", "rotate", node, "--no-overlap", "--yes", "--save", str(file)
    ):
        sys.exit(f"no key for {node}")
    return file.read_text()


def main() -> int:
    """Make what is missing."""
    secrets = Secrets()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["SALTERN_API_KEY_FILE"] = str(admin_key(secrets, folder))
        there = secrets.read(NODES_SECRET) or {}
        nodes = [f"{os.environ['NODE_NAME_PREFIX']}-{number}" for number in range(int(os.environ["NODES_MAX"]))]
        missing = {node: node_key(folder, node) for node in nodes if node not in there}
        if missing:
            secrets.add(NODES_SECRET, missing)
        if secrets.read(DONE_SECRET) is None:
            secrets.add(DONE_SECRET, {"nodes": str(len(nodes))})
    print(f"{ADMIN_SECRET}, {NODES_SECRET} and {DONE_SECRET} hold what they must")  # noqa: T201 - the job's log
    return 0


if __name__ == "__main__":
    sys.exit(main())
