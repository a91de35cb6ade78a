"""What a get waits for: entries on their way from SSD into the arena."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dataplane.core.entry import Pin
from dataplane.core.partition import Partition
from dataplane.core.segments import record_blocks
from dataplane.core.ssd_books import SsdRead
from saltern.keys import BlockKey


@dataclass(slots=True, eq=False)
class ReadJob:
    """An entry to read into ``target``; ``done`` gets its checksum, or None if it is not there whole (I7).

    The read counts against ``read.reader``: in a sharing group that need not be the entry's own tenant (I5).
    """

    read: SsdRead
    target: memoryview
    done: Callable[[int | None], None]

    def is_before(self, other: ReadJob) -> bool:
        """Whether ``other`` follows right after this on the device."""
        mine, its = self.read.entry, other.read.entry
        return mine.segment is its.segment and mine.block + record_blocks(mine.size_bytes) == its.block


@dataclass(slots=True, eq=False)
class Fetch:
    """What one get waits for. Not thread-safe: everything happens on the event loop.

    Attributes:
        pins: of the get, filled in as entries arrive.
        pending: entries on their way, by key, with their positions in the get.
        expected_bytes: their lengths.
    """

    partition: Partition
    pins: list[Pin | None]
    pending: dict[BlockKey, list[int]] = field(default_factory=dict)
    expected_bytes: int = 0
    _on_done: Callable[[], None] | None = None
    _stop_timer: Callable[[], None] | None = None
    _is_over: bool = False

    @property
    def is_done(self) -> bool:
        return self._is_over or not self.pending

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once, when everything has come or may not be waited for any longer."""
        self._on_done = callback

    def close(self) -> None:
        """The get is over: nothing is pinned for it any more."""
        self._on_done = None
        self._finish()

    def give_up(self) -> None:
        """What has not come by now is a miss (I10)."""
        if not self._is_over:
            self._finish()

    def arrive(self, key: BlockKey, pin: Callable[[], Pin | None]) -> None:
        """An entry has come, or could not; ``pin`` tells which."""
        positions = self.pending.pop(key)
        if self._is_over:
            return
        for position in positions:
            self.pins[position] = pin()
        if not self.pending:
            self._finish()

    def limit(self, stop_timer: Callable[[], None]) -> None:
        """Take over a timer that ends in :meth:`give_up`."""
        self._stop_timer = stop_timer

    def _finish(self) -> None:
        self._is_over = True
        if self._stop_timer is not None:
            self._stop_timer()
        callback, self._on_done = self._on_done, None
        if callback is not None:
            callback()
