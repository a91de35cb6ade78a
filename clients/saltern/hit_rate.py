"""What a hit rate is a share of, wherever one is shown.

An SDK that reads what may not be there has a miss for each block that was not. An engine's connector looks first and
reads only what is there: its misses are no gets, they are seen when the blocks come that it had to compute. Whichever
is more is what the cache did not have, since who reads, misses and then stores has both, of the same blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from saltern.admin.v1.usage_pb2 import Usage, UsageRecord

NumberT = TypeVar("NumberT", int, float)


def wanted_blocks(*, hits: NumberT, misses: NumberT, stored: NumberT, refused: NumberT) -> NumberT:
    """Blocks that were wanted, as a node can know of them; the hit rate is ``hits`` over that.

    Args:
        hits, misses: blocks that were read, or asked for to be read and not there.
        stored, refused: blocks that were sent to be stored.
    """
    return hits + max(misses, stored + refused)


def wanted_in(records: Collection[UsageRecord]) -> int:
    """Blocks that were wanted in all of ``records``, which are of tenants: those of namespaces do not hold puts."""
    return wanted_blocks(
        hits=sum(record.hits for record in records),
        misses=sum(record.misses for record in records),
        stored=sum(record.puts_stored for record in records),
        refused=sum(record.puts_refused for record in records),
    )


def wanted_so_far(usage: Usage) -> int:
    """Blocks that a tenant wanted since its nodes were started."""
    return wanted_blocks(
        hits=usage.get_hits, misses=usage.get_misses, stored=usage.puts_stored, refused=usage.puts_refused
    )
