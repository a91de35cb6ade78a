"""Signals that end a command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that what was started is stopped and its data removed."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
