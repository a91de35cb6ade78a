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


def block_keys(block_ids: Iterable[int]) -> list[BlockKey]:
    """One key for each id, 0 to 2^63 - 1, the same ones for every node and tenant: partitions keep tenants apart.

    Made anew each time: looking up those of a large trace costs as much, since they lie in no cache of the processor.
    """
    factor = _FACTOR
    # Called for every block of a replay, so the distinct type is given to all of them at once.
    return cast("list[BlockKey]", [(block_id * factor >> _SHIFT).to_bytes(32, "big") for block_id in block_ids])
