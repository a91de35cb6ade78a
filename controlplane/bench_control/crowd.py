"""A deployment with many tenants and several nodes: rows made in bulk, nodes that are processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import psycopg

from controlplane.bench_control.stack import BenchStack, child, wait_ready
from controlplane.db import POLICY_CHANNEL
from controlplane.db.row_security import EVERY_TENANT, TENANT_SETTING

NAMESPACE: Final = "chat"
READY: Final = "ready.json"
LOG: Final = "node.log"
#: What each node gets; all tenants together reserve nothing, so that any number fits.
_DRAM: Final = "64MiB"

_TENANT_ROWS: Final = """
WITH made AS (
    INSERT INTO tenants (id, uid, display_name, state, min_issue_time, first_audit_sequence, create_time, update_time,
                         revision)
    SELECT 'crowd-' || n, gen_random_uuid(), '', 'active', now() - interval '1 day', 1, now(), now(), 1
    FROM generate_series(1, %(tenants)s) AS n RETURNING id
), quotas AS (
    INSERT INTO tier_quotas (tenant_id, tier, reserved_bytes, limit_bytes, weight, update_time, revision)
    SELECT id, tier, 0, CASE tier WHEN 'dram' THEN 1048576 ELSE 0 END, 100, now(), 1
    FROM made, (VALUES ('dram'), ('ssd')) AS tiers (tier)
), policies AS (
    INSERT INTO salt_policies (tenant_id, scope, epoch, update_time, revision)
    SELECT id, 'tenant', 1, now(), 1 FROM made
), epochs AS (
    INSERT INTO salt_epochs (tenant_id, epoch, wrapped_root_secret, create_time) SELECT id, 1, '', now() FROM made
)
INSERT INTO namespaces (tenant_id, id, uid, model_fingerprint, block_tokens, block_bytes, create_time)
SELECT id, %(namespace)s, gen_random_uuid(), 'bench', 16, 65536, now() FROM made
"""
_BUMP: Final = """
WITH raised AS (UPDATE policy_state SET version = version + 1, update_time = now() RETURNING version)
INSERT INTO policy_changes (version, tenant_id) SELECT version, NULL FROM raised RETURNING version
"""


def add_tenants(stack: BenchStack, tenants: int) -> None:
    """Make tenants with a namespace and a quota each, in one transaction, as if each had been created by a call.

    Nobody has keys of theirs: they are there to be many.
    """
    with psycopg.connect(stack.database_url) as connection:
        connection.execute("SELECT set_config(%s, %s, true)", (TENANT_SETTING, EVERY_TENANT))
        connection.execute(_TENANT_ROWS, {"tenants": tenants, "namespace": NAMESPACE})
        connection.execute(_BUMP)


def change_anything(stack: BenchStack) -> int:
    """Raise the policy version for a change that may be of any tenant; returns the version.

    The control plane itself says of each change whom it concerns; so do only those of earlier versions.
    """
    with psycopg.connect(stack.database_url) as connection:
        connection.execute("SELECT set_config(%s, %s, true)", (TENANT_SETTING, EVERY_TENANT))
        row = connection.execute(_BUMP).fetchone()
        assert row is not None
        connection.execute("SELECT pg_notify(%s, %s)", (POLICY_CHANNEL, str(row[0])))
        return int(row[0])


@contextmanager
def nodes(stack: BenchStack, api_keys: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """Run node-0 and so on, one for each of their keys, for the time of the block; gives where each serves gRPC."""
    with ExitStack() as processes:
        folders = [folder / f"node-{number}" for number in range(len(api_keys))]
        starting = [processes.enter_context(_node(stack, *of)) for of in zip(api_keys, folders, strict=True)]
        ready = [wait_ready(process, own / READY, own / LOG) for process, own in zip(starting, folders, strict=True)]
        yield [one["grpc_endpoint"] for one in ready]


@contextmanager
def _node(stack: BenchStack, api_key: str, own: Path) -> Iterator[subprocess.Popen[str]]:
    """One node, of the name of the folder that it has for itself."""
    own.mkdir(0o700)
    key_file = own / "node.key"
    key_file.touch(0o600)
    key_file.write_text(api_key)
    options = {
        "--node-id": own.name,
        "--control": stack.control,
        "--api-key-file": str(key_file),
        "--listen": "127.0.0.1:0",
        "--grpc-listen": "127.0.0.1:0",
        "--metrics-listen": "off",
        "--dram-bytes": _DRAM,
        "--control-wait": "120",
        "--shm-path": str(own / "shm"),
        "--state-dir": str(own / "state"),
        "--ready-file": str(own / READY),
    }
    command = [sys.executable, "-m", "saltern", "serve", "node", *(part for pair in options.items() for part in pair)]
    with (own / LOG).open("wb") as log, child(command, {}, stderr=log) as process:
        yield process


def snapshot_loads_ms(folder: Path, tenants: int) -> list[float]:
    """How long nodes took to make snapshots of at least so many tenants their policy, by their logs."""
    return [
        1000 * event["took_s"]
        for log in folder.glob(f"node-*/{LOG}")
        for line in log.read_text().splitlines()
        if '"policy snapshot loaded"' in line and (event := json.loads(line))["tenants"] >= tenants
    ]
