"""How late the event loop runs what is due: everything on a node waits for this one loop."""

from __future__ import annotations

import asyncio
from typing import Final

from dataplane.metrics.meters import Histogram

_PERIOD_S: Final = 0.1
_WINDOW_S: Final = 30.0


class LoopLag:
    """Asks the loop for a call every 0.1 s and measures how late it comes.

    Attributes:
        histogram: of the delays.
    """

    def __init__(self) -> None:
        self.histogram: Final = Histogram()
        self._timer: asyncio.TimerHandle | None = None
        self._worst_s = self._worst_before_s = 0.0
        self._window_ends_s = 0.0

    @property
    def worst_s(self) -> float:
        """The longest delay of the last 30 to 60 seconds."""
        return max(self._worst_s, self._worst_before_s)

    def start(self) -> None:
        """Begin; call it on the running loop."""
        loop = asyncio.get_running_loop()
        self._window_ends_s = loop.time() + _WINDOW_S
        self._ask(loop)

    def close(self) -> None:
        """Stop; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + _PERIOD_S
        self._timer = loop.call_at(due_s, self._measure, loop, due_s)

    def _measure(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        late_s = max(0.0, now_s - due_s)
        self.histogram.observe(int(late_s * 1e9))
        if now_s >= self._window_ends_s:
            self._worst_before_s, self._worst_s = self._worst_s, 0.0
            self._window_ends_s = now_s + _WINDOW_S
        self._worst_s = max(self._worst_s, late_s)
        self._ask(loop)
