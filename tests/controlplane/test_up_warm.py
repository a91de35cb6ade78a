"""``saltern up --warm``: what the nodes held in DRAM is there again after Ctrl-C and a second start."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import saltern
from controlplane.up import memory_folder
from tests.controlplane.test_up import up
from tests.support.memory_folder import memory_folder as any_memory_folder

OPTIONS = ("--dram", "16MiB", "--warm")


@pytest.fixture
def data_dir(reachable_tmp_path: Path) -> Iterator[Path]:
    folder = reachable_tmp_path / "stack"
    with any_memory_folder():  # skips where there is none
        pass
    yield folder
    shutil.rmtree(memory_folder(folder))
    with contextlib.suppress(OSError):  # another stack of this user may be in it
        memory_folder(folder).parent.rmdir()


def command_line(data_dir: Path, *words: str) -> None:
    command = [sys.executable, "-m", "saltern", "--data-dir", str(data_dir), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def starts(data_dir: Path) -> list[str]:
    lines = (data_dir / "log" / "node-1.log").read_text().splitlines()
    return [json.loads(line)["dram"] for line in lines if '"serving"' in line]


def test_a_stack_that_is_stopped_and_started_serves_the_same_blocks(data_dir: Path) -> None:
    key_file = data_dir.parent / "writer.key"
    hashes, blocks = [b"block 0", b"block 1"], [b"state 0" * 1000, b"state 1" * 1000]
    for life in range(2):
        with up(data_dir, *OPTIONS) as stack:
            run = stack.wait_ready()
            if life == 0:
                command_line(data_dir, "tenant", "create", "acme")
                command_line(data_dir, "quota", "set", "acme", "--dram-limit", "8MiB")
                made = ("--model-fingerprint", "m@1/bf16", "--block-tokens", "16", "--block-bytes", "1MiB")
                command_line(data_dir, "namespace", "create", "acme", "chat", *made)
                role = ("--tenant", "acme", "--role", "writer")
                command_line(data_dir, "key", "create", "engine", *role, "--save", str(key_file))
            secret = key_file.read_text().strip()
            with saltern.Client(control=run["control_endpoint"], api_key=secret, namespace="chat") as client:
                keys = client.block_keys(hashes)
                if life == 0:
                    client.put_many(zip(keys, blocks, strict=True))
                found = [result for result in client.get_many(keys) if isinstance(result, saltern.Hit)]
                assert [bytes(hit.payload) for hit in found] == blocks
            status, printed, _ = stack.end(signal.SIGINT)
            assert status in (0, 130) and "kept over a restart" in printed
    assert starts(data_dir)[-1] == "warm with 2 entries, 13.7 KiB"
