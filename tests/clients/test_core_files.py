"""A server that crashes leaves nothing of its memory on a disk."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

_CODE = """
import ctypes, resource
from saltern.core_files import forbid_core_files
resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)) if resource.getrlimit(resource.RLIMIT_CORE)[1] == -1 else None
forbid_core_files()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE), flush=True)
ctypes.string_at(0)
"""


def test_i1_a_crash_leaves_no_core_file(tmp_path: Path) -> None:
    crashed = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert crashed.stdout == "0 (0, 0)\n"
    assert crashed.returncode == -signal.SIGSEGV
    assert not list(tmp_path.iterdir())
