"""What a node writes down of its DRAM tier when it stops, so that the next process can serve the same memory: bytes
from the core, and back to values that :mod:`dataplane.core.adoption` puts into a core. No I/O.

The file, all integers little-endian::

    preamble   magic "SALTSNAP", format version (2 bytes), zero (2), length of the head (4), length of the blocks (8)
    head       msgpack: the arena that it belongs to; eviction order; for each tenant its partitions, the number of its
               entries and what its order has measured
    blocks     for each tenant its entries, coldest first, in blocks of at most 65,536; each block in columns:
               keys (32 bytes each), offsets in granules (4), lengths (4), checksums (8), ages in ns (8), numbers of
               the partition (4), proven or not (1)
    checksum   XXH3-128 over everything before it (16)

61 bytes an entry. Columns are read and written by ``array``, in C; blocks bound what that takes beside the entries.

Ages count back from the core's last touch, so that the time for which no process ran does not age anything. Counters
are not kept: they are those of a process, as monitoring expects, and usage is recomputed from the entries (I8). Neither
are the keys evicted lately (:mod:`dataplane.core.ghosts`): they would double the size for a slightly better order.

**Versions.** What readers of a version need is frozen with it (``tests/vectors``). A change of the format takes a new
number, and :data:`_READERS` keeps a reader for each older one that can still be turned into the values of today; the
reader goes when its version can no longer be on any machine that is upgraded step by step. A version without a reader,
older or newer, is thrown away: a cold start is never wrong.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Final

import msgspec
import xxhash

from dataplane.core.entry import Entry
from dataplane.core.eviction import Eviction
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.partition import Partition
from dataplane.core.pool import Pool
from saltern.keys import KEY_BYTES, BlockKey
from saltern.names import NamespaceId, TenantId

FORMAT_VERSION: Final = 1
BLOCK_ENTRIES: Final = 65_536
_MAGIC: Final = b"SALTSNAP"
_PREAMBLE: Final = struct.Struct("<8sHHIQ")
_CHECKSUM_BYTES: Final = 16
#: Bytes of one entry in the columns.
ENTRY_BYTES: Final = KEY_BYTES + 4 + 4 + 8 + 8 + 4 + 1
_HEAD_MAX_BYTES: Final = 256 * 1024 * 1024
_U64_MAX: Final = 2**64 - 1


class BadSnapshotError(Exception):
    """A snapshot that cannot be used; says why in a few words. Never leaves the data plane: the start is cold then."""


@dataclass(frozen=True, slots=True)
class ArenaIdentity:
    """The memory that a snapshot describes; any difference makes the snapshot worthless.

    Attributes:
        node_id: whose cache it is.
        boot_id: of the kernel: memory does not outlive it.
        generation: random name of the arena's file; a new one for each arena.
        inode: of that file.
        capacity_bytes: length of the arena.
    """

    node_id: str
    boot_id: str
    generation: str
    inode: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class SavedPartition:
    """Names a partition as the policy did when the snapshot was written; see dataplane.core.partition."""

    namespace: NamespaceId
    storage_uid: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Some entries of one tenant, from the coldest on; entry i is made of the i-th value of each column.

    Attributes:
        keys: 32 bytes an entry.
        granules: offsets in the arena, in granules.
        ages_ns: since the last use, counted from the last touch in the core.
        partitions: places in :attr:`SavedTenant.partitions`.
        proven: 1 where the eviction order counts the entry as proven.
    """

    keys: bytes
    granules: Sequence[int]
    sizes_bytes: Sequence[int]
    checksums: Sequence[int]
    ages_ns: Sequence[int]
    partitions: Sequence[int]
    proven: bytes

    def key(self, at: int) -> BlockKey:
        return BlockKey(self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])

    def __len__(self) -> int:
        return len(self.proven)


