"""Ctrl-C in the middle of a replay: noted, and acted on where nothing is counted in part."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

from saltern.errors import SalternError

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Interrupt:
    """Made by :func:`held_interrupts`.

    Attributes:
        came: somebody wants the replay to end.
    """

    came: bool = False


@contextmanager
def held_interrupts(stop: Callable[[], None]) -> Iterator[Interrupt]:
    """Let SIGINT and SIGTERM call ``stop`` for the time of the block, instead of raising wherever they land.

    The second one ends the process as if nobody handled it: whoever asks twice does not want to wait. Signals that were
    ignored stay ignored, and every handler is back afterwards. Outside the main thread, where Python neither sets nor
    runs handlers, nothing changes.

    Args:
        stop: called once, between any two instructions of the main thread: it should set a flag and wake who waits.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    handled = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def first(_: int, __: FrameType | None) -> None:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        interrupt.came = True
        stop()

    try:
        for number in handled:
            signal.signal(number, first)
        yield interrupt
    finally:
        for number, handler in handled.items():
            # None: it was not set from Python, and cannot be set again from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def raise_end(interrupt: Interrupt, error: SalternError | None) -> None:
    """Raise why a replay is to end: KeyboardInterrupt where somebody wants it, whatever else there was as its cause."""
    if interrupt.came:
        raise KeyboardInterrupt from error
    if error is not None:
        raise error
