"""What was evicted lately: a lossy memory of keys in a few bytes each."""

from __future__ import annotations

from array import array
from typing import Final

from saltern.keys import BlockKey

#: Places in one bucket: with 4, one ghost in 250 is overwritten early, and a chain with one hole is worth little.
_WAYS: Final = 8
#: Least places for each entry held: four times the ghosts that are asked for, so that few buckets overflow.
_PLACES_PER_ENTRY: Final = 4
_LEAST_BUCKETS: Final = 16
_NUMBER_MAX: Final = 2**32 - 1


class GhostTable:
    """Remembers that a key was evicted, and how many evictions ago; forgets the oldest of a full bucket first.

    8 bytes a place, 4 to 8 places for each of ``entries``: a 32-bit tag of the key, and the number of its eviction.
    Two keys of one tenant are taken for each other once in 2**31 / 8 look-ups, which costs that tenant a slightly worse
    order and nothing else. Searching is left to the arrays' own methods: this runs for every put that evicts.
    """

    __slots__ = ("_bucket_mask", "_evictions", "_numbers", "_tags")

    def __init__(self, entries: int) -> None:
        self._allocate(entries)

    @property
    def size_bytes(self) -> int:
        """Memory of the table."""
        return len(self._tags) * (self._tags.itemsize + self._numbers.itemsize)

    def grow(self, entries: int) -> None:
        """Make room for the ghosts of ``entries``. Growing forgets; a cache grows while it fills, before it evicts."""
        if entries * _PLACES_PER_ENTRY > len(self._tags):
            self._allocate(entries)

    def add(self, key: BlockKey) -> None:
        """The entry of ``key`` was evicted; it was taken out when that entry was put."""
        if self._evictions == _NUMBER_MAX:
            self._allocate(len(self._tags) // _PLACES_PER_ENTRY // 2)
        self._evictions += 1
        tag, first = self._find(key)
        bucket = self._numbers[first : first + _WAYS]
        place = first + bucket.index(min(bucket))
        self._tags[place] = tag
        self._numbers[place] = self._evictions

    def take(self, key: BlockKey, evictions_max: int) -> bool:
        """Whether ``key`` was among the last ``evictions_max`` evicted; it is a ghost no longer."""
        tag, first = self._find(key)
        bucket = self._tags[first : first + _WAYS]
        if tag not in bucket:
            return False
        place = first + bucket.index(tag)
        number = self._numbers[place]
        self._tags[place] = self._numbers[place] = 0
        return self._evictions - number < evictions_max

    def _allocate(self, entries: int) -> None:
        buckets = max(_LEAST_BUCKETS, 1 << (entries * _PLACES_PER_ENTRY // _WAYS).bit_length())
        self._bucket_mask = buckets - 1
        self._evictions = 0
        self._tags = array("I", bytes(4 * _WAYS * buckets))
        self._numbers = array("I", bytes(4 * _WAYS * buckets))

    def _find(self, key: BlockKey) -> tuple[int, int]:
        """(tag, first place of the bucket); a tag is never 0, so that 0 is an empty place."""
        bits = int.from_bytes(key[:8], "little")
        return bits >> 32 | 1, (bits & self._bucket_mask) * _WAYS
