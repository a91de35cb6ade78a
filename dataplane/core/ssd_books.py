"""What the core keeps of the SSD tier: segments, entries and books of each tenant; and what it asks the shell to do.

::

    segment   OPEN --> SEALING --> SEALED --> RECLAIMING --> DOOMED --> DROPPING --> (gone)
               |________________CLOSED (a write failed: no footer)__^

Bytes are charged in whole blocks when a record is admitted, together with the footer that the segment will need, and
credited when the file is gone: dead records count as long as they are on disk, so that the limit holds for bytes on the
device and not only for what can be read (I4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from dataplane.core.partition import split_storage_uid
from dataplane.core.segments import BLOCK_BYTES, Row, SegmentNumber, footer_blocks, record_blocks
from dataplane.core.token_bucket import TokenBucket
from dataplane.core.usage import SsdCounters
from saltern.keys import BlockKey
from saltern.names import TenantId
from tenants.quota import TierQuota

NO_QUOTA = TierQuota(reserved_bytes=0, limit_bytes=0)
#: The limit of a namespace that has none: more than any device has.
NO_LIMIT_BYTES: Final = 2**63 - 1
_NO_COUNTS: Final = SsdCounters()


class SegmentState(Enum):
    """What may happen to a segment; see the module's drawing."""

    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    CLOSED = "closed"
    RECLAIMING = "reclaiming"
    DOOMED = "doomed"
    DROPPING = "dropping"


class SsdEntry:
    """One entry on SSD. It is alive exactly while its partition's index holds it.

    Attributes:
        is_hot: read since it was written; a reclaim writes it anew instead of losing it.
    """

    # Every word counts where there are millions: two numbers share one, and a fifth slot would cost two.
    __slots__ = ("_block_and_hot", "key", "segment", "size_bytes")

    def __init__(self, key: BlockKey, segment: SegmentBooks, block: int, size_bytes: int) -> None:
        self.key = key
        self.segment = segment
        self._block_and_hot = block << 1
        self.size_bytes = size_bytes

    @property
    def block(self) -> int:
        return self._block_and_hot >> 1

    @property
    def is_hot(self) -> bool:
        return bool(self._block_and_hot & 1)

    @is_hot.setter
    def is_hot(self, value: bool) -> None:
        self._block_and_hot = self._block_and_hot & ~1 | value

    @property
    def is_alive(self) -> bool:
        return self.segment.partition.entries.get(self.key) is self

    @property
    def record_bytes(self) -> int:
        return record_blocks(self.size_bytes) * BLOCK_BYTES


@dataclass(slots=True, eq=False)
class SegmentBooks:
    """One segment file.

    Attributes:
        next_block: where the next record goes.
        entries: everything written to it, dead ones too, by block.
        tombstones: keys of which every record in an older segment is dead.
        row_count: entries and records on their way: what its footer may have to list.
        live_bytes: record bytes of its live entries.
        readers, writers: operations in progress; the file stays while there are any.
        relocating: hot entries that are being written anew.
        owed: keys that were deleted or replaced while the file was as good as gone: if it is not, they need tombstones.
    """

    number: SegmentNumber
    partition: SsdPartition
    state: SegmentState = SegmentState.OPEN
    next_block: int = 1
    entries: list[SsdEntry] = field(default_factory=list)
    tombstones: list[BlockKey] = field(default_factory=list)
    row_count: int = 0
    live_bytes: int = 0
    readers: int = 0
    writers: int = 0
    relocating: int = 0
    owed: dict[BlockKey, None] = field(default_factory=dict)

    @property
    def charged_bytes(self) -> int:
        """Head, records, and the footer as large as it may become."""
        return (self.next_block + footer_blocks(self.row_count, len(self.tombstones))) * BLOCK_BYTES

    @property
    def is_leaving(self) -> bool:
        return self.state in (SegmentState.RECLAIMING, SegmentState.DOOMED, SegmentState.DROPPING)

    @property
    def is_idle(self) -> bool:
        return not (self.readers or self.writers)

    def live_entries(self) -> list[SsdEntry]:
        return [entry for entry in self.entries if entry.is_alive]


@dataclass(slots=True, eq=False)
class NamespaceSsd:
    """What one namespace has on SSD, all of its partitions together, and what it may have (I4, I8).

    Attributes:
        limit_bytes: ``used_bytes`` never grows past it; the tenant's own limit holds besides.
        used_bytes, leaving_bytes: its part of the tenant's.
    """

    owner: TenantSsd = field(repr=False)
    limit_bytes: int = NO_LIMIT_BYTES
    used_bytes: int = 0
    leaving_bytes: int = 0

    @property
    def segments(self) -> dict[SegmentNumber, SegmentBooks]:
        """Its part of the tenant's, oldest first."""
        return {
            number: segment for number, segment in self.owner.segments.items() if segment.partition.namespace is self
        }


