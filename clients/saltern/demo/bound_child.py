"""Runs ``saltern ARGUMENTS`` and stops it when the process that started it is gone, also by kill -9.

``python -m saltern.demo.bound_child PARENT_PID ARGUMENTS...``: the kernel sends SIGINT then, as Ctrl-C would
(prctl(2), PR_SET_PDEATHSIG), so that a killed demo leaves no stack behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

from saltern.cli import main
from saltern.cli.failure import EXIT_INTERRUPTED

_PR_SET_PDEATHSIG: Final = 1


def run(parent_pid: int, arguments: list[str]) -> int:
    """Bind this process to ``parent_pid`` and run the command line; returns its exit code."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent_pid:  # it went away before the line above
        return EXIT_INTERRUPTED
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