@dataclass(frozen=True, slots=True)
class SavedTenant:
    """What one tenant had.

    Attributes:
        counts: :attr:`dataplane.core.eviction.EvictionOrder.counts`.
    """

    tenant: TenantId
    partitions: Sequence[SavedPartition]
    counts: Sequence[int]
    entries: int
    _rows: memoryview

    def blocks(self) -> Iterator[Columns]:
        """The entries, coldest first, decoded block by block."""
        at = 0
        while at < len(self._rows):
            count = min(BLOCK_ENTRIES, (len(self._rows) - at) // ENTRY_BYTES)
            yield _decode_columns(self._rows[at : at + count * ENTRY_BYTES], count)
            at += count * ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot whose checksum and lengths are right; its entries are judged when they are adopted."""

    arena: ArenaIdentity
    eviction: str
    tenants: Sequence[SavedTenant]

    @property
    def entries(self) -> int:
        return sum(tenant.entries for tenant in self.tenants)


# ---- writing


def encode_snapshot(pool: Pool, eviction: Eviction, arena: ArenaIdentity) -> Iterator[bytes]:
    """Encode every entry that nobody reads or writes; the pool must not change until the last piece is taken."""
    gone = pool.purged  # what the policy does not name any more is nobody's to come back to (I12)
    tenants = [
        (owner, [entry for entry in owner.order if not (entry.pins or entry.index in gone)])
        for owner in pool.tenants.values()
    ]
    tenants = [(owner, entries) for owner, entries in tenants if entries]
    head = msgspec.msgpack.encode(
        _HeadV1(
            node_id=arena.node_id,
            boot_id=arena.boot_id,
            generation=arena.generation,
            inode=arena.inode,
            capacity_bytes=arena.capacity_bytes,
            eviction=eviction.value,
            tenants=[
                _TenantV1(
                    owner.tenant,
                    [(one.namespace, one.storage_uid, one.epoch) for one in owner.partitions],
                    list(owner.order.counts),
                    len(entries),
                )
                for owner, entries in tenants
            ],
        )
    )
    total = sum(len(entries) for _, entries in tenants)
    digest = xxhash.xxh3_128()
    preamble = _PREAMBLE.pack(_MAGIC, FORMAT_VERSION, 0, len(head), total * ENTRY_BYTES)
    for piece in (preamble, head):
        digest.update(piece)
        yield piece
    for owner, entries in tenants:
        numbers = {partition: number for number, partition in enumerate(owner.partitions)}
        rest = iter(entries)
        while block := list(islice(rest, BLOCK_ENTRIES)):
            columns = _encode_columns(block, numbers, pool.last_ns)
            digest.update(columns)
            yield columns
    yield digest.digest()


def _encode_columns(entries: Sequence[Entry], numbers: dict[Partition, int], last_ns: int) -> bytes:
    return b"".join(
        (
            b"".join([entry.key for entry in entries]),
            _to_bytes("I", [entry.offset // GRANULE_BYTES for entry in entries]),
            _to_bytes("I", [entry.size_bytes for entry in entries]),
            _to_bytes("Q", [entry.checksum for entry in entries]),
            _to_bytes("Q", [min(last_ns - entry.touched_ns, _U64_MAX) for entry in entries]),
            _to_bytes("I", [numbers[entry.index.partition] for entry in entries]),
            bytes([entry.is_proven for entry in entries]),
        )
    )


# ---- reading


def decode_snapshot(data: bytes) -> Snapshot:
    """Check a file as a whole and decode its head; entries follow block by block.

    Raises:
        BadSnapshotError: it is not one, not whole, or of a version that this program does not read.
    """
    if len(data) < _PREAMBLE.size + _CHECKSUM_BYTES:
        raise BadSnapshotError("it is truncated")
    magic, version, zero, head_bytes, rows_bytes = _PREAMBLE.unpack_from(data)
    if magic != _MAGIC:
        raise BadSnapshotError("it is not a snapshot")
    reader = _READERS.get(version)
    if reader is None:
        raise BadSnapshotError(f"format version {version} is not one that this program reads")
    if len(data) != _PREAMBLE.size + head_bytes + rows_bytes + _CHECKSUM_BYTES:
        raise BadSnapshotError("its length is wrong")
    view = memoryview(data)
    if xxhash.xxh3_128_digest(view[:-_CHECKSUM_BYTES]) != view[-_CHECKSUM_BYTES:]:
        raise BadSnapshotError("its checksum does not match")
    if zero or head_bytes > _HEAD_MAX_BYTES:
        raise BadSnapshotError("its preamble is malformed")
    rows_at = _PREAMBLE.size + head_bytes
    return reader(view[_PREAMBLE.size : rows_at], view[rows_at : rows_at + rows_bytes])


_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class _TenantV1(msgspec.Struct, array_like=True, frozen=True):
    tenant: _Name
    partitions: list[tuple[_Name, _Name, _Unsigned]]
    counts: Annotated[list[_Unsigned], msgspec.Meta(max_length=16)]
    entries: Annotated[int, msgspec.Meta(ge=1)]


class _HeadV1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node_id: _Name
    boot_id: _Name
    generation: _Name
    inode: _Unsigned
    capacity_bytes: _Unsigned
    eviction: _Name
    tenants: list[_TenantV1]


def _read_v1(head_bytes: memoryview, rows: memoryview) -> Snapshot:
    try:
        head = msgspec.msgpack.decode(head_bytes, type=_HeadV1)
    except msgspec.MsgspecError as error:
        raise BadSnapshotError(f"its head is malformed: {error}") from None
    if len({saved.tenant for saved in head.tenants}) < len(head.tenants):
        raise BadSnapshotError("it names a tenant twice")
    if sum(saved.entries for saved in head.tenants) * ENTRY_BYTES != len(rows):
        raise BadSnapshotError("its head and its blocks do not agree")
    tenants = []
    at = 0
    for saved in head.tenants:
        end = at + saved.entries * ENTRY_BYTES
        partitions = [SavedPartition(NamespaceId(name), uid, epoch) for name, uid, epoch in saved.partitions]
        if len(set(partitions)) < len(partitions):
            raise BadSnapshotError("it names a partition twice")
        tenants.append(SavedTenant(TenantId(saved.tenant), partitions, saved.counts, saved.entries, rows[at:end]))
        at = end
    arena = ArenaIdentity(head.node_id, head.boot_id, head.generation, head.inode, head.capacity_bytes)
    return Snapshot(arena, head.eviction, tenants)


_READERS: Final[dict[int, Callable[[memoryview, memoryview], Snapshot]]] = {1: _read_v1}


def _decode_columns(rows: memoryview, count: int) -> Columns:
    at = 0

    def take(width: int) -> memoryview:
        nonlocal at
        at += count * width
        return rows[at - count * width : at]

    return Columns(
        keys=bytes(take(KEY_BYTES)),
        granules=_from_bytes("I", take(4)),
        sizes_bytes=_from_bytes("I", take(4)),
        checksums=_from_bytes("Q", take(8)),
        ages_ns=_from_bytes("Q", take(8)),
        partitions=_from_bytes("I", take(4)),
        proven=bytes(take(1)),
    )


def _to_bytes(typecode: str, values: list[int]) -> bytes:
    column = array(typecode, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _from_bytes(typecode: str, data: memoryview) -> array[int]:
    column = array(typecode)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
