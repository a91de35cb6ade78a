"""A folder in memory for tests of the arena: /dev/shm where that is a tmpfs, else the test is skipped."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def memory_folder() -> Iterator[Path]:
    """An empty folder of mode 0700, removed at the end."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    if not any(line.split()[1:3] == [str(SHARED_MEMORY), "tmpfs"] for line in mounts):
        pytest.skip(f"no tmpfs at {SHARED_MEMORY}")
    folder = Path(tempfile.mkdtemp(prefix="saltern-test-", dir=SHARED_MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