@dataclass(slots=True, eq=False)
class SsdPartition:
    """The SSD index of one partition, and the folder with a data key of its own that its segments lie in.

    Attributes:
        storage_uid: :attr:`dataplane.core.partition.Partition.storage_uid`: namespace and sharing group, if any.
        number: of the folder; never used twice, so that a partition made anew under an old name shares nothing (I12).
        writing: records on their way, by key; invisible (I7).
        remains: keys of records that no index has any more and that are still on disk, by segment: those that could not
            be read, and all of a segment that goes. A restart may find them, which it must not once the client has
            deleted or replaced them (I12).
        namespace: the books that its segments are charged to, beside the tenant's.
    """

    owner: TenantSsd
    number: SegmentNumber
    storage_uid: str
    epoch: int
    entries: dict[BlockKey, SsdEntry] = field(default_factory=dict)
    writing: dict[BlockKey, Append] = field(default_factory=dict)
    remains: dict[SegmentBooks, set[BlockKey]] = field(default_factory=dict)
    open_segment: SegmentBooks | None = None
    namespace: NamespaceSsd = field(init=False)

    def __post_init__(self) -> None:
        self.namespace = self.owner.namespace(split_storage_uid(self.storage_uid)[0])


@dataclass(slots=True, eq=False)
class TenantSsd:
    """Everything of one tenant on SSD.

    Attributes:
        used_bytes: charged; the sum over its segments (I8).
        leaving_bytes: the part of it that is on its way out.
        segments: by number, oldest first.
        uid: of the tenant that is counted for; empty where the policy does not say.
        namespaces: by uid: those that have something here and those that have a limit.
    """

    tenant: TenantId
    bucket: TokenBucket
    quota: TierQuota = NO_QUOTA
    in_policy: bool = False
    used_bytes: int = 0
    leaving_bytes: int = 0
    partitions: dict[tuple[str, int], SsdPartition] = field(default_factory=dict)
    segments: dict[SegmentNumber, SegmentBooks] = field(default_factory=dict)
    counters: SsdCounters = field(default_factory=SsdCounters)
    uid: str = ""

    def set_uid(self, uid: str) -> None:
        """As of :class:`dataplane.core.tenant_cache.TenantCache`: an earlier tenant's counters are not this one's."""
        if self.uid and self.uid != uid:
            self.counters = SsdCounters()
        self.uid = uid

    namespaces: dict[str, NamespaceSsd] = field(default_factory=dict)

    @property
    def is_blank(self) -> bool:
        """Nothing is held or reserved, and nothing ever happened."""
        if self.partitions or self.namespaces or self.used_bytes or self.quota.reserved_bytes:
            return False
        return self.counters == _NO_COUNTS

    @property
    def limit_bytes(self) -> int:
        return self.quota.limit_bytes

    @property
    def is_above_a_limit(self) -> bool:
        """Whether it uses more than its limit, or one of its namespaces more than that one's; what leaves counts."""
        if self.used_bytes > self.limit_bytes:
            return True
        return any(namespace.used_bytes > namespace.limit_bytes for namespace in self.namespaces.values())

    def namespace(self, uid: str) -> NamespaceSsd:
        """The books of a namespace, made with the first use."""
        books = self.namespaces.get(uid)
        if books is None:
            books = self.namespaces[uid] = NamespaceSsd(self)
        return books


@dataclass(slots=True, eq=False)
class Append:
    """A record to write at ``block`` of ``segment``; end it exactly once.

    Attributes:
        replaces: the entry that this is the new copy of, if it is a relocation.
        is_cancelled: deleted while on its way.
    """

    segment: SegmentBooks
    block: int
    key: BlockKey
    size_bytes: int
    replaces: SsdEntry | None = None
    is_cancelled: bool = False
    is_open: bool = True


@dataclass(slots=True, eq=False)
class SsdRead:
    """The right to read one record, for a client or to relocate it; end it exactly once.

    Attributes:
        reader: whose read it is: the entry's tenant, or a peer of it in a sharing group.
    """

    entry: SsdEntry
    reader: TenantId
    relocates: bool = False
    is_open: bool = True


class Grave(NamedTuple):
    """A record that must not come back, by key and segment; ``block`` where it begins, None if nobody knows."""

    key: BlockKey
    segment: SegmentBooks
    block: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bury:
    """Write a tombstone record at ``block``; answer with :meth:`SsdTier.bury_end`.

    ``targets`` are the segments that hold the deleted records; ``places`` those of the records that are known.
    """

    segment: SegmentBooks
    block: int
    keys: tuple[BlockKey, ...]
    targets: frozenset[SegmentBooks]
    places: tuple[tuple[SegmentBooks, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """Write the footer at ``end_block`` and make the segment durable; answer with :meth:`SsdTier.seal_end`."""

    segment: SegmentBooks
    end_block: int
    rows: Sequence[Row]
    tombstones: Sequence[BlockKey]


@dataclass(frozen=True, slots=True, eq=False)
class Relocate:
    """Read an entry and append it anew; answer with :meth:`SsdTier.relocate_end`, whatever came of it."""

    entry: SsdEntry


@dataclass(frozen=True, slots=True, eq=False)
class DropSegment:
    """Remove a segment's file; answer with :meth:`SsdTier.drop_end`; :meth:`SsdTier.drop_again` tries once more."""

    segment: SegmentBooks


@dataclass(frozen=True, slots=True, eq=False)
class DestroyKey:
    """Destroy a partition's data key (I12); its folder follows when its last segment is gone. No answer."""

    partition: SsdPartition


@dataclass(frozen=True, slots=True)
class Outdate:
    """Remember, over a restart, that what a partition has on disk must not be served any more.

    Answer with :meth:`SsdTier.outdate_end`.
    """

    tenant: TenantId
    storage_uid: str
    epoch: int


SsdAction: TypeAlias = Bury | Seal | Relocate | DropSegment | DestroyKey | Outdate
