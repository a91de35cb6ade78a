"""Limits of namespaces over a real stack: what the command line says, the node that serves does (I4)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saltern.client import Client
from saltern.keys import BlockHash
from saltern.results import Error, Hit, Refused, Stored
from tests.clients.cli.conftest import Saltern, Stack

KIB = 1024
BLOCK_BYTES = 64 * KIB


@contextmanager
def writer(saltern: Saltern, stack: Stack, tenant: str, namespace: str, path: Path) -> Iterator[Client]:
    """A client that writes into a namespace and has heard from the node."""
    name = f"w-{namespace}"
    assert saltern("key", "create", name, "--tenant", tenant, "--role", "writer", "--save", str(path)).code == 0
    secret = path.read_text().strip()
    with Client(control=stack.control, api_key=secret, namespace=namespace, deadline_ms=10_000) as client:
        while isinstance(client.get_many(client.block_keys([BlockHash(b"none")]))[0], Error):
            time.sleep(0.02)
        yield client


def there(client: Client, numbers: range) -> list[int]:
    keys = client.block_keys(BlockHash(b"%d" % number) for number in numbers)
    return [number for number, found in zip(numbers, client.get_many(keys), strict=True) if isinstance(found, Hit)]


def put(client: Client, numbers: range) -> list[object]:
    keys = client.block_keys(BlockHash(b"%d" % number) for number in numbers)
    return [answer for key in keys for answer in client.put_many([(key, bytes(BLOCK_BYTES))])]


def test_i4_a_namespace_keeps_its_limit_and_its_neighbours_in_the_tenant_keep_theirs(
    saltern: Saltern, stack: Stack, tmp_path: Path
) -> None:
    tenant = "limits-acme"
    made = ("--model-fingerprint", "m@1/bf16", "--block-tokens", "16", "--block-bytes", "64KiB")
    assert saltern("tenant", "create", tenant).code == 0
    assert saltern("quota", "set", tenant, "--dram-limit", "8MiB").code == 0
    assert saltern("namespace", "create", tenant, "chat", *made).code == 0
    assert saltern("namespace", "create", tenant, "bulk", *made, "--dram-limit", "256KiB", "--wait").code == 0
    with (
        writer(saltern, stack, tenant, "chat", tmp_path / "chat.key") as chat,
        writer(saltern, stack, tenant, "bulk", tmp_path / "bulk.key") as bulk,
    ):
        assert put(chat, range(20)) == [Stored()] * 20
        assert put(bulk, range(20)) == [Stored()] * 20, "each takes the place of an own one"
        assert there(bulk, range(20)) == [16, 17, 18, 19]

        assert saltern("namespace", "update", tenant, "bulk", "--dram-limit", "128KiB", "--wait").code == 0
        assert len(there(bulk, range(20))) == 2, "lowered: the coldest have left"
        too_low = saltern("namespace", "update", tenant, "bulk", "--dram-limit", "32KiB", "--wait")
        assert too_low.code == 0 and there(bulk, range(20)) == []
        refused = put(bulk, range(1))[0]
        assert isinstance(refused, Refused) and refused.error.reason == "ENTRY_TOO_LARGE"
        assert "the namespace's limit is 32768 bytes" in refused.error.message

        assert saltern("namespace", "update", tenant, "bulk", "--dram-limit", "none", "--wait").code == 0
        assert put(bulk, range(20)) == [Stored()] * 20 and len(there(bulk, range(20))) == 20
        assert there(chat, range(20)) == list(range(20)), "nobody else has lost anything"
    assert saltern("tenant", "delete", tenant, "--yes").code == 0
