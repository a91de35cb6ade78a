"""Where blocking work runs, and how its outcome comes back to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

T = TypeVar("T")
#: Reading threads: enough to keep a device busy while some of them decrypt.
READERS: Final = 4


@dataclass(frozen=True, slots=True)
class Failed:
    """Work that raised."""

    error: Exception


class Workers(Protocol):
    """Runs work elsewhere and calls ``done`` with its outcome where the caller lives, never from within the call."""

    def write(self, work: Callable[[], T], done: Callable[[T | Failed], None]) -> None:
        """Run ``work`` after all earlier writes."""

    def read(self, work: Callable[[], T], done: Callable[[T | Failed], None]) -> None:
        """Run ``work`` beside others."""

    def call_soon(self, callback: Callable[[], None]) -> None: ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` after a while; return what takes that back."""


class ThreadWorkers:
    """Threads beside an asyncio loop: one that writes, ``readers`` that read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, readers: int = READERS) -> None:
        self._loop = loop
        self._writer = ThreadPoolExecutor(1, "ssd-write")
        self._readers = ThreadPoolExecutor(readers, "ssd-read")

    def write(self, work: Callable[[], T], done: Callable[[T | Failed], None]) -> None:
        self._submit(self._writer, work, done)

    def read(self, work: Callable[[], T], done: Callable[[T | Failed], None]) -> None:
        self._submit(self._readers, work, done)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        return self._loop.call_later(delay_s, callback).cancel

    def close(self) -> None:
        """Wait for work that has begun and end the threads."""
        self._readers.shutdown()
        self._writer.shutdown()

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], T], done: Callable[[T | Failed], None]) -> None:
        def deliver(future: Future[T]) -> None:
            error = future.exception()
            outcome = future.result() if error is None else Failed(error if isinstance(error, Exception) else OSError())
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everybody who waited
                self._loop.call_soon_threadsafe(done, outcome)

        pool.submit(work).add_done_callback(deliver)
