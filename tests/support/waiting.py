"""Waiting for what another thread or process does, and counting what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Look until ``condition`` holds; fails after ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that in time"
        time.sleep(0.005)


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
