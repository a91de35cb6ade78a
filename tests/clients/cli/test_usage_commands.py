"""``saltern usage`` and ``saltern top`` against a real stack, beside what a client counted for itself."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from saltern.admin_client import AdminClient, read_api_key
from saltern.billing.columns import COLUMNS
from saltern.billing.prices import COST_COLUMNS
from saltern.client import Client
from saltern.demo.stack import Stack
from saltern.demo.usage_watch import UsageWatch
from saltern.keys import BlockHash
from saltern.results import Error

Saltern = Callable[..., Any]
BLOCK_BYTES, BLOCK_TOKENS = 4096, 16
_numbers = count(1)


@pytest.fixture
def used(saltern: Saltern, stack: Stack, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A tenant that stored 5 blocks and had 10 hits, all reported; and the file of a reader's key."""
    name, path = f"metered-{next(_numbers)}", tmp_path / "w.key"
    assert saltern("tenant", "create", name).code == 0
    assert saltern("quota", "set", name, "--dram-limit", "8MiB").code == 0
    created = saltern(
        "namespace", "create", name, "chat", "--model-fingerprint", "m@1/bf16", "--block-tokens", str(BLOCK_TOKENS),
        "--block-bytes", "64KiB",
    )  # fmt: skip
    assert created.code == 0
    assert saltern("key", "create", "w", "--tenant", name, "--role", "writer", "--save", str(path)).code == 0
    with Client(
        control=stack.control, api_key=path.read_text().strip(), namespace="chat", deadline_ms=10_000
    ) as client:
        keys = client.block_keys([BlockHash(b"%d" % number) for number in range(5)])
        blocks = [(key, bytes(BLOCK_BYTES)) for key in keys]
        while any(isinstance(result, Error) for result in client.put_many(blocks)):
            time.sleep(0.02)  # the node has not heard of the quota yet
        for _ in range(2):
            client.get_many(keys)
    with AdminClient(stack.control, read_api_key(stack.admin_api_key_file)) as admin:
        with UsageWatch(admin, [name]) as watch:
            watch.wait_for_reports_after(time.time())
    yield name, path
    saltern("tenant", "delete", name, "--yes")


def total(records: list[dict[str, Any]], name: str) -> int:
    """A sum: the test may run over the end of an hour."""
    return sum(int(record[name]) for record in records)


def test_records_say_what_the_client_counted(saltern: Saltern, used: tuple[str, Path]) -> None:
    tenant, path = used
    own = ("usage", "--api-key-file", str(path))
    records = saltern(*own, "--by", "hour", "-o", "json").json["usageRecords"]
    assert total(records, "hits") == 10 and total(records, "tokensSaved") == 10 * BLOCK_TOKENS
    assert total(records, "readBytes") == 10 * BLOCK_BYTES and total(records, "storedBytes") == 5 * BLOCK_BYTES
    assert total(records, "putsStored") == 5
    assert {record["tenant"] for record in records} == {f"tenants/{tenant}"}

    rows = list(csv.DictReader(io.StringIO(saltern(*own, "-o", "csv").out)))
    assert tuple(rows[0]) == COLUMNS and total(rows, "tokens_saved") == 10 * BLOCK_TOKENS
    days = list(csv.DictReader(io.StringIO(saltern("usage", tenant, "--by", "day", "-o", "csv").out)))
    assert total(days, "hits") == 10 and days[0]["start"].endswith("T00:00:00Z")
    parts = saltern(*own, "--by-namespace", "-o", "json").json["usageRecords"]
    assert {part["namespaceId"] for part in parts} == {"chat"}
    assert total(parts, "hits") == 10 and total(parts, "tokensSaved") == 10 * BLOCK_TOKENS
    everybody = list(csv.DictReader(io.StringIO(saltern("usage", "--by", "hour", "-o", "csv").out)))
    assert [row for row in everybody if row["tenant"] == tenant]
    assert saltern(*own, "--closed", "-o", "json").json == {"usageRecords": []}
    assert saltern(*own, "--from", "2020-01-01", "--to", "2020-01-02", "-o", "json").json == {"usageRecords": []}
    table = saltern(*own, "--by", "day").out
    assert "TOKENS SAVED" in table and "%" in table
    # What was stored is not recorded by namespace, and without that a rate would be of the gets alone.
    assert "%" not in saltern(*own, "--by-namespace").out


