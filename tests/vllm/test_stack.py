"""The tests' own stack: nothing of it outlives the process that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.bound import bound
from tests.vllm.stack import ROOT, clean_environment, wait_until

pytestmark = pytest.mark.timeout(300)

_RUNNER = """
import json, signal
from tests.vllm.stack import running_stack
with running_stack() as stack:
    print(json.dumps([str(stack.folder), stack.pids]), flush=True)
    signal.pause()
"""


def test_a_runner_that_is_killed_leaves_no_process_and_no_data_behind() -> None:
    runner = subprocess.Popen(
        bound([sys.executable, "-c", _RUNNER]),
        cwd=ROOT,
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.PIPE,
    )
    assert runner.stdout is not None
    with runner.stdout:
        folder, pids = json.loads(runner.stdout.readline())
        assert len(pids) == 2
        assert all(map(_is_alive, pids))
        runner.send_signal(signal.SIGKILL)
        runner.wait(30)
    wait_until(lambda: not any(map(_is_alive, pids)), 60, f"the stack's processes {pids} end")
    assert not Path(folder).exists()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
