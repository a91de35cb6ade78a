"""Host memory between the engine's pages and the transport: slots of equal size in one registered buffer.

One buffer serves all tenants of a worker: it is this process's memory, a node reads and writes only the slots of the
call at hand, and each call is made by the session of one tenant (I1).
"""

from __future__ import annotations

import threading
import time
from typing import Final

from saltern.transport.memory import RegisteredBuffer, address_of

#: Slots begin on cache lines and on what device copies like.
_ALIGN_BYTES: Final = 256


class StagingArea:
    """Slots for entries. Thread-safe.

    Args:
        slot_bytes: the largest entry.
        size_bytes: for all slots together; one slot at least.
        shared: whether a node on this host is to reach it.
    """

    def __init__(self, slot_bytes: int, size_bytes: int, *, shared: bool) -> None:
        self._stride_bytes = -(-slot_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.slots = max(1, size_bytes // self._stride_bytes)
        self.buffer = RegisteredBuffer(self.slots * self._stride_bytes, shared=shared)
        self._address = address_of(self.buffer.view)
        self._free = list(range(self.slots))
        self._given_back = threading.Condition()

    def __repr__(self) -> str:
        return f"StagingArea({self.slots} slots of {self._stride_bytes} bytes, {len(self._free)} free)"

    @property
    def address(self) -> int:
        return self._address

    def take(self, wanted: int, *, wait_s: float = 0.0) -> list[int]:
        """Up to ``wanted`` free slots; waits for the first one, for ``wait_s`` at most. Empty where there is none."""
        end_s = time.monotonic() + wait_s
        with self._given_back:
            while not self._free:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not self._given_back.wait(left_s):
                    return []
            taken = self._free[-wanted:]
            del self._free[-wanted:]
            return taken

    def give_back(self, slots: list[int]) -> None:
        with self._given_back:
            self._free += slots
            self._given_back.notify_all()

    def view(self, slot: int, size_bytes: int) -> memoryview:
        start = slot * self._stride_bytes
        return self.buffer.view[start : start + size_bytes]

    def address_of(self, slot: int) -> int:
        return self._address + slot * self._stride_bytes

    def close(self) -> None:
        self.buffer.close()
