"""What a new policy leaves to do: memory that is unreachable already, and entries above a limit that was lowered.

What makes entries unreachable (I12) and a limit binding (I4) holds when a policy is applied, in a time that does not
depend on how many entries there are. What follows from it does: freeing 131,000 entries takes 0.35 s, for which nobody
else would be served. So it is done in slices, between other requests, and until then the books stay as they are (I8):

- a *purged* partition's bytes stay charged to its tenant. Whoever puts and finds no room has them freed first, so no
  entry that can be read leaves for want of bytes that nobody can read.
- a tenant or a namespace *above its limit* stays there until its coldest entries have gone. It is served, but its puts
  are refused for a moment: evicting thousands of entries for one of them would hold up everybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dataplane.core.extents import GRANULE_BYTES, ArenaOffset

if TYPE_CHECKING:
    from dataplane.core.pool import Pool
    from dataplane.core.tenant_cache import PartitionIndex

#: Of work done as a policy is applied: 256 entries, about 1 ms.
POLICY_SLICE_BYTES: Final = 256 * GRANULE_BYTES
#: Most that one put has freed for it beyond its own size: about 10 ms, and only where free memory is scattered.
_FOR_PUT_MAX: Final = 4096
_AT_ONCE: Final = 16


def work_off(pool: Pool, budget_bytes: int) -> int:
    """Free what is purged, then evict what is above limits: about ``budget_bytes`` of work.

    An entry counts as one granule, or where its bytes are copied to the tier below as those (Pool.eviction_work).

    Returns:
        How many entries were evicted.
    """
    evicted = 0
    while pool.purged and budget_bytes > 0:
        reaped = pool.reap(next(iter(pool.purged)), -(-budget_bytes // GRANULE_BYTES))
        budget_bytes -= max(reaped, 1) * GRANULE_BYTES
    while (pool.namespaces_above or pool.above_limit) and budget_bytes > 0:
        if pool.namespaces_above:
            namespace = next(iter(pool.namespaces_above))
            owner = namespace.owner
            before_bytes = owner.budget.used_bytes
            went = pool.evict_namespace_down(namespace, budget_bytes)
        else:
            owner = next(iter(pool.above_limit))
            before_bytes = owner.budget.used_bytes
            went = pool.evict_down_to_limit(owner, budget_bytes)
        pool.changed(owner)
        evicted += went
        copied_bytes = 0 if pool.demote is None else before_bytes - owner.budget.used_bytes
        budget_bytes -= max(copied_bytes, went * GRANULE_BYTES, GRANULE_BYTES)
    return evicted


def reap_for(pool: Pool, index: PartitionIndex, extent_bytes: int) -> ArenaOffset | None:
    """Free what is purged, as far as a put into ``index`` needs it, and set its memory aside; None if that is too
    little.

    First what the namespace has purged of its own, then what the tenant has, which their limits count; then anybody's.
    """
    left = _FOR_PUT_MAX + extent_bytes // GRANULE_BYTES
    own = [gone for gone in pool.purged if gone.owner is index.owner]
    own.sort(key=lambda gone: gone.namespace is not index.namespace)
    for gone in own:
        while not index.may_grow(extent_bytes) and gone in pool.purged and left > 0:
            left -= pool.reap(gone, _AT_ONCE)
    if not index.may_grow(extent_bytes):
        return None
    offset = pool.extents.allocate(extent_bytes)
    while offset is None and pool.purged and left > 0:
        left -= pool.reap(next(iter(pool.purged)), _AT_ONCE)
        offset = pool.extents.allocate(extent_bytes)
    return offset
