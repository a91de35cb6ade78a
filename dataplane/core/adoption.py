"""Puts a snapshot's entries back into an empty core: all that the policy names, at their old places, or none.

What the policy no longer names is not taken over, so it is unreachable and its memory free (I12). The entries are built
and judged apart from the core, and become part of it only once the snapshot has proven consistent: no two entries share
memory (I2), none lies outside the arena, no key is there twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dataplane.core.admission import restore_partition
from dataplane.core.entry import Entry, EntryState
from dataplane.core.eviction import Eviction
from dataplane.core.extents import GRANULE_BYTES, ArenaOffset, round_up
from dataplane.core.pool import Pool
from dataplane.core.snapshot import BadSnapshotError, Columns, SavedTenant, Snapshot
from dataplane.core.tenant_cache import PartitionIndex, TenantCache
from tenants.policy import NodePolicy, TenantPolicy, TenantState


@dataclass(frozen=True, slots=True)
class Adopted:
    """What became of a snapshot.

    Attributes:
        entries, size_bytes: taken over, and there now.
        purged_entries: not taken over, because the policy does not name their partition any more (I12).
        evicted_entries: taken over and evicted at once, because a limit is lower than it was (I4).
    """

    entries: int
    size_bytes: int
    purged_entries: int
    evicted_entries: int


@dataclass(slots=True, eq=False)
class _Restored:
    """One tenant's entries before they are part of the core; ``entries`` from the coldest on."""

    owner: TenantCache
    saved: SavedTenant
    indexes: list[PartitionIndex | None]
    entries: list[Entry] = field(default_factory=list)


def adopt_snapshot(pool: Pool, policy: NodePolicy, eviction: Eviction, snapshot: Snapshot, now_ns: int) -> Adopted:
    """Adopt ``snapshot`` into ``pool``, which holds no entry yet and serves ``policy``.

    Raises:
        BadSnapshotError: it contradicts itself, or the memory is not free; nothing is changed then.
    """
    if pool.extents.free_bytes != pool.extents.capacity_bytes:
        raise BadSnapshotError("the cache is in use already")
    base_ns = pool.advance(now_ns)
    capacity_granules = pool.extents.capacity_bytes // GRANULE_BYTES
    restored: list[_Restored] = []
    runs: list[tuple[int, int]] = []
    for saved in snapshot.tenants:
        rules = policy.tenants.get(saved.tenant)
        if rules is None:
            continue
        owner = pool.tenants[saved.tenant]
        part = _Restored(owner, saved, _make_indexes(policy, owner, saved, rules))
        for columns in saved.blocks():
            _restore(part, columns, base_ns, capacity_granules)
        restored.append(part)
        runs += [(entry.offset, entry.extent_bytes) for entry in part.entries]
    built = sum(len(part.entries) for part in restored)
    if len({entry.touched_ns for part in restored for entry in part.entries}) < built:
        raise BadSnapshotError("two entries are equally old")
    used_runs = _merge(runs)

    for offset, extent_bytes in used_runs:
        pool.extents.take(ArenaOffset(offset), extent_bytes)
    for part in restored:
        for entry in part.entries:
            pool.extents.divide(entry.offset)
    evicted_entries = 0
    for part in restored:
        _attach(pool, part, policy.tenants[part.owner.tenant], is_same_order=snapshot.eviction == eviction)
    if pool.layout is not None:
        for part in restored:
            for entry in part.entries:
                pool.layout.add(entry)
    for part in restored:
        evicted_entries += sum(map(pool.evict_namespace_down, part.owner.namespaces.values()))
        evicted_entries += pool.evict_down_to_limit(part.owner)
        pool.changed(part.owner)
    return Adopted(
        entries=built - evicted_entries,
        size_bytes=sum(part.owner.budget.resident_bytes for part in restored),
        purged_entries=snapshot.entries - built,
        evicted_entries=evicted_entries,
    )


def _make_indexes(
    policy: NodePolicy, owner: TenantCache, saved: SavedTenant, rules: TenantPolicy
) -> list[PartitionIndex | None]:
    """An empty index for each partition of the snapshot that the policy names, None for the others."""
    indexes: list[PartitionIndex | None] = []
    for name in saved.partitions:
        partition = restore_partition(policy, saved.tenant, name.namespace, name.storage_uid, name.epoch)
        if partition is None:
            indexes.append(None)
            continue
        namespace = rules.namespaces[name.namespace]
        newest = namespace.epochs_of(partition.group_uid)[-1]
        indexes.append(PartitionIndex(partition, owner, namespace.block_bytes, name.epoch == newest))
    return indexes


def _restore(part: _Restored, columns: Columns, base_ns: int, capacity_granules: int) -> None:
    """Build the entries of one block.

    Raises:
        BadSnapshotError: one of them cannot be.
    """
    indexes, entries = part.indexes, part.entries
    partitions = len(indexes)
    for at, (granule, size_bytes, checksum, age_ns, number, is_proven) in enumerate(
        zip(
            columns.granules,
            columns.sizes_bytes,
            columns.checksums,
            columns.ages_ns,
            columns.partitions,
            columns.proven,
            strict=True,
        )
    ):
        extent_bytes = round_up(size_bytes)
        if not size_bytes or granule + extent_bytes // GRANULE_BYTES > capacity_granules or number >= partitions:
            raise BadSnapshotError("an entry lies outside the arena or belongs to no partition")
        index = indexes[number]
        if index is None:
            continue
        key = columns.key(at)
        if key in index.entries:
            raise BadSnapshotError("a key is there twice")
        entry = Entry(key, index, ArenaOffset(granule * GRANULE_BYTES), size_bytes, extent_bytes)
        entry.state = EntryState.ADOPTED
        entry.checksum = checksum
        entry.touched_ns = base_ns - age_ns
        entry.is_proven = is_proven != 0
        index.entries[key] = entry
        entries.append(entry)


def _merge(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join (offset, length) of extents that touch each other, so that few are left to take.

    Raises:
        BadSnapshotError: two of them overlap (I2).
    """
    merged: list[tuple[int, int]] = []
    start = end = 0
    for offset, extent_bytes in sorted(runs):
        if offset < end:
            raise BadSnapshotError("two entries share memory")
        if offset > end > start:
            merged.append((start, end - start))
        if offset > end:
            start = offset
        end = offset + extent_bytes
    if end > start:
        merged.append((start, end - start))
    return merged


def _attach(pool: Pool, part: _Restored, rules: TenantPolicy, *, is_same_order: bool) -> None:
    """Make a tenant's restored entries part of the core."""
    owner = part.owner
    for index in part.indexes:
        # An index without entries is made when it is used, as ever.
        if index is not None and index.entries:
            owner.partitions[index.partition] = index
            if rules.state is TenantState.ACTIVE:
                pool.open[index.partition] = index
    if is_same_order:
        owner.order.counts = part.saved.counts
    else:
        part.entries.sort(key=lambda entry: entry.touched_ns)
    adopt, account = owner.order.adopt, owner.account
    for entry in part.entries:
        adopt(entry)
        entry.index.namespace.used_bytes += entry.extent_bytes
        if account is not None:
            account.stored(entry.key, entry.extent_bytes)
    owner.budget.adopt(
        size_bytes=sum(entry.size_bytes for entry in part.entries),
        extent_bytes=sum(entry.extent_bytes for entry in part.entries),
    )
    if account is not None:
        owner.budget.protected_bytes = account.protected_bytes
