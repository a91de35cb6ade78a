"""What refuses a put whatever could be evicted for it, and what refuses it once its bytes have come (I6)."""

from __future__ import annotations

from dataplane.core import refusals
from dataplane.core.admission import epoch_not_available
from dataplane.core.entry import PutRefused
from dataplane.core.pool import Pool
from dataplane.core.tenant_cache import PartitionIndex
from saltern.keys import BlockKey


def precheck(
    pool: Pool, index: PartitionIndex, key: BlockKey, size_bytes: int, extent_bytes: int, *, is_frozen: bool
) -> PutRefused | None:
    """Everything that refuses a put before it is looked whom it could displace (I6); None if nothing does.

    Args:
        is_frozen: the node's lease has run out, so that limits are what is there (I9).
    """
    if key in index.writing:
        return refusals.WRITE_IN_PROGRESS
    if not index.is_writable:
        return PutRefused(epoch_not_available(index.partition.epoch))
    if size_bytes < 1:
        return refusals.empty_entry(size_bytes)
    owner = index.owner
    if size_bytes > index.block_bytes:
        return refusals.entry_too_large(owner, size_bytes, index.block_bytes, "the namespace's block size")
    limit_bytes, own_limit_bytes = owner.budget.limit_bytes, index.namespace.limit_bytes
    if extent_bytes > limit_bytes or extent_bytes > own_limit_bytes:
        if is_frozen:
            return refusals.lease_expired(owner, size_bytes)
        what = "the tenant's limit" if limit_bytes <= own_limit_bytes else "the namespace's limit"
        return refusals.entry_too_large(owner, size_bytes, min(limit_bytes, own_limit_bytes), what)
    capacity_bytes = pool.extents.capacity_bytes
    if extent_bytes > capacity_bytes:
        return refusals.entry_too_large(owner, size_bytes, capacity_bytes, "the node's capacity")
    return None


def limit_was_lowered(index: PartitionIndex, size_bytes: int) -> PutRefused:
    """Why an entry does not fit any more that was admitted and has arrived, and is not within its limits (I4)."""
    budget = index.owner.budget
    if budget.used_bytes > budget.limit_bytes:
        return refusals.quota_exceeded(index.owner, size_bytes)
    return refusals.namespace_limit_lowered(index, size_bytes)
