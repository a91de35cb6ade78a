"""When a node's process looks for cyclic garbage: never over all that is there while it serves.

CPython starts a *full pass* over every object when a quarter more of them have become old, in whatever request that
happens: at 300,000 entries it held the event loop for 75 ms, at a million for a quarter of a second, and found nothing.
A node makes no cyclic garbage of its own (a test keeps it so); what libraries make dies young. So the young generations
are collected as ever, in passes of less than 1 ms, and a full pass waits until nobody has had a turn for a while. What
it leaves is frozen: the next one looks only at what has come since.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

#: New objects before a pass over them, and such passes before one over their survivors too: some 3,000 objects.
_YOUNG_OBJECTS: Final = 700
_YOUNG_PASSES: Final = 3
#: An automatic full pass comes after so many passes over survivors, which is never.
_NEVER: Final = 1_000_000_000
#: A full pass is due after so many of them: when at least 100,000 objects have become old.
_OLD_PASSES: Final = 36
_LOOK_S: Final = 1.0


def settle() -> None:
    """Before a node begins to serve: collect what starting has left, keep the rest out of every later pass."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_PASSES, _NEVER)


class IdlePasses:
    """Full passes while nobody has a turn, in a process that :func:`settle` has prepared.

    Args:
        turns: how many turns there have been; a second without one counts as idle.
    """

    def __init__(self, turns: Callable[[], int]) -> None:
        self._turns = turns
        self._seen = -1
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look; call it on the running loop."""
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def close(self) -> None:
        """Stop; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        turns = self._turns()
        if turns == self._seen and gc.get_count()[2] >= _OLD_PASSES:
            settle()
        self._seen = turns
        self.start()
