"""Runs ``saltern ARGUMENTS`` and stops it when the process that started it is gone, also by kill -9.

``python -m saltern.demo.bound_child PARENT_PID FOLDER ARGUMENTS...``: the kernel sends SIGINT then, as Ctrl-C would
(prctl(2), PR_SET_PDEATHSIG), and FOLDER is removed afterwards: a killed demo leaves neither stack nor data behind.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from saltern.cli import main

_PR_SET_PDEATHSIG: Final = 1


def run(parent_pid: int, folder: Path, arguments: list[str]) -> int:
    """Bind this process to ``parent_pid`` and run the command line; returns its exit code."""
    # A shell that started the demo in the background may have had the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    try:
        if os.getppid() != parent_pid:  # it went away before the line above
            return 0
        return main(arguments)
    finally:
        if os.getppid() != parent_pid:  # else the parent removes it
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
