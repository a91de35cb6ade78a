"""Gets and puts that take no time: what a replay asks of a core, where no bytes move and so nothing is ever in flight.

``use_at_once`` does for every key what :meth:`get_start` with :meth:`get_end`, or :meth:`put_start` with
:meth:`put_commit`, would do one after the other. It decides nothing of its own: whom a put displaces is asked of
:mod:`dataplane.core.victims`, and a test compares every outcome with that of the commands themselves. What it leaves
out is what no time passes for: tickets, pins, and giving memory back to take the same extent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from dataplane.core.entry import Entry, EntryState, Link, PutRefused
from dataplane.core.extents import round_up
from dataplane.core.lru import LruOrder
from dataplane.core.pool import Pool
from dataplane.core.prechecks import precheck
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.tenant_cache import NO_LIMIT_BYTES, PartitionIndex
from dataplane.core.usage import EvictionCause
from dataplane.core.victims import only_victim
from saltern.keys import BlockKey

_READABLE = EntryState.READABLE  # an enum's member costs a descriptor call at each use in Python 3.11
_OWN_LIMIT, _OWN_PUT = EvictionCause.OWN_LIMIT, EvictionCause.OWN_PUT


def can_be_at_once(pool: Pool, index: PartitionIndex) -> bool:
    """Whether nothing is in the way: no transfer, no rule that follows single pins or moves, nothing left to free."""
    owner = index.owner
    return (
        owner.account is None
        and pool.layout is None
        and not pool.purged
        and not pool.above_limit
        and not pool.held.beyond_bytes
        and not owner.budget.held_bytes
        and not index.writing
        and index.namespace.limit_bytes >= NO_LIMIT_BYTES
    )


def use_at_once(
    pool: Pool,
    index: PartitionIndex,
    keys: Sequence[BlockKey],
    size_bytes: int,
    now_ns: int,
    *,
    reads: bool,
    is_frozen: bool,
    ssd: SsdTier | None = None,
) -> None:
    """Touch each key that is there, if ``reads``, and store each that is not, in the order given.

    Only where :func:`can_be_at_once`. Counts hits and puts as the commands do.

    Args:
        ssd: the tier below; what it has is not stored again.
    """
    if not keys:
        return
    lengths = size_bytes, round_up(size_bytes)
    refused = precheck(pool, index, keys[0], *lengths, is_frozen=is_frozen)
    if ssd is None and type(index.owner.order) is LruOrder:
        _use_by_lru(pool, index, index.owner.order, keys, lengths, now_ns, refused=refused, reads=reads)
    else:
        _use_by_order(pool, index, keys, lengths, now_ns, refused=refused, reads=reads, ssd=ssd)


def _use_by_order(
    pool: Pool,
    index: PartitionIndex,
    keys: Sequence[BlockKey],
    lengths: tuple[int, int],
    now_ns: int,
    *,
    refused: PutRefused | None,
    reads: bool,
    ssd: SsdTier | None,
) -> None:
    """By whatever order the tenant has."""
    owner = index.owner
    entries, order, counters, demote = index.entries, owner.order, owner.counters, pool.demote
    size_bytes, extent_bytes = lengths
    find, touch, insert, first, evict = entries.get, order.touch, order.insert, order.first, order.evict
    last_ns = max(now_ns - 1, pool.last_ns)
    hits = hit_bytes = stored = replaced = 0
    cause: EvictionCause | None = None
    for key in keys:
        entry = find(key)
        if entry is None:
            if ssd is not None and ssd.outdate(index.partition, key):
                continue
            # Once an entry took the place of another one, the books are as they were: so will the next one.
            victim = None if cause is None else first()
            if (
                victim is not None
                and victim.index is index
                and victim.extent_bytes == extent_bytes
                and victim.size_bytes == size_bytes
                and not victim.pins
            ):
                if demote is not None:
                    demote(victim)
                evict(victim)
                del entries[victim.key]
                victim.key, victim.is_proven, victim.checksum = key, False, 0
                replaced += 1
                entry = victim
            else:
                if replaced and cause is not None:
                    counters.evicted(size_bytes, cause, replaced)
                    replaced = 0
                pool.last_ns = last_ns
                admitted, cause = (refused, None) if refused else _admit(pool, index, key, lengths, now_ns)
                last_ns = pool.last_ns
                if isinstance(admitted, PutRefused):
                    counters.refused(admitted.error.reason)
                    continue
                entry = admitted
            entries[key] = entry
            entry.touched_ns = last_ns = last_ns + 1
            insert(entry)
            stored += 1
        elif reads:
            entry.touched_ns = last_ns = last_ns + 1
            touch(entry)
            hits += 1
            hit_bytes += entry.size_bytes
    if replaced and cause is not None:
        counters.evicted(size_bytes, cause, replaced)
    pool.last_ns = last_ns
    _count(index, hits, hit_bytes, stored, stored * size_bytes)
    pool.changed(owner)


def _use_by_lru(  # noqa: PLR0917, PLR0915 - called once for each batch, and all of it in one loop
    pool: Pool,
    index: PartitionIndex,
    order: LruOrder,
    keys: Sequence[BlockKey],
    lengths: tuple[int, int],
    now_ns: int,
    *,
    refused: PutRefused | None,
    reads: bool,
) -> None:
    """The same for LRU, where it is simple: whatever was touched or stored is the warmest entry.

    The ring is threaded here, without a call of the order for each step, and is closed before anybody else looks at it:
    until then ``warmer`` of the warmest and ``colder`` of the root are out of date, and nobody reads them. A replay
    spends most of its time here. Who is told of evicted entries (:attr:`Pool.demote`) does not look at the order.
    """
    size_bytes, extent_bytes = lengths
    entries, counters, demote, root = index.entries, index.owner.counters, pool.demote, order.root
    find = entries.get
    last_ns = max(now_ns - 1, pool.last_ns)
    warmest: Link = root.colder
    hits = hit_bytes = stored = replaced = 0
    cause: EvictionCause | None = None
    for key in keys:
        entry = find(key)
        if entry is None:
            # Once an entry took the place of another one, the books are as they were: so will the next one.
            entry = cast("Entry", root.warmer)
            if (
                cause is not None
                and entry.index is index
                and entry.size_bytes == size_bytes
                and entry.extent_bytes == extent_bytes
                and not entry.pins
            ):
                if demote is not None:
                    demote(entry)
                del entries[entry.key]
                entry.key, entry.is_proven, entry.checksum = key, False, 0
                replaced += 1
            else:
                if replaced and cause is not None:
                    counters.evicted(size_bytes, cause, replaced)
                    stored += replaced
                    replaced = 0
                warmest.warmer, root.colder = root, warmest
                pool.last_ns = last_ns
                admitted, cause = (refused, None) if refused else _admit(pool, index, key, lengths, now_ns)
                last_ns, warmest = pool.last_ns, root.colder
                if isinstance(admitted, PutRefused):
                    counters.refused(admitted.error.reason)
                    continue
                stored += 1
                entries[key] = admitted
                admitted.touched_ns = last_ns = last_ns + 1
                warmest.warmer, admitted.colder = admitted, warmest
                warmest = admitted
                continue
            entries[key] = entry
        elif reads:
            hits += 1
            hit_bytes += entry.size_bytes
        else:
            continue
        entry.touched_ns = last_ns = last_ns + 1
        if entry is not warmest:
            colder, warmer = entry.colder, entry.warmer
            colder.warmer, warmer.colder = warmer, colder
            warmest.warmer, entry.colder = entry, warmest
            warmest = entry
    warmest.warmer, root.colder = root, warmest
    if replaced and cause is not None:
        counters.evicted(size_bytes, cause, replaced)
        stored += replaced
    pool.last_ns = last_ns
    _count(index, hits, hit_bytes, stored, stored * size_bytes)
    pool.changed(index.owner)


def _count(index: PartitionIndex, hits: int, hit_bytes: int, puts: int, put_bytes: int) -> None:
    counters = index.owner.counters
    counters.puts_stored += puts
    counters.put_bytes += put_bytes
    counters.get_hits += hits
    counters.get_bytes += hit_bytes
    counters.hit_tokens += hits * index.block_tokens
    index.namespace.get_hits += hits


def _admit(
    pool: Pool, index: PartitionIndex, key: BlockKey, lengths: tuple[int, int], now_ns: int
) -> tuple[Entry | PutRefused, EvictionCause | None]:
    """An entry of (size, extent) bytes, charged as resident, in memory that was free or somebody else's (I4, I6); and
    why another one of the same owner gave it its place, if one did."""
    size_bytes, extent_bytes = lengths
    owner = index.owner
    budget = owner.budget
    excess_bytes = budget.used_bytes + extent_bytes - budget.limit_bytes
    offset = pool.extents.allocate(extent_bytes) if excess_bytes <= 0 else None
    if offset is not None:
        budget.adopt(size_bytes, extent_bytes)
        index.namespace.used_bytes += extent_bytes
        return _readable(Entry(key, index, offset, size_bytes, extent_bytes)), None
    victim = only_victim(pool.extents, owner, pool.borrowers, extent_bytes, excess_bytes)
    if victim is not None:
        cause = _OWN_LIMIT if excess_bytes > 0 else _OWN_PUT
        _replace(pool, victim, index, key, size_bytes, cause)
        return victim, cause
    pool.changed(owner)
    admitted = pool.admit(index, key, size_bytes, extent_bytes, now_ns)
    if isinstance(admitted, PutRefused):
        return admitted, None
    del index.writing[key]
    budget.commit(size_bytes, extent_bytes)
    pool.held.note(owner)
    return _readable(admitted), None


def _replace(  # noqa: PLR0917 - called once for each block
    pool: Pool, victim: Entry, index: PartitionIndex, key: BlockKey, size_bytes: int, cause: EvictionCause
) -> None:
    """Evict an entry for the next one, of the same tenant and extent: what is charged, what is free and who could lose
    what stay as they are (I4, I8). Nobody knows the old one any more, so its object serves again."""
    owner, left = index.owner, victim.index
    owner.counters.evicted(victim.size_bytes, cause)
    if pool.demote is not None:
        pool.demote(victim)
    owner.order.evict(victim)
    del left.entries[victim.key]
    if left is not index:
        left.namespace.used_bytes -= victim.extent_bytes
        index.namespace.used_bytes += victim.extent_bytes
        victim.index = index
    if victim.size_bytes != size_bytes:
        owner.budget.resident_bytes += size_bytes - victim.size_bytes
        victim.size_bytes = size_bytes
    victim.key = key
    victim.is_proven = False
    victim.checksum = 0


def _readable(entry: Entry) -> Entry:
    entry.state = _READABLE
    return entry
