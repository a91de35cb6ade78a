"""A batch of entries on its way into or out of the arena: what every door does, whatever carries the bytes.

A put is judged entry by entry: :meth:`PutBatch.start` admits one and gives the memory to write, :meth:`PutBatch.finish`
compares sums and publishes it (I6, I7). A get holds its entries by pins until :meth:`GetBatch.close`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dataplane.core.cache import CacheCore
from dataplane.core.entry import Pin, PutRefused, PutTicket
from dataplane.core.partition import Partition
from dataplane.core.work import PIN_WORK, SORT_WORK, TOUCH_WORK
from dataplane.io.arena import Arena
from dataplane.io.clock import Clock
from dataplane.io.ssd import SsdStore
from dataplane.io.ssd_fetch import Fetch
from saltern import wire
from saltern.errors import DataLossError, SalternError, StatusCode
from saltern.keys import BlockKey

#: Of a batch so many keys are handled in one go, less than 1 ms, before others may have a turn.
SLICE_KEYS: Final = 256
_OK: Final = int(StatusCode.OK)
_MISS: Final = int(StatusCode.NOT_FOUND)
_NO_ROOM: Final = int(StatusCode.FAILED_PRECONDITION)
#: From :meth:`PutBatch.start_at`: there is no room now, and it may ask again.
NO_ROOM_YET: Final = -1


class Blocks:
    """The core together with the memory, the clock and the SSD store, if any, that it decides about.

    From here on the core may move entries within the arena, so make one before there are any.

    Attributes:
        after_put: called when a put has ended and may have left a tenant above its soft mark.
    """

    __slots__ = ("after_put", "arena", "clock", "core", "ssd")

    def __init__(self, core: CacheCore, arena: Arena, clock: Clock, ssd: SsdStore | None = None) -> None:
        self.after_put: Callable[[], None] = _nothing
        self.ssd = ssd
        self.core = core
        self.arena = arena
        self.clock = clock
        core.on_relocate(arena.relocate)


class PutBatch:
    """Entries on their way in, as many of them at a time as whoever moves their bytes has started.

    Attributes:
        codes: one StatusCode for each entry.
        refused: (index, why) of the entries that are neither stored nor were there, at most ``errors_max``.
    """

    __slots__ = ("_blocks", "_errors_max", "_keys", "_partition", "_tickets", "_untouched", "codes", "refused")

    def __init__(
        self,
        blocks: Blocks,
        partition: Partition,
        keys: Sequence[BlockKey],
        *,
        errors_max: int = wire.PUT_ERRORS_MAX,
    ) -> None:
        self.codes = bytearray(len(keys))
        self.refused: list[tuple[int, SalternError]] = []
        self._blocks = blocks
        self._partition = partition
        self._keys = keys
        self._errors_max = errors_max
        #: Of entries between :meth:`start` and :meth:`finish`, by index.
        self._tickets: dict[int, PutTicket] = {}
        #: Keys from the first on that :meth:`touch` has yet to come to; a single entry is no chain.
        self._untouched = len(keys) if len(keys) > 1 else 0

    def start(self, index: int, size_bytes: int) -> memoryview | None:
        """Admit entry ``index`` and return the memory for its bytes; None if it is refused or there already."""
        offset = self.start_at(index, size_bytes)
        return None if offset is None else self._blocks.arena.view(offset, size_bytes)

    def start_at(self, index: int, size_bytes: int, *, waits: bool = False) -> int | None:
        """As :meth:`start`, and return where in the arena that memory is.

        Args:
            waits: answer NO_ROOM_YET instead of refusing an entry for want of room. Entries of the batch that are not
                finished yet cannot make room for it; once they are, they can.
        """
        blocks = self._blocks
        started = blocks.core.put_start(self._partition, self._keys[index], size_bytes, blocks.clock.monotonic_ns())
        if isinstance(started, PutRefused):
            if waits and started.error.code is StatusCode.RESOURCE_EXHAUSTED:
                return NO_ROOM_YET
            self._refuse(index, started.error)
            return None
        self._tickets[index] = started
        return started.offset

    def view_at(self, offset: int, size_bytes: int) -> memoryview:
        """The bytes of an entry at the offset that :meth:`start_at` gave; not to be used after :meth:`close`."""
        return self._blocks.arena.view(offset, size_bytes)

    def finish(self, index: int, digest: int, claimed: int) -> None:
        """Publish entry ``index``, whose bytes in the arena sum up to ``digest``, if that was claimed (I7)."""
        ticket = self._tickets.pop(index)
        core = self._blocks.core
        if digest != claimed:
            core.put_abort(ticket)
            self._refuse(index, _checksum_mismatch())
            return
        refused = core.put_commit(ticket, digest, self._blocks.clock.monotonic_ns())
        if refused is not None:
            self._refuse(index, refused.error)

    def touch(self) -> Iterator[int]:
        """Touch the chain tail first, slice by slice; yields the work of each."""
        while self._untouched > 0:
            stop, self._untouched = self._untouched, max(0, self._untouched - SLICE_KEYS)
            keys = self._keys[self._untouched : stop]
            self._blocks.core.touch(self._partition, keys, self._blocks.clock.monotonic_ns())
            yield len(keys) * TOUCH_WORK

    def close(self) -> None:
        """End the batch: give back what unfinished entries had set aside (I8); touch what was not yet touched."""
        while self._tickets:
            self._blocks.core.put_abort(self._tickets.popitem()[1])
        for _ in self.touch():
            pass
        self._blocks.after_put()

    def reply(self) -> wire.PutReply:
        return wire.PutReply(
            codes=bytes(self.codes),
            errors=[wire.PutError(index, wire.error_body(error)) for index, error in self.refused],
        )

    def _refuse(self, index: int, error: SalternError) -> None:
        self.codes[index] = error.code
        if error.code is not StatusCode.ALREADY_EXISTS and len(self.refused) < self._errors_max:
            self.refused.append((index, error))


class GetBatch:
    """Entries on their way out: :meth:`pin` them, and they stay where they are until :meth:`close`.

    What is only on SSD comes by ``fetch``: wait until it is done, then call :meth:`finish`. Without one the batch is
    finished once it is pinned.

    Attributes:
        fetch: what the batch waits for, or None.
        hits: (index, pin) of what will be sent, in order.
        payload_bytes: their sum, and until :meth:`finish` also what is expected from SSD.
    """

    __slots__ = ("_blocks", "_codes", "_keys", "_max_sizes", "_partition", "_pins", "_sizes", "_sums", "fetch", "hits",
                 "payload_bytes")  # fmt: skip

    def __init__(
        self, blocks: Blocks, partition: Partition, keys: Sequence[BlockKey], max_sizes: Sequence[int] | None
    ) -> None:
        count = len(keys)
        self._blocks = blocks
        self._partition = partition
        self._keys = keys
        self._max_sizes = max_sizes
        self._codes = bytearray(count)
        self._sizes = [0] * count
        self._sums = [0] * count
        self.hits: list[tuple[int, Pin]] = []
        self.payload_bytes = 0
        self.fetch: Fetch | None = None
        self._pins: list[Pin | None] = [None] * count

    def pin(self) -> Iterator[int]:
        """Look up and pin the entries, slice by slice, last key first; yields the work of each."""
        blocks, keys, pins = self._blocks, self._keys, self._pins
        ssd = blocks.ssd
        for stop in range(len(keys), 0, -SLICE_KEYS):
            start = max(0, stop - SLICE_KEYS)
            pins[start:stop] = blocks.core.get_start(
                self._partition, keys[start:stop], blocks.clock.monotonic_ns(), counts_misses=ssd is None
            )
            yield (stop - start) * PIN_WORK
        if ssd is not None:
            self.fetch = ssd.fetch(self._partition, keys, pins, self._max_sizes)
        for start in range(0, len(keys), SLICE_KEYS):
            stop = min(start + SLICE_KEYS, len(keys))
            self._sort(start, stop)
            yield (stop - start) * SORT_WORK
        if self.fetch is not None:
            self.payload_bytes += self.fetch.expected_bytes
        elif ssd is not None:
            self._count_misses()

    def finish(self) -> None:
        """Take in what has come from SSD; what has not is a miss."""
        assert self.fetch is not None
        self.fetch.close()
        self.fetch = None
        self.hits.clear()
        self.payload_bytes = 0
        self._sort(0, len(self._keys))
        self._count_misses()

    def _sort(self, start: int, stop: int) -> None:
        """Tell hits from misses and from entries that the client has no room for."""
        max_sizes = self._max_sizes
        for index, pin in enumerate(self._pins[start:stop], start):
            if pin is None:
                self._codes[index] = _NO_ROOM if self._is_too_large(index) else _MISS
            elif max_sizes is not None and pin.size_bytes > max_sizes[index]:
                self._codes[index] = _NO_ROOM
            else:
                self._codes[index] = _OK
                self._sizes[index] = pin.size_bytes
                self._sums[index] = pin.checksum
                self.hits.append((index, pin))
                self.payload_bytes += pin.size_bytes

    def _is_too_large(self, index: int) -> bool:
        """Whether an entry that is on SSD was not asked for because the client has no room for it."""
        ssd = self._blocks.ssd
        if ssd is None or self._max_sizes is None:
            return False
        for source in self._blocks.core.sources(self._partition, self._blocks.clock.monotonic_ns()):
            below = ssd.tier.find(source, self._keys[index])
            if below is not None:
                return below.size_bytes > self._max_sizes[index]
        return False

    def _count_misses(self) -> None:
        self._blocks.core.count_misses(self._partition, self._pins.count(None))

    def view(self, pin: Pin) -> memoryview:
        """The bytes of a hit; not to be used after :meth:`close`."""
        return self._blocks.arena.view(pin.offset, pin.size_bytes)

    def reply(self) -> wire.GetReply:
        return wire.GetReply(codes=bytes(self._codes), sizes=self._sizes, sums=wire.join_sums(self._sums))

    def close(self) -> None:
        """Let the entries go; safe to call once only, from a ``finally``."""
        if self.fetch is not None:
            self.fetch.close()
        self._blocks.core.get_end(self._pins)


def _checksum_mismatch() -> DataLossError:
    return DataLossError(
        "the entry's bytes do not have the sum that the request claims",
        reason="CHECKSUM_MISMATCH",
        hint="put it again; do not write to a buffer while it is being put",
    )


def _nothing() -> None:
    """Nobody wants to know of puts."""
