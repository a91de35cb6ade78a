"""``saltern node`` on the session's real stack: every act on the node that serves, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from saltern.demo.stack import Stack

Saltern = Callable[..., Any]


@pytest.fixture
def node(saltern: Saltern) -> Iterator[str]:
    """The stack's one node; whatever a test did to it, it serves again afterwards."""
    (found,) = saltern("node", "list", "-o", "json").json["nodes"]
    name = found["name"].removeprefix("nodes/")
    yield name
    assert saltern("node", "uncordon", name, "--wait").code == 0


@pytest.fixture
def second(saltern: Saltern, stack: Stack, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another node of the stack, ``node-b`` with 16 MiB, as an operator would add one."""
    key, ready = tmp_path / "node-b.key", tmp_path / "ready.json"
    made = saltern("key", "create", "node-b", "--role", "node", "--node", "node-b", "--save", str(key))
    assert made.code == 0, made.err
    command = [
        *(sys.executable, "-m", "saltern", "serve", "node", "--node-id", "node-b", "--control", stack.control),
        *("--api-key-file", str(key), "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0"),
        *("--metrics-listen", "off", "--dram-bytes", "16MiB", "--state-dir", str(tmp_path), "--shm-path"),
        *(str(tmp_path / "b.sock"), "--ready-file", str(ready)),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not ready.exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)  # another process's file: there is no event to wait for
        yield process
    finally:
        process.kill()
        process.wait()
        saltern("key", "delete", "node-b", "--yes")


@pytest.fixture
def tenant(saltern: Saltern) -> Iterator[str]:
    """A tenant whose quota every node has a part of."""
    assert saltern("tenant", "create", "drained").code == 0
    assert saltern("quota", "set", "drained", "--dram-limit", "40MiB", "--wait").code == 0
    yield "drained"
    saltern("tenant", "delete", "drained", "--yes")


def test_a_node_is_listed_cordoned_and_uncordoned(saltern: Saltern, node: str) -> None:
    listed = saltern("node", "list")
    assert listed.code == 0 and node in listed.out and "live" in listed.out
    cordoned = saltern("node", "cordon", node, "--wait")
    assert cordoned.code == 0 and f"{node}: live, cordoned" in cordoned.out
    assert "in force on 1 nodes" in cordoned.err
    assert "live, cordoned" in saltern("node", "list").out
    assert saltern("node", "cordon", node).code == 0, "a second time is no error"
    again = saltern("node", "uncordon", node, "-o", "json")
    assert again.json["adminState"] == "ADMIN_STATE_ACTIVE"
    assert "cordoned" not in saltern("node", "list").out


def held_bytes(saltern: Saltern, node: str) -> int:
    nodes = saltern("node", "list", "-o", "json").json["nodes"]
    return next(int(item["believedBytes"]) for item in nodes if item["name"] == f"nodes/{node}")


def test_i4_a_drained_node_gives_its_part_to_the_others_and_is_removed_once_it_is_gone(
    saltern: Saltern, node: str, tenant: str, second: subprocess.Popen[bytes]
) -> None:
    while not held_bytes(saltern, "node-b"):
        time.sleep(0.1)  # leases move as nodes report, every second or so
    before = held_bytes(saltern, node)
    drained = saltern("node", "drain", "node-b", "--wait")
    assert drained.code == 0 and "node-b: live, draining" in drained.out
    while held_bytes(saltern, "node-b"):
        time.sleep(0.1)
    while held_bytes(saltern, node) <= before:
        time.sleep(0.1)
    alive = saltern("node", "remove", "node-b", "--yes")
    assert (alive.code, "it reports" in alive.err) == (5, True)
    second.terminate()
    second.wait(30)
    while (removed := saltern("node", "remove", "node-b", "--yes")).code == 5:
        time.sleep(0.5)  # it counts as lost once it has been silent for long enough
    assert (removed.code, removed.out) == (0, "removed nodes/node-b\n")
    assert "node-b" not in saltern("node", "list").out


def test_a_node_that_serves_is_not_removed_and_one_that_is_not_there_is_not_found(saltern: Saltern, node: str) -> None:
    refused = saltern("node", "remove", node, "--yes")
    assert refused.code == 5
    assert refused.err.splitlines()[1].startswith("hint: ")
    assert saltern("node", "remove", node).code == 2, "nobody can be asked here"
    for command in ("cordon", "drain", "uncordon"):
        assert saltern("node", command, "never-there").code == 3
    assert saltern("node", "remove", "never-there", "--yes").code == 3
    wrong = saltern("node", "cordon", "NOT A NODE")
    assert (wrong.code, "hint: use 1 to 63" in wrong.err) == (2, True)
    assert node in saltern("node", "list").out
