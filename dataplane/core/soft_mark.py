"""The soft mark: a tenant's own coldest entries leave in the background before its puts would have to wait for that.

A put at the limit evicts in its own path, and with an SSD tier an eviction copies bytes. So a tenant may be trimmed to
a share of its limit between requests, and its next puts find room. Trimming never takes from a reservation (I5): the
mark is at the reservation at least, and an entry that straddles it stays.
"""

from __future__ import annotations

from dataplane.core.entry import Entry
from dataplane.core.pool import Pool
from dataplane.core.tenant_cache import TenantCache
from dataplane.core.usage import EvictionCause


def trim(pool: Pool, budget_bytes: int) -> int:
    """Evict own coldest entries of tenants above their marks, in turns of one entry.

    Constant time for each entry that goes; tenants below their marks are not looked at.

    Args:
        budget_bytes: most to evict, in whole granules; a first entry that is larger goes all the same.

    Returns:
        Bytes evicted; 0 if nothing is above a mark that could go.
    """
    above = pool.above_mark
    evicted_bytes = 0
    while above and evicted_bytes < budget_bytes:
        owner = next(iter(above))
        entry = next_trimmed(owner)
        if entry is None:
            del above[owner]
            continue
        if evicted_bytes and evicted_bytes + entry.extent_bytes > budget_bytes:
            break
        del above[owner]  # evicting puts it back, behind the others, if it is still above
        evicted_bytes += entry.extent_bytes
        pool.evict(entry, EvictionCause.SOFT_MARK)
    return evicted_bytes


def next_trimmed(owner: TenantCache) -> Entry | None:
    """The coldest entry that nobody holds, if its tenant is above its mark and keeps its reservation without it."""
    budget = owner.budget
    if budget.used_bytes <= budget.soft_mark_bytes:
        return None
    for entry in owner.order:
        if not entry.pins:
            return entry if budget.used_bytes - entry.extent_bytes >= budget.reserved_bytes else None
    return None
