"""A process killed with -9 while it writes to SSD: what was there is there, byte by byte, and the books are exact."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from saltern.names import TenantId
from tests.support import ssd_process
from tests.support.cache_node import key_of

ROOT = Path(__file__).resolve().parents[3]
LIVES = int(os.environ.get("SALTERN_TEST_SSD_KILLS", "6"))


def test_i7_i8_kill_9_under_load_loses_nothing_that_was_written(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients")])}
    generator = random.Random(LIVES)
    put: dict[int, None] = {}
    gone: set[int] = set()
    recovered_in_all = 0
    for life in range(1, LIVES + 1):
        command = [sys.executable, ssd_process.__file__, str(tmp_path), str(life)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(generator.randrange(50, 1500)):
                note(process.stdout.readline(), put, gone)
            process.send_signal(signal.SIGKILL)
            for line in process.stdout:
                if line.endswith("\n"):
                    note(line, put, gone)
        node = ssd_process.make_node(tmp_path)
        try:
            partition = node.partition("a")
            node.workers.drain()
            node.check()
            node.check_files()
            assert node.used_bytes("a") == node.file_bytes("a"), "I8: books equal the files"
            assert node.used_bytes("a") <= ssd_process.LIMIT_BYTES, "I4"
            assert node.store.status.reason == ""
            found = [n for n in put if node.tier.find(partition, key_of(n)) is not None]
            assert not gone & set(found), "I12: a deleted entry came back"
            assert node.core.usage().tenants[TenantId("a")].ssd.entries >= len(found)
            # What was said to be on SSD is there, but for the oldest, which make room as the log goes round.
            newest = [n for n in put if n not in gone][-50:]
            assert set(newest) <= set(found)
            for number in found:
                (value,) = node.get(partition, key_of(number))
                assert value == ssd_process.content(number), "I7: other bytes than were put"
            recovered_in_all += len(found)
        finally:
            node.release()
    assert recovered_in_all > 50 * LIVES


def note(line: str, put: dict[int, None], gone: set[int]) -> None:
    what, _, number = line.strip().partition(" ")
    if what == "put":
        put[int(number)] = None
    elif what == "gone":
        gone.add(int(number))
