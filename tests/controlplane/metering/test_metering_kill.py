"""Processes of their own, a client that counts for itself, and kill -9: what was used is what is recorded (I8)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saltern.admin.v1 import (
    credentials_pb2,
    namespaces_pb2,
    quotas_pb2,
    tenants_pb2,
    usage_pb2,
)
from saltern.admin_client import AdminClient, ApiKey, redeem_bootstrap_token
from saltern.client import Client
from saltern.errors import SalternError
from saltern.keys import BlockHash, BlockKey
from saltern.results import Hit, Stored
from tests.support.control import text_of
from tests.support.waiting import wait_until

MIB = 2**20
BLOCK_TOKENS = 16
KEYS = 8


class Service:
    """One ``saltern serve`` in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        self.command = [sys.executable, "-m", "saltern", "serve", *arguments, "--ready-file", str(folder / "ready")]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, Any]:
        """Start it; what its ready file says."""
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
        with (self.folder / "log").open("ab") as log:
            self._process = process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

        def is_ready_or_dead() -> bool:
            return ready.exists() or process.poll() is not None

        wait_until(is_ready_or_dead, limit_s=60)
        assert process.poll() is None, (self.folder / "log").read_text()[-4000:]
        announced: dict[str, Any] = json.loads(ready.read_text())
        return announced

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._process = None


class Load:
    """A client that reads the same blocks again and again, and counts what it was answered."""

    def __init__(self, control: str, api_key: str) -> None:
        self._client = Client(control=control, api_key=api_key, namespace="chat", deadline_ms=20_000)
        self.asked = self.hits = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        keys = self._client.block_keys([BlockHash(b"%d" % number) for number in range(KEYS)])
        wait_until(lambda: self._put(keys), limit_s=30)
        self._keys = keys
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._client.close()

    def stop(self) -> None:
        """Ask no more; returns when the last answer has come."""
        self._stop.set()
        self._thread.join(60)

    def _put(self, keys: list[BlockKey]) -> bool:
        return self._client.put_many([(key, bytes(4096)) for key in keys]) == [Stored()] * KEYS

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.asked += KEYS
            self.hits += sum(isinstance(result, Hit) for result in self._client.get_many(self._keys))


