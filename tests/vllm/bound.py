"""Runs a command that ends when whoever started it is gone, also by kill -9: a killed test run leaves no engine behind.

``python tests/vllm/bound.py PARENT_PID COMMAND...``: the kernel sends SIGTERM then (prctl(2), PR_SET_PDEATHSIG), which
vLLM's server passes on to the processes that it has started. Becomes the command, so its process id is the command's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def bound(command: list[str]) -> list[str]:
    """The command line that runs ``command`` bound to this process."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), str(os.getpid()), *command]


if __name__ == "__main__":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it went away before the line above
        sys.exit("whoever started this is gone")
    os.execvp(sys.argv[2], sys.argv[2:])