def test_prices_make_a_bill(saltern: Saltern, used: tuple[str, Path], tmp_path: Path) -> None:
    tenant, _ = used
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"currency": "EUR", "moved_per_gib": "1", "prefill_per_million_tokens": "2"}))
    rows = list(csv.DictReader(io.StringIO(saltern("usage", tenant, "--prices", str(prices), "-o", "csv").out)))
    assert tuple(rows[0]) == (*COLUMNS, *COST_COLUMNS)
    assert abs(sum(float(row["cost"]) for row in rows) - 15 * BLOCK_BYTES / 2**30) < 1e-8
    assert sum(float(row["tokens_saved_value"]) for row in rows) == pytest.approx(2 * 160 / 1e6)
    (record, *_) = saltern("usage", tenant, "--prices", str(prices), "-o", "json").json["usageRecords"]
    assert record["costs"]["currency"] == "EUR" and record["costs"]["dramCost"] == ""
    assert "EUR" in saltern("usage", tenant, "--prices", str(prices)).out
    assert saltern("usage", tenant, "--prices", str(tmp_path / "none")).code == 3
    prices.write_text("{}")
    assert saltern("usage", tenant, "--prices", str(prices)).code == 2


def test_a_tenant_sees_its_last_day_in_small_bars(saltern: Saltern, used: tuple[str, Path]) -> None:
    tenant, path = used
    shown = saltern("usage", tenant, "--no-color").out
    (line,) = [line for line in shown.splitlines() if line.startswith("tokens saved")]
    assert "█" in line and "160 in 24 h" in line and len(line.split()[2]) == 24
    assert "\x1b[" not in shown and "hit rate" in shown
    assert "160 in 24 h" in saltern("usage", "--api-key-file", str(path)).out
    assert saltern("usage", "no-such-tenant", "--by", "hour", "--api-key-file", str(path)).code == 3
    assert saltern("usage", "no-such-tenant", "--by", "hour").code == 3
    assert saltern("usage", tenant, "--by", "week").code == 2


def test_top_once_shows_tenants_and_nodes_as_far_as_the_key_may(saltern: Saltern, used: tuple[str, Path]) -> None:
    tenant, path = used
    once = ("top", "--once", "--interval", "0.2")
    shown = saltern(*once, "-o", "json").json
    (row,) = [item for item in shown["tenants"] if item["tenant"] == f"tenants/{tenant}"]
    assert row["getHits"] == "10" and row["rates"]["hitsPerS"] >= 0
    assert [node["state"] for node in shown["nodes"]] == ["STATE_LIVE"]
    own = saltern(*once, "-o", "json", "--api-key-file", str(path)).json
    assert [item["tenant"] for item in own["tenants"]] == [f"tenants/{tenant}"] and "nodes" not in own
    table = saltern(*once, "--sort", "tenant").out
    assert "HIT RATE" in table and tenant in table and "NODE" in table
    assert saltern(*once, "--limit", "1", "-o", "json").json["hiddenTenants"] >= 0
    assert saltern("top", "no-such-tenant", "--once", "--api-key-file", str(path)).code == 3
    assert saltern("top", "--sort", "colour").code == 2


def environment_of(stack: Stack) -> dict[str, str]:
    return {
        **os.environ,
        "SALTERN_CONTROL": stack.control,
        "SALTERN_API_KEY_FILE": str(stack.admin_api_key_file),
        "TERM": "xterm",
        "COLUMNS": "160",
    }


def test_top_into_a_pipe_is_one_object_a_line_until_the_reader_goes(stack: Stack) -> None:
    command = [sys.executable, "-m", "saltern", "top", "--interval", "0.2", "-o", "json"]
    with subprocess.Popen(
        command, env=environment_of(stack), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout is not None and top.stderr is not None
        for _ in range(2):
            assert "tenants" in json.loads(top.stdout.readline())
        top.stdout.close()
        assert top.wait(30) == 0 and top.stderr.read() == ""


@pytest.mark.parametrize(("typed", "code"), [(b"sq", 0), (None, 130)], ids=["q", "ctrl-c"])
def test_top_in_a_terminal_is_live_and_ends_as_one_would_think(stack: Stack, typed: bytes | None, code: int) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "saltern", "top", "--interval", "0.2"]
    try:
        with subprocess.Popen(command, env=environment_of(stack), stdin=theirs, stdout=theirs, stderr=theirs) as top:
            shown = b""
            while b"q quits" not in shown or b"HIT RATE" not in shown:
                assert select.select([ours], [], [], 60)[0], shown
                shown += os.read(ours, 65536)
            if typed is None:
                top.send_signal(signal.SIGINT)
            else:
                os.write(ours, typed)
            while top.poll() is None:  # its last words must find room
                if select.select([ours], [], [], 0.05)[0]:
                    shown += os.read(ours, 65536)
            assert top.returncode == code
    finally:
        os.close(ours)
        os.close(theirs)
