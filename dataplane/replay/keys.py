"""Keys of blocks: made of a trace's ids, hashed as well as real ones are, at a fraction of the cost.

Multiplying by a random odd number of 256 bits is a universal hash; nothing here must be unguessable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, cast

from saltern.keys import BlockKey

_FACTOR: Final = int.from_bytes(hashlib.sha256(b"saltern replay").digest(), "big") | 1 << 255 | 1
_SHIFT: Final = 64
#: Keys kept; beyond, all are forgotten and made again as they are asked for, so that memory is bounded.
_KEPT_MAX: Final = 1_000_000


class _Keys(dict[int, bytes]):
    def __missing__(self, block_id: int) -> bytes:
        key = self[block_id] = (block_id * _FACTOR >> _SHIFT).to_bytes(32, "big")
        return key


class BlockKeys:
    """Keys by block id, the same ones for every node and tenant: partitions keep tenants apart."""

    def __init__(self) -> None:
        self._keys = _Keys()

    def of(self, block_ids: Iterable[int]) -> list[BlockKey]:
        """One key for each id, 0 to 2^63 - 1."""
        if len(self._keys) > _KEPT_MAX:
            self._keys.clear()
        # Called for every block of a replay, so the distinct type is given to all of them at once.
        return cast("list[BlockKey]", list(map(self._keys.__getitem__, block_ids)))
