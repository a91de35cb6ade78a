"""What is still to be done of a batch: one slot for each entry, filled in place, so that a retry takes up the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from saltern.keys import BlockKey
from saltern.results import GetResult, Hit, PutResult
from saltern.wire import KEYS_MAX

_LENT: Final = Hit(memoryview(b""))


class Taker(NamedTuple):
    """Who takes an entry's bytes out of the transport's own memory, which is lent for the time of the call.

    Attributes:
        take: called once, when the checksum has matched (I7), on whatever thread has received the entry.
        room_bytes: the longest entry that is wanted.
    """

    take: Callable[[memoryview], None]
    room_bytes: int


#: Where an entry goes: writable bytes to fill, whoever takes it, or None for memory of the result's own.
Room: TypeAlias = memoryview | Taker | None


def buffer_of(room: Room) -> memoryview | None:
    """The caller's memory, where there is any."""
    return room if isinstance(room, memoryview) else None


class GetSlot:
    """One entry to read.

    Attributes:
        key: 32 bytes.
        buffer: writable bytes to fill, or None for memory of the result's own.
        taker: who takes the bytes, where they are to be in no memory that outlasts the call; ``buffer`` is None then.
        room_bytes: the longest entry that is wanted; known once a session is open.
        room_is_guess: a longer entry is to be left without a result, for another attempt with more room.
        result: None until known.
    """

    __slots__ = ("buffer", "key", "result", "room_bytes", "room_is_guess", "taker")

    def __init__(self, key: BlockKey, room: Room) -> None:
        self.key = key
        self.buffer = buffer_of(room)
        self.taker = room if isinstance(room, Taker) else None
        self.room_bytes = 0
        self.room_is_guess = False
        self.result: GetResult | None = None

    def hit(self, view: memoryview) -> Hit:
        """The result for an entry whose checksum has matched; lends it to whoever takes it."""
        if self.taker is None:
            return Hit(view)
        try:
            self.taker.take(view)
        finally:
            view.release()  # the next entry lies here soon: a view that outlasts the call would show its bytes
        return _LENT

    @property
    def answer(self) -> GetResult:
        """The result, of a slot whose call is over."""
        assert self.result is not None, "a call fills in every slot"
        return self.result


class PutSlot:
    """One entry to store.

    Attributes:
        key: 32 bytes.
        view: the entry's bytes, where the caller has them.
        result: None until known.
    """

    __slots__ = ("key", "result", "view")

    def __init__(self, key: BlockKey, view: memoryview) -> None:
        self.key = key
        self.view = view
        self.result: PutResult | None = None

    @property
    def answer(self) -> PutResult:
        """The result, of a slot whose call is over."""
        assert self.result is not None, "a call fills in every slot"
        return self.result


def split_frames(sizes_bytes: Sequence[int], *, frame_bytes: int, keys_max: int = KEYS_MAX) -> Iterator[slice]:
    """Cut a batch into consecutive frames of at most ``keys_max`` entries and ``frame_bytes`` bytes.

    An entry longer than ``frame_bytes`` gets a frame of its own.
    """
    start = total_bytes = 0
    for index, size_bytes in enumerate(sizes_bytes):
        if index > start and (total_bytes + size_bytes > frame_bytes or index - start >= keys_max):
            yield slice(start, index)
            start, total_bytes = index, 0
        total_bytes += size_bytes
    if sizes_bytes:
        yield slice(start, len(sizes_bytes))
