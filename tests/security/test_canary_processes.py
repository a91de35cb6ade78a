"""Every secret of a stack of real processes, after a session of real work, and nowhere to be read (I11).

The stack is ``saltern up``; commands run in a process of their own, with --debug, and its traces go to a collector of
the test. Secrets are read where they belong: from private files, and out of the database with its key.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from controlplane.key_encryption.registry import WRAPPED_COLUMNS
from controlplane.secrets import load_key_encryption_key
from dataplane.io.ssd_keys import KEY_FILE, NODE_KEY_FILE, unwrap_key
from saltern import Client, Hit, Stored
from saltern.keys import BlockHash
from saltern.names import TenantId
from tests.controlplane.audit.test_canaries import forms_of
from tests.support.control import migrate, text_of
from tests.support.scopes import connect_to_all

#: Runs commands one after the other; each line of its input is one of them.
_COMMANDS = """
import json, sys
from saltern.cli import main
for line in sys.stdin:
    words = json.loads(line)
    print("code", main(["--debug", *words]), file=sys.stderr)
"""
#: Files that hold secrets on purpose, for their owner alone (0600).
_PRIVATE = ("admin.key", "node-1.key", "key-encryption-key", NODE_KEY_FILE)
_BLOCKS = [bytes([number]) * 4096 for number in range(40)]


class Collector(BaseHTTPRequestHandler):
    """Takes traces over OTLP."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def collecting() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []
    handler = type("TestCollector", (Collector,), {"bodies": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def stack(folder: Path, urls: Any, traces: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """``saltern up`` with one node and an SSD tier; what run.json says, and the environment of its clients."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": traces, "SALTERN_MIGRATION_DATABASE_URL": text_of(urls.owner)}
    command = [sys.executable, "-m", "saltern", "up", "--data-dir", str(folder), "--dram", "8MiB", "--ssd", "16MiB"]
    command += ["--ports", "auto", "--database-url", text_of(urls.app)]
    with (folder.parent / "up.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while not (folder / "run.json").exists():
                assert process.poll() is None, (folder.parent / "up.log").read_text()
                threading.Event().wait(0.05)
            yield json.loads((folder / "run.json").read_text()), environment | {"SALTERN_DATA_DIR": str(folder)}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Session:
    """Commands that run in one process; what they say is looked at in the end."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self.said: dict[str, bytes] = {}

    def run(self, name: str, *commands: str, failing: bool = False) -> None:
        """Run commands, each as words with single spaces between; ``failing``: none of them is right."""
        lines = "".join(json.dumps(command.split(" ")) + "\n" for command in commands)
        done = subprocess.run(
            [sys.executable, "-c", _COMMANDS],
            input=lines.encode(),
            capture_output=True,
            cwd=self._folder,
            env=self._environment,
            timeout=200,
            check=False,
        )
        codes = [line for line in done.stderr.splitlines() if line.startswith(b"code ")]
        assert len(codes) == len(commands), (name, done.stderr[-2000:])
        assert not [code for code in codes if (code == b"code 0") is failing], (name, codes, done.stderr[-2000:])
        self.said[f"{name} stdout"], self.said[f"{name} stderr"] = done.stdout, done.stderr


def work(endpoint: str, secret: str) -> None:
    """Traffic of a client over both tiers."""
    with Client(control=endpoint, api_key=secret, namespace="chat", deadline_ms=30_000) as client:
        keys = client.block_keys([BlockHash(b"block %d" % number) for number in range(len(_BLOCKS))])
        assert client.put_many(zip(keys, _BLOCKS, strict=True)) == [Stored()] * len(keys)
        assert any(isinstance(result, Hit) for result in client.get_many(keys))


async def wrapped_secrets(urls: Any, control_dir: Path) -> dict[str, bytes]:
    """Everything that lies wrapped in the database."""
    key = load_key_encryption_key(control_dir, create=False)
    database = connect_to_all(text_of(urls.app))
    found = {}
    try:
        async with database.transaction() as session:
            for column in WRAPPED_COLUMNS:
                keys = len(column.primary_key)
                for row in await session.execute(column.rows()):
                    wrapped, named_by = row[keys], row[keys + 1 :]
                    if wrapped is not None:
                        name = f"{column.table} {row[:keys]}"
                        found[name] = await key.unwrap(bytes(wrapped), column.context(*named_by))
    finally:
        await database.close()
    return found


def data_keys(node_dir: Path) -> dict[str, bytes]:
    """The keys that a node seals its disk with."""
    node_key = (node_dir / NODE_KEY_FILE).read_bytes()
    found = {"node's own key": node_key}
    for path in (node_dir / "ssd").rglob(KEY_FILE):
        tenant, number = TenantId(path.parent.parent.name), int(path.parent.name, 16)
        found[f"data key {path.parent}"] = unwrap_key(node_key, path.read_bytes(), tenant, number).data_key
    return found


def page(endpoint: str) -> bytes:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as response:
        return bytes(response.read())


@pytest.mark.timeout(600)
async def test_i11_no_secret_of_real_processes_is_in_any_of_their_output_or_files(
    postgres: Any, reachable_tmp_path: Path
) -> None:
    data, home = reachable_tmp_path / "data", reachable_tmp_path / "home"
    home.mkdir(mode=0o700)
    made = "--model-fingerprint m@1 --block-tokens 16 --block-bytes 4KiB"
    with postgres.fresh_database(migrate) as urls, collecting() as (traces, spans):
        with stack(data, urls, traces) as (run, environment):
            session = Session(home, environment)
            as_ci = f"--control {run['control_endpoint']} --api-key-file ci-2.key"
            session.run(
                "work",
                "tenant create acme --display-name Acme",
                "tenant create blue",
                "quota set acme --dram-limit 64KiB --ssd-limit 4MiB",
                f"namespace create acme chat {made}",
                f"namespace create blue chat {made} --wait",
                "key create ci --tenant acme --role writer --save ci.key",
                "key rotate ci --tenant acme --save ci-2.key",
                "key create admin --tenant acme --role tenant-admin --save admin.key",
                "salt set acme --scope tenant --grace 1h",
                "salt rotate acme",
                "share create acme/research --namespace chat",
                "share invite acme/research blue/chat",
                "share accept acme/research blue/chat --wait --yes",
                f"token issue --namespace chat --save grant.json {as_ci}",
                "token rotate-signing-key",
                "audit rotate-checkpoint-key --yes",
            )
            secret = (home / "ci-2.key").read_text().strip()
            grant = json.loads((home / "grant.json").read_text())
            work(run["control_endpoint"], secret)
            pasted = [secret, str(grant["accessToken"])]
            for number, text in enumerate(pasted):
                session.run(
                    f"mistakes {number}",
                    f"tenant get {text}",
                    f"tenant create {text}",
                    f"tenant create third --display-name {text}",
                    f"key create {text} --tenant acme --role reader --save x.key",
                    f"key delete {text} --tenant acme --yes",
                    f"share create {text}/x --namespace chat",
                    f"{text}",
                    f"tenant {text}",
                    f"tenant list --{text}",
                    f"quota set acme --dram-limit {text}",
                    f"--control {text} tenant list",
                    f"--control {run['control_endpoint']} --api-key-file grant.json tenant list",
                    "--control 127.0.0.1:1 --api-key-file ci.key --deadline-ms 200 tenant list",
                    f"--output json tenant get {text}",
                    f"audit verify --checkpoints {text} --public-key {text} {text}",
                    f"token revoke {text} --tenant acme",
                    failing=True,
                )
            session.run(
                "reading",
                "tenant list",
                "key list --tenant acme",
                "token keys",
                "token revocations --tenant acme",
                "key-encryption-key list",
                "salt get acme",
                "share get acme/research",
                "node list",
                "usage acme",
                "usage --by hour --output csv",
                "top --once --interval 0.2",
                "audit list --tenant acme --output json",
                "audit public-key",
                "export-config",
                *(
                    f"audit export {chain} --format {form} --output {number}.{form}"
                    for number, chain in enumerate(("--tenant acme", "--platform"))
                    for form in ("jsonl", "csv", "ocsf", "parquet")
                ),
            )
            secrets = await wrapped_secrets(urls, data / "control") | data_keys(data / "node-1")
            places = session.said | {"metrics": page(control_metrics(data))}
            places["node's metrics"] = page(run["nodes"][0]["metrics_endpoint"])
        places |= {f"trace {number}": body for number, body in enumerate(spans)}
    texts = {"a tenant's key": secret, "its secret before": (home / "ci.key").read_text().strip()}
    texts["a token for nodes"] = grant["accessToken"]
    texts |= {name: path.read_text().strip() for name in _PRIVATE[:2] for path in [data / "credentials" / name]}
    texts |= {"tenant admin's key": (home / "admin.key").read_text().strip()}
    texts |= {"database password": str(urls.app.password), "owner's password": str(urls.owner.password)}
    secrets |= {name: text.encode() for name, text in texts.items()}
    secrets["key-encryption key"] = bytes.fromhex((data / "control" / "key-encryption-key").read_text().strip())
    secrets |= {f"salt of epoch {salt['epoch']}": base64.b64decode(salt["key"]) for salt in grant["saltKeys"]}
    places["up"] = (reachable_tmp_path / "up.log").read_bytes()
    places |= {str(path): path.read_bytes() for path in data.rglob("*") if path.is_file() and path.name not in _PRIVATE}
    exported = [path for path in home.iterdir() if path.suffix in (".jsonl", ".csv", ".ocsf", ".parquet")]
    assert len(exported) == 8
    places |= {path.name: path.read_bytes() for path in exported}
    for path in exported:
        if path.suffix == ".parquet":
            places[f"{path.name} unpacked"] = repr(
                pyarrow.parquet.read_table(io.BytesIO(path.read_bytes())).to_pylist()
            ).encode()

    assert len(secrets) >= 15 and len(spans) >= 3
    assert any("audit-checkpoints" in place for place in places) and any(place.endswith(".seg") for place in places)
    for place, content in places.items():
        for name, value in secrets.items():
            forms = forms_of(value)
            cut = {form[:40] for form in forms if len(form) > 40}
            assert not any(form in content for form in forms | cut), f"the {name} is in: {place}"


def control_metrics(data: Path) -> str:
    return str(json.loads((data / "run" / "control.json").read_text())["metrics_endpoint"])
