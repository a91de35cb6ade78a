"""Python's cyclic garbage collector, held off while very many objects come into being that are all there to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold the collector off for the time of the block; where it was off before, it stays off.

    A policy of 10,000 tenants is 200,000 objects without a cycle among them. The collector looks through all of them
    again and again while they are made, and finds nothing: a third of the time that it takes to load one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
