"""Segments of the SSD tier and their books: where a record goes, what makes room for it, how a segment ends.

The log knows tenants, budgets and segments, and nothing about policies or requests; each of its methods keeps books,
index and actions in step, so that the invariants hold between any two calls (I8).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dataplane.core.segments import BLOCK_BYTES, TOMBSTONES_MAX, Row, SegmentNumber, footer_blocks, record_blocks
from dataplane.core.ssd_books import (
    Append,
    Bury,
    DestroyKey,
    DropSegment,
    Grave,
    NamespaceSsd,
    Outdate,
    Relocate,
    Seal,
    SegmentBooks,
    SegmentState,
    SsdAction,
    SsdEntry,
    SsdPartition,
    TenantSsd,
)
from dataplane.core.ssd_victims import choose_segments, oldest_first
from dataplane.core.token_bucket import TokenBucket
from saltern.keys import BlockKey
from saltern.names import TenantId

MIB: Final = 1024 * 1024
SEGMENT_MAX_BYTES: Final = 64 * MIB
SEGMENT_MIN_BYTES: Final = 256 * 1024
#: A tenant's limit is cut into about this many segments: what one reclaim gives back.
SEGMENTS_PER_LIMIT: Final = 16
#: From here on a tenant's oldest segments are reclaimed, so that the next record finds room at once.
_SOFT_PERCENT: Final = 90
#: Lengths remembered to be shared.
_SIZES_MAX: Final = 1024


class SegmentLog:
    """Segments, books and reclaim of one node's SSD tier.

    Args:
        capacity_bytes: what all tenants together may have on disk.
        write_bytes_per_s: how fast a tenant may write whose policy does not say (flash wear); 0 for no bound.
        segment_min_bytes: no segment is planned smaller, however low the tenant's limit.

    Attributes:
        actions: to be taken from the left and done in order.
        is_writable: set by the shell; while it is False nothing is admitted, and reads go on.
        is_readable: set by the shell; while it is False nothing is found (I10: no promise that cannot be kept).
        is_known: set by the shell; False while nobody knows what is on disk, because it could not be read at the start.
        on_action: called after an action was added; it must not call back into the tier.
    """

    def __init__(
        self, capacity_bytes: int, *, write_bytes_per_s: int = 0, segment_min_bytes: int = SEGMENT_MIN_BYTES
    ) -> None:
        self.capacity_bytes: Final = capacity_bytes & -BLOCK_BYTES
        self.used_bytes = 0
        self.leaving_bytes = 0
        #: Bytes in the folder that no tenant can use: files of another version, or under another node's key.
        self.unusable_bytes = 0
        self.tenants: Final[dict[TenantId, TenantSsd]] = {}
        #: Tenants that may have more than their limits allow; None for any.
        self._above: set[TenantSsd] | None = None
        self.actions: Final[deque[SsdAction]] = deque()
        self.is_writable = True
        self.is_readable = True
        self.is_known = True
        self.on_action: Callable[[], None] | None = None
        self._write_bytes_per_s = write_bytes_per_s
        self._segment_min_bytes = segment_min_bytes
        self._next_number = 1
        self._sizes: dict[int, int] = {}
        #: Partitions of which something was deleted that may be on a disk that is not known: as many as policies name.
        self._outdated: set[Outdate] = set()

    # ---- recovery

    def adopt_partition(self, tenant: TenantId, number: SegmentNumber, storage_uid: str, epoch: int) -> SsdPartition:
        """Take over a partition found on disk. A tenant that no policy has named yet keeps what it has."""
        owner = self._owner(tenant)
        partition = SsdPartition(owner, number, storage_uid, epoch)
        self._next_number = max(self._next_number, number + 1)
        owner.partitions[storage_uid, epoch] = partition
        return partition

    def skip_numbers(self, highest: int) -> None:
        """Give no number up to ``highest``: something that cannot be used has it."""
        self._next_number = max(self._next_number, highest + 1)

    def adopt_segment(
        self,
        partition: SsdPartition,
        number: SegmentNumber,
        end_block: int,
        rows: Iterable[Row],
        tombstones: Iterable[BlockKey],
        *,
        is_sealed: bool,
    ) -> SegmentBooks:
        """Take over a segment; call it in ascending order of numbers, then :meth:`adopt_end`. Later records win.

        Args:
            end_block: where its records end.
            rows, tombstones: see :class:`dataplane.core.segments.Footer`.
        """
        self._next_number = max(self._next_number, number + 1)
        state = SegmentState.SEALED if is_sealed else SegmentState.CLOSED
        segment = SegmentBooks(number, partition, state, end_block, tombstones=list(tombstones))
        index, entries = partition.entries, segment.entries
        for key in segment.tombstones:
            if key in index:
                self._lose(index[key])
        live_bytes = shared_size = record_bytes = 0
        for key, block, size_bytes in rows:
            if size_bytes != shared_size:  # hardly ever: most blocks of a partition are of one length
                shared_size = self._shared(size_bytes)
                record_bytes = record_blocks(size_bytes) * BLOCK_BYTES
            older = index.get(key)
            if older is not None:
                if older.segment is segment:
                    live_bytes -= older.record_bytes
                else:
                    older.segment.live_bytes -= older.record_bytes
            index[key] = entry = SsdEntry(key, segment, block, shared_size)
            entries.append(entry)
            live_bytes += record_bytes
        segment.live_bytes = live_bytes
        segment.row_count = len(entries)
        partition.owner.segments[number] = segment
        self._charge(partition, segment.charged_bytes)
        return segment

    def adopt_end(self) -> None:
        """Let go of segments in which nothing is left, and have the others sealed."""
        for owner in list(self.tenants.values()):
            for segment in list(owner.segments.values()):
                if segment.state is SegmentState.CLOSED and (segment.live_bytes or self._is_needed(segment)):
                    self._ask_for_footer(segment)
                self._settle(segment)

    # ---- inside

    def _shared(self, size_bytes: int) -> int:
        """The same number as one object for all entries of that length."""
        if len(self._sizes) >= _SIZES_MAX:
            self._sizes.clear()
        return self._sizes.setdefault(size_bytes, size_bytes)

    def _ask(self, action: SsdAction) -> None:
        self.actions.append(action)
        if self.on_action is not None:
            self.on_action()

    def _owner(self, tenant: TenantId) -> TenantSsd:
        owner = self.tenants.get(tenant)
        if owner is None:
            rate = self._write_bytes_per_s
            owner = self.tenants[tenant] = TenantSsd(tenant, TokenBucket(rate, burst=rate))
        return owner

    def _number(self) -> SegmentNumber:
        number = self._next_number
        self._next_number += 1
        return SegmentNumber(number)

    def _charge(self, partition: SsdPartition, change_bytes: int) -> None:
        owner, namespace = partition.owner, partition.namespace
        owner.used_bytes += change_bytes
        namespace.used_bytes += change_bytes
        is_above = owner.used_bytes > owner.limit_bytes or namespace.used_bytes > namespace.limit_bytes
        if self._above is not None and is_above:
            self._above.add(owner)
        self.used_bytes += change_bytes

    def _charge_leaving(self, partition: SsdPartition, change_bytes: int) -> None:
        """The part of what is charged that is on its way out."""
        partition.owner.leaving_bytes += change_bytes
        partition.namespace.leaving_bytes += change_bytes
        self.leaving_bytes += change_bytes

    def _admit(
        self, partition: SsdPartition, key: BlockKey, size_bytes: int, *, replaces: SsdEntry | None = None
    ) -> Append | None:
        blocks = record_blocks(size_bytes)
        segment = self._segment_with_room(partition, blocks, rows=1, tombstones=0)
        if segment is None:
            return None
        append = Append(segment, segment.next_block, key, size_bytes, replaces)
        before_bytes = segment.charged_bytes
        segment.next_block += blocks
        segment.row_count += 1
        segment.writers += 1
        self._charge(partition, segment.charged_bytes - before_bytes)
        partition.writing[key] = append
        return append

    def _segment_with_room(
        self, partition: SsdPartition, blocks: int, *, rows: int, tombstones: int
    ) -> SegmentBooks | None:
        """The open segment, or a new one, that ``blocks`` are certain to fit within limits and capacity (I4)."""
        limit_bytes = min(partition.owner.limit_bytes, partition.namespace.limit_bytes)
        planned_bytes = max(limit_bytes // SEGMENTS_PER_LIMIT, self._segment_min_bytes)
        segment_bytes = min(planned_bytes, SEGMENT_MAX_BYTES)
        for _ in range(2):
            segment = partition.open_segment
            if segment is not None and segment.next_block > 1:
                segment = None if (segment.next_block + blocks) * BLOCK_BYTES > segment_bytes else segment
            if segment is None:
                need_bytes = (1 + blocks + footer_blocks(rows, tombstones)) * BLOCK_BYTES
            else:
                footer = footer_blocks(segment.row_count + rows, len(segment.tombstones) + tombstones)
                need_bytes = (segment.next_block + blocks + footer) * BLOCK_BYTES - segment.charged_bytes
            if not self._make_room(partition, need_bytes):
                return None
            if segment is None:
                return self._open_segment(partition)
            if segment is partition.open_segment:
                return segment
        return None  # making room cost the open segment itself, twice

    def _open_segment(self, partition: SsdPartition) -> SegmentBooks:
        if partition.open_segment is not None:
            self._retire(partition)
        segment = SegmentBooks(self._number(), partition)
        partition.open_segment = partition.owner.segments[segment.number] = segment
        self._charge(partition, segment.charged_bytes)
        return segment

    def _make_room(self, partition: SsdPartition, need_bytes: int) -> bool:
        """Whether ``need_bytes`` fit limits and capacity now; begins to reclaim what the next ones will need."""
        owner, namespace = partition.owner, partition.namespace
        for books in (namespace, owner):
            self._reclaim(books, books.limit_bytes * _SOFT_PERCENT // 100 - need_bytes)
        usable_bytes = self.capacity_bytes - self.unusable_bytes
        excess_bytes = self.used_bytes - self.leaving_bytes + need_bytes - usable_bytes * _SOFT_PERCENT // 100
        if excess_bytes > 0:
            is_full = self.used_bytes - self.leaving_bytes + need_bytes > usable_bytes
            for segment in choose_segments(owner, self.tenants.values(), need_bytes, excess_bytes, is_full=is_full):
                self._doom(segment)
        fits_limits = all(books.used_bytes + need_bytes <= books.limit_bytes for books in (namespace, owner))
        return fits_limits and self.used_bytes + need_bytes <= usable_bytes

    def _reclaim(self, books: TenantSsd | NamespaceSsd, target_bytes: int) -> None:
        """Let the oldest segments go, one after the other, until what stays is at most ``target_bytes``."""
        while books.used_bytes - books.leaving_bytes > target_bytes:
            segment = next(oldest_first(books), None)
            if segment is None:
                return
            headroom_bytes = (books.limit_bytes - books.used_bytes) // 2
            hot = []
            for entry in segment.live_entries() if segment.state is SegmentState.SEALED else ():
                if entry.is_hot and entry.record_bytes <= headroom_bytes:
                    headroom_bytes -= entry.record_bytes
                    hot.append(entry)
            if not hot:
                self._doom(segment)
                continue
            self._leave(segment, SegmentState.RECLAIMING)
            segment.relocating = len(hot)
            for entry in hot:
                self._ask(Relocate(entry))

    def _shrink(self, books: TenantSsd | NamespaceSsd) -> None:
        """A lower limit: oldest segments go at once, whatever is hot in them (I4)."""
        while books.used_bytes - books.leaving_bytes > books.limit_bytes:
            segment = next(oldest_first(books), None)
            if segment is None:
                return
            self._doom(segment)

    def _leave(self, segment: SegmentBooks, state: SegmentState) -> None:
        if segment.partition.open_segment is segment:
            segment.partition.open_segment = None
        if not segment.is_leaving:
            self._charge_leaving(segment.partition, segment.charged_bytes)
        segment.state = state

    def _doom(self, segment: SegmentBooks) -> None:
        """Nothing in it can be found any more; its file goes as soon as nobody uses it."""
        if segment.state in (SegmentState.DOOMED, SegmentState.DROPPING):
            return
        self._leave(segment, SegmentState.DOOMED)
        partition = segment.partition
        if self._has_key(partition):
            partition.remains[segment] = {entry.key for entry in segment.entries}
        for entry in segment.live_entries():
            partition.owner.counters.evictions += 1
            self._lose(entry)
        self._settle(segment)

    def _lose(self, entry: SsdEntry) -> None:
        del entry.segment.partition.entries[entry.key]
        entry.segment.live_bytes -= entry.record_bytes

    def _settle(self, segment: SegmentBooks) -> None:
        """Do what a segment may be waiting for."""
        if not segment.is_idle:
            return
        if segment.state is SegmentState.SEALING:
            self._ask_for_footer(segment)
        elif segment.live_bytes or self._is_needed(segment):
            return
        elif segment.state in (SegmentState.SEALED, SegmentState.CLOSED):
            self._doom(segment)
        elif segment.state is SegmentState.DOOMED:
            segment.state = SegmentState.DROPPING
            self._ask(DropSegment(segment))

    @staticmethod
    def _is_needed(segment: SegmentBooks) -> bool:
        """A tombstone outlives what it declares deleted, or a crash between the two would bring that back."""
        return bool(segment.tombstones and SegmentLog._older(segment))

    @staticmethod
    def _older(segment: SegmentBooks) -> list[SegmentBooks]:
        """Segments of its partition that were begun before it."""
        partition = segment.partition
        return [
            other
            for other in partition.owner.segments.values()
            if other.number < segment.number and other.partition is partition
        ]

    def _retire(self, partition: SsdPartition) -> None:
        """No more records for the open segment; its footer follows when the last one is on disk."""
        segment, partition.open_segment = partition.open_segment, None
        assert segment is not None
        segment.state = SegmentState.SEALING
        self._settle(segment)

    def _close(self, segment: SegmentBooks) -> None:
        if segment.partition.open_segment is segment:
            segment.partition.open_segment = None
        if segment.state in (SegmentState.OPEN, SegmentState.SEALING):
            segment.state = SegmentState.CLOSED

    def _ask_for_footer(self, segment: SegmentBooks) -> None:
        live = segment.live_entries()
        if not live and not segment.tombstones:
            self._doom(segment)
            return
        segment.state = SegmentState.SEALING
        segment.writers += 1
        rows = [(entry.key, entry.block, entry.size_bytes) for entry in live]
        self._ask(Seal(segment, segment.next_block, rows, tuple(segment.tombstones)))

    @staticmethod
    def _has_key(partition: SsdPartition) -> bool:
        """False once its data key is destroyed: nothing of it can come back then."""
        return partition.owner.partitions.get((partition.storage_uid, partition.epoch)) is partition

    @staticmethod
    def _take_remains(partition: SsdPartition, keys: Sequence[BlockKey]) -> list[Grave]:
        """Records of ``keys`` that no index has and that are still on disk: to be buried now (I12)."""
        graves: list[Grave] = []
        for segment, left in partition.remains.items():
            found = [key for key in keys if key in left]
            left.difference_update(found)
            graves += [Grave(key, segment) for key in found]
        return graves

    def _bury(self, partition: SsdPartition, graves: list[Grave]) -> None:
        """Write tombstones for keys whose records, in the segments given, are still on disk.

        A file that is removed before the tombstone would be written needs none, unless its removal fails.
        """
        if not self._has_key(partition):
            return
        for key, target, _ in graves:
            if target.state is SegmentState.DROPPING:
                target.owed[key] = None
        graves = [grave for grave in graves if grave.segment.state is not SegmentState.DROPPING]
        for start in range(0, len(graves), TOMBSTONES_MAX):
            batch = graves[start : start + TOMBSTONES_MAX]
            keys, targets = tuple(grave.key for grave in batch), frozenset(grave.segment for grave in batch)
            places = tuple((target, at) for _, target, at in batch if at is not None)
            segment = self._segment_with_room(partition, 1, rows=0, tombstones=len(batch)) if self.is_writable else None
            if segment is None:
                self._give_up(keys, targets)
                continue
            before_bytes = segment.charged_bytes
            block = segment.next_block
            segment.next_block += 1
            segment.tombstones += keys
            segment.writers += 1
            self._charge(partition, segment.charged_bytes - before_bytes)
            self._ask(Bury(segment, block, keys, targets, places))

    def _outdate_unknown(self, tenant: TenantId, storage_uid: str, epoch: int) -> None:
        """I12: a deletion that cannot be told to what is on disk costs the partition what it has there."""
        outdate = Outdate(tenant, storage_uid, epoch)
        if outdate not in self._outdated:
            self._outdated.add(outdate)
            self._ask(outdate)

    def _give_up(self, keys: Iterable[BlockKey], targets: Iterable[SegmentBooks]) -> None:
        """I12: rather lose whole segments than let an entry come back for which no tombstone can be written."""
        for target in sorted(targets, key=lambda segment: segment.number):
            target.owed.update(dict.fromkeys(keys))
            if target.tombstones:  # for the sake of older segments its file would stay: they go with it
                for older in self._older(target):
                    self._doom(older)
            self._doom(target)

    def _destroy(self, partition: SsdPartition) -> None:
        """I12: unreachable now; the key goes before the first byte does."""
        owner = partition.owner
        del owner.partitions[partition.storage_uid, partition.epoch]
        self._ask(DestroyKey(partition))
        for append in partition.writing.values():
            append.is_cancelled = True
        partition.writing.clear()
        partition.remains.clear()
        for segment in [other for other in owner.segments.values() if other.partition is partition]:
            segment.tombstones.clear()
            self._doom(segment)

    def _forget_if_empty(self, owner: TenantSsd) -> None:
        if not owner.in_policy and not owner.segments and not owner.partitions:
            owner.namespaces.clear()  # no circle stays behind (dataplane.io.garbage)
            self.tenants.pop(owner.tenant, None)
