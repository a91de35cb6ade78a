"""Entries held for reading: pinned batch by batch; their bytes stay where they are until they have left (I7)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

from dataplane.core.entry import EntryState, Pin
from dataplane.core.pool import Pool
from dataplane.core.tenant_cache import PartitionIndex, TenantCache
from saltern.errors import InternalError
from saltern.keys import BlockKey

_ADOPTED: Final = EntryState.ADOPTED  # an enum's member costs a descriptor call at each use in Python 3.11
_ABSENT: Final = b"\0"


def pin_entries(
    pool: Pool, index: PartitionIndex, keys: Sequence[BlockKey], now_ns: int, *, counts_misses: bool
) -> list[Pin | None]:
    """Pin the entries of ``keys`` that are in DRAM, in order, None for a miss; touches them last key first.

    An entry that outlived the process that wrote it is verified before it leaves for the first time (I7). Where
    transfers hold too much already, the front of the batch is served and the rest missed (I5).
    """
    pins: list[Pin | None] = [None] * len(keys)
    owner = index.owner
    find, touch, budget = index.entries.get, owner.order.touch, owner.budget
    last_ns = max(now_ns, pool.last_ns)
    hits = hit_bytes = 0
    servable = len(keys)
    if budget.used_bytes > pool.held.most_bytes(owner):
        servable = pool.held.servable(index, keys)
        owner.counters.hits_held_back += sum(key in index.entries for key in keys[servable:])
    # A time for each key, hit or not; a range makes exact ints, which are smaller (Extents) and live long.
    times_ns = range(last_ns + 1, last_ns + 1 + servable)
    for position, touched_ns in zip(range(servable - 1, -1, -1), times_ns, strict=True):
        entry = find(keys[position])
        if entry is None or (entry.state is _ADOPTED and not pool.verify(entry)):
            continue
        if not entry.pins:
            budget.hold(entry.extent_bytes)
        entry.pins += 1
        entry.touched_ns = touched_ns
        touch(entry)
        hits += 1
        hit_bytes += entry.size_bytes
        pins[position] = Pin(entry.offset, entry.size_bytes, entry.checksum, entry)
    pool.last_ns = last_ns + servable
    if owner.account is not None:
        owner.account.looked_up(keys, pins)
        budget.protected_bytes = owner.account.protected_bytes
    pool.changed(owner)
    counters = owner.counters
    counters.get_hits += hits
    counters.hit_tokens += hits * index.block_tokens
    index.namespace.get_hits += hits
    if counts_misses:
        counters.get_misses += len(keys) - hits
        index.namespace.get_misses += len(keys) - hits
    counters.get_bytes += hit_bytes
    return pins


def unpin_entries(pool: Pool, pins: Iterable[Pin | None]) -> None:
    """Give pins back, in any order and any grouping; None is skipped.

    Raises:
        InternalError: a pin was given back before.
    """
    unpin, changed = pool.unpin, pool.changed
    owner: TenantCache | None = None
    for pin in pins:
        if pin is None:
            continue
        if not pin.is_open:
            raise InternalError("a pin was given back twice", reason="PIN_REUSED")
        pin.is_open = False
        entry = pin.entry
        if pin.is_loan:
            pool.loans.end(entry)
        unpin(entry)
        if entry.index.owner is not owner:
            if owner is not None:
                changed(owner)
            owner = entry.index.owner
    if owner is not None:
        changed(owner)


def touch_entries(pool: Pool, index: PartitionIndex, keys: Sequence[BlockKey], now_ns: int) -> None:
    """Mark the entries of ``keys`` that are in DRAM as used, last key first."""
    owner = index.owner
    find, refresh, advance = index.entries.get, owner.order.refresh, pool.advance
    for key in reversed(keys):
        entry = find(key)
        if entry is not None:
            entry.touched_ns = advance(now_ns)
            refresh(entry)
            if owner.account is not None:
                owner.account.refreshed(key)
    pool.changed(owner)


def find_keys(keys: Sequence[BlockKey], places: Sequence[Container[BlockKey]]) -> tuple[int, bytes]:
    """Which keys are in any of ``places``: (how many from the first on without a gap, a byte of 0 or 1 for each)."""
    match places:  # DRAM alone, or with SSD: nobody shares, and a lookup is as short as can be
        case [place]:
            found = bytes(map(place.__contains__, keys))
        case [upper, lower]:
            found = bytes([key in upper or key in lower for key in keys])
        case _:
            found = bytes([any(key in place for place in places) for key in keys])
    gap = found.find(_ABSENT)
    return (len(found) if gap < 0 else gap), found


def note_missing(pool: Pool, owner: TenantCache, keys: Sequence[BlockKey], found: bytes) -> None:
    """Tell the account of a tenant that has one which of ``keys`` a lookup did not find (I5)."""
    account = owner.account
    missing = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
    if account is None or not missing:
        return
    account.not_found(missing)
    owner.budget.protected_bytes = account.protected_bytes
    pool.changed(owner)
