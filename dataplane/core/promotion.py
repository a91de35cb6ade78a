"""From SSD back into DRAM: an entry takes its place in the arena as a put would, and becomes readable once verified.

::

    promote_start --> [bytes are read from SSD to ticket.offset, and verified] --> promote_end
"""

from __future__ import annotations

from dataplane.core.entry import Promotion, PutRefused, PutTicket
from dataplane.core.extents import round_up
from dataplane.core.partition import Partition
from dataplane.core.pool import Pool
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.tenant_cache import PartitionIndex
from saltern.keys import BlockKey


def promote_start(
    pool: Pool, ssd: SsdTier, index: PartitionIndex, key: BlockKey, now_ns: int, *, source: Partition
) -> Promotion | None:
    """Set memory aside for an entry that is on SSD, within the reader's DRAM budget (I4), evicting as a put does.

    Args:
        index: where the entry will be: of the reader, who pays for its memory.
        source: where it is on SSD: the same partition, or a peer's in a sharing group, who loses nothing by it (I5).

    Returns:
        None if it is in DRAM, on its way there, not on SSD, or DRAM has no room for it.
    """
    if key in index.entries or key in index.writing:
        return None
    below = ssd.find(source, key)
    if below is None:
        return None
    extent_bytes = round_up(below.size_bytes)
    limit_bytes = min(index.owner.budget.limit_bytes, index.namespace.limit_bytes)
    if extent_bytes > min(limit_bytes, pool.extents.capacity_bytes):
        return None
    admitted = pool.admit(index, key, below.size_bytes, extent_bytes, now_ns)
    if isinstance(admitted, PutRefused):
        return None
    if not below.is_alive:  # what it displaced took its place on SSD
        pool.abort(admitted)
        return None
    read = ssd.read_start(below, reader=index.partition.tenant)
    return Promotion(PutTicket(admitted.offset, below.size_bytes, admitted), read, source)


def promote_end(
    pool: Pool, ssd: SsdTier, promotion: Promotion, checksum: int | None, now_ns: int, *, is_source_open: bool
) -> bool:
    """Make a promoted entry readable; False if it is not: it did not verify, or was deleted meanwhile (I7, I12).

    Args:
        checksum: XXH3-64 that came with the verified bytes; None if they could not be read.
        is_source_open: the reader may still read where the entry came from (I2).
    """
    entry = promotion.ticket.close()
    index = entry.index
    may_be_served = ssd.read_end(promotion.read, intact=checksum is not None)
    if (
        checksum is None
        or not (may_be_served and is_source_open)
        or pool.open.get(index.partition) is not index
        or not index.is_within_limits
    ):
        pool.abort(entry)
        return False
    pool.insert(entry, checksum, now_ns)
    return True