class Deployment:
    """A control plane and a node over a real Postgres, with a tenant ``acme``."""

    def __init__(self, folder: Path, urls: Any, resources: contextlib.ExitStack) -> None:
        places = {name: folder / name for name in ("control", "node")}
        for place in places.values():
            place.mkdir()
        control_arguments = [
            "control", "--metrics-listen", "off", "--state-dir", str(places["control"]),
            "--database-url", text_of(urls.app), "--migration-database-url", text_of(urls.owner),
        ]  # fmt: skip
        self.control = Service(places["control"], [*control_arguments, "--listen", "127.0.0.1:0"])
        resources.callback(self.control.end, signal.SIGTERM)
        self.endpoint = self.control.start()["endpoint"]
        # Killed and started again it is where it was: node and clients look for it there.
        self.control.command += ["--listen", self.endpoint]
        token = (places["control"] / "bootstrap-token").read_text().strip()
        self.admin = AdminClient(self.endpoint, ApiKey(redeem_bootstrap_token(self.endpoint, token).secret))
        resources.callback(self.admin.close)
        self._make_tenant()
        key_file = folder / "node.key"
        key_file.write_text(self._key("", "node", credentials_pb2.ROLE_NODE, node_id="n1"))
        key_file.chmod(0o600)
        self.node = Service(
            places["node"],
            [
                "node", "--node-id", "n1", "--control", self.endpoint, "--api-key-file", str(key_file),
                "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--metrics-listen", "off",
                "--shm-path", str(places["node"] / "shm"), "--dram-bytes", str(64 * MIB),
                "--state-dir", str(places["node"] / "state"),
            ],
        )  # fmt: skip
        self.writer = self._key("tenants/acme", "w", credentials_pb2.ROLE_WRITER)

    def _make_tenant(self) -> None:
        admin = self.admin
        admin.call(admin.tenants.CreateTenant, tenants_pb2.CreateTenantRequest(tenant_id="acme"))
        quota = quotas_pb2.Quota(
            name="tenants/acme/quota",
            tiers=[quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=8 * MIB, weight=100)],
        )
        admin.call(admin.quotas.UpdateQuota, quotas_pb2.UpdateQuotaRequest(quota=quota))
        namespace = namespaces_pb2.Namespace(
            model_fingerprint="m@1/bf16", block_tokens=BLOCK_TOKENS, block_bytes=64 * 1024
        )
        admin.call(
            admin.namespaces.CreateNamespace,
            namespaces_pb2.CreateNamespaceRequest(parent="tenants/acme", namespace_id="chat", namespace=namespace),
        )

    def _key(self, parent: str, key_id: str, role: Any, **binding: str) -> str:
        request = credentials_pb2.CreateApiKeyRequest(
            parent=parent, api_key_id=key_id, api_key=credentials_pb2.ApiKey(role=role, **binding)
        )
        return self.admin.call(self.admin.credentials.CreateApiKey, request).secret

    def reported_hits(self) -> int:
        """As the node's present process has reported last."""
        request = usage_pb2.GetUsageRequest(tenant="tenants/acme")
        return self.admin.call(self.admin.usage.GetUsage, request).get_hits

    def recorded(self) -> usage_pb2.UsageRecord:
        """The sum of all records."""
        request = usage_pb2.ListUsageRecordsRequest(parent="tenants/acme")
        total = usage_pb2.UsageRecord()
        held = 0
        for record in self.admin.iterate(self.admin.usage.ListUsageRecords, request, "usage_records"):
            for name in ("hits", "tokens_saved", "puts_stored", "gap_seconds"):
                setattr(total, name, getattr(total, name) + getattr(record, name))
            held += int(record.dram_byte_seconds)
        total.dram_byte_seconds = str(held)
        return total


@pytest.fixture
def deployment(postgres: Any, tmp_path: Path) -> Iterator[Deployment]:
    with postgres.fresh_database() as urls, contextlib.ExitStack() as resources:
        deployed = Deployment(tmp_path, urls, resources)
        resources.callback(deployed.node.end, signal.SIGTERM)
        deployed.node.start()
        yield deployed


def wait_for_hits(deployment: Deployment, hits: int) -> None:
    """Until a report with at least so many was taken in."""

    def has_them() -> bool:
        try:
            return deployment.reported_hits() >= hits
        except SalternError:  # the control plane is starting
            return False

    wait_until(has_them, limit_s=60)


def test_i8_what_clients_counted_is_what_is_recorded_over_kill_9_of_either_side(deployment: Deployment) -> None:
    with Load(deployment.endpoint, deployment.writer) as first:
        wait_for_hits(deployment, 1)
        deployment.control.end(signal.SIGKILL)
        before = first.hits
        wait_until(lambda: first.hits > before + 100, limit_s=60)  # the node serves on (I9), and counts on
        deployment.control.start()
        wait_for_hits(deployment, before + 100)  # in between the node has reported what it counted alone
        first.stop()
    deployment.node.end(signal.SIGTERM)  # which reports a last time
    recorded = deployment.recorded()
    assert recorded.hits == first.hits == first.asked
    assert recorded.tokens_saved == first.hits * BLOCK_TOKENS
    assert recorded.puts_stored == KEYS

    deployment.node.start()
    with Load(deployment.endpoint, deployment.writer) as second:
        wait_until(lambda: second.hits > 100, limit_s=60)
        seen = second.hits
        wait_for_hits(deployment, seen)
        deployment.node.end(signal.SIGKILL)  # what it counted since its last report is lost, and nothing else
    lost = recorded.hits + second.asked - deployment.recorded().hits
    assert 0 <= lost <= second.asked - seen
