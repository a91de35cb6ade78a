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
#: A place holds the number of the eviction above, a tag of the key below: so the least of a bucket is its oldest.
_TAG_BITS: Final = 24
_TAG_MASK: Final = (1 << _TAG_BITS) - 1


class GhostTable:
    """Remembers that a key was evicted, and how many evictions ago; forgets the oldest of a full bucket first.

    8 bytes a place, 4 to 8 places for each of ``entries``. Bucket and tag come from 8 bytes of the key, so two keys of
    one tenant are taken for each other about once in a million look-ups, which costs that tenant a slightly worse order
    and nothing else.
    """

    __slots__ = ("_bucket_mask", "_evictions", "_places")

    def __init__(self, entries: int) -> None:
        self._evictions = 0
        self._allocate(entries)

    @property
    def size_bytes(self) -> int:
        """Memory of the table."""
        return len(self._places) * self._places.itemsize

    def grow(self, entries: int) -> None:
        """Make room for the ghosts of ``entries``. Growing forgets; a cache grows while it fills, before it evicts."""
        if entries * _PLACES_PER_ENTRY > len(self._places):
            self._allocate(entries)

    def add(self, key: BlockKey) -> None:
        """The entry of ``key`` was evicted; it was taken out when that entry was put."""
        self._evictions += 1
        tag, first = self._find(key)
        bucket = self._places[first : first + _WAYS]
        self._places[first + bucket.index(min(bucket))] = self._evictions << _TAG_BITS | tag

    def take(self, key: BlockKey, evictions_max: int) -> bool:
        """Whether ``key`` was among the last ``evictions_max`` evicted; it is a ghost no longer."""
        tag, first = self._find(key)
        for way, value in enumerate(self._places[first : first + _WAYS]):
            if value & _TAG_MASK == tag:
                self._places[first + way] = 0
                return self._evictions - (value >> _TAG_BITS) < evictions_max
        return False

    def _allocate(self, entries: int) -> None:
        buckets = max(_LEAST_BUCKETS, 1 << (entries * _PLACES_PER_ENTRY // _WAYS).bit_length())
        self._bucket_mask = buckets - 1
        self._places = array("Q", bytes(8 * _WAYS * buckets))

    def _find(self, key: BlockKey) -> tuple[int, int]:
        """(tag, first place of the bucket); a tag is never 0, so that 0 is an empty place."""
        bits = int.from_bytes(key[:8], "little")
        return bits >> (64 - _TAG_BITS) | 1, (bits & self._bucket_mask) * _WAYS
