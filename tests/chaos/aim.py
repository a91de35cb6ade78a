"""Where a node process dies: at a named operation of its own, rather than whenever the signal happens to arrive.

The process that runs is the real one; only the operation that is aimed at is replaced, by itself and a SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any

from dataplane.core.pool import Pool
from dataplane.io.ssd_files import Files

#: What can be aimed at, and whose function it is.
OPERATIONS: dict[str, Any] = {
    **dict.fromkeys(("create", "open", "read_at", "write_at", "truncate", "sync", "sync_folder", "unlink"), Files),
    "evict_down_to_limit": Pool,  # in the middle of applying a policy, once for each tenant
}
MOMENTS = ("before", "half", "after")
_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Aim:
    """Die at the ``nth`` call of ``operation``: before it, after it, or with half of what it writes written."""

    operation: str
    nth: int
    moment: str

    def __str__(self) -> str:
        return f"{self.operation}:{self.nth}:{self.moment}"

    @classmethod
    def parse(cls, text: str) -> Aim:
        operation, nth, moment = text.split(":")
        return cls(operation, int(nth), moment)


class Trigger:
    """Counts calls of what is aimed at, and kills, while it is armed."""

    def __init__(self, aim: Aim, *, is_armed: bool) -> None:
        self._aim = aim
        self._calls = 0
        self.is_armed = is_armed
        owner = OPERATIONS[aim.operation]
        original = getattr(owner, aim.operation)

        def replaced(*arguments: Any, **named: Any) -> Any:
            if not self._is_due():
                return original(*arguments, **named)
            if aim.moment == "half" and aim.operation == "write_at":
                _tear(*arguments[1:])
            result = original(*arguments, **named) if aim.moment == "after" else None
            os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, aim.operation, replaced)

    def _is_due(self) -> bool:
        self._calls += self.is_armed
        return self.is_armed and self._calls == self._aim.nth


def _tear(descriptor: int, data: memoryview, offset: int) -> None:
    """Write a part, as a process that dies in the middle does."""
    half = len(data) // 2 // _SECTOR_BYTES * _SECTOR_BYTES
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, data[:half], offset)
