"""Long work on the event loop in small pieces, so that requests never wait long for it."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

_PIECE_S: Final = 0.001
_REST_S: Final = 0.003


class Pace:
    """Call :meth:`breathe` between steps: it gives the loop away for 3 ms after each 1 ms of work.

    A worker thread would not do: where Python threads compete, whoever waits for a socket gets the interpreter back
    only after 5 ms, at every system call.

    Attributes:
        worked_s: time on the loop so far.
    """

    def __init__(self) -> None:
        self.worked_s = 0.0
        self._began_s = perf_counter()

    async def breathe(self) -> None:
        """Rest if the piece has become long enough."""
        if perf_counter() - self._began_s >= _PIECE_S:
            self.pause()
            await asyncio.sleep(_REST_S)
            self.resume()

    def pause(self) -> None:
        """Count the work since :meth:`resume`."""
        self.worked_s += perf_counter() - self._began_s

    def resume(self) -> None:
        self._began_s = perf_counter()
