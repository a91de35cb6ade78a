"""A server's memory holds keys, tokens and blocks: none of it may end in a core file."""

from __future__ import annotations

import ctypes
import resource
from typing import Final

_PR_SET_DUMPABLE: Final = 4  # linux/prctl.h


def forbid_core_files() -> None:
    """From now on the kernel writes no core file of this process, nor pipes one to a collector.

    It also keeps other processes of the same user from attaching to it and from reading its /proc/PID/mem and environ.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The limit alone does not hold where core_pattern names a program.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
