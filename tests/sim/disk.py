"""A disk as the SSD tier sees it, in memory: folders with keys, files of records, footers; and what befalls them.

It stands where :mod:`dataplane.io.ssd_disk` and :mod:`dataplane.io.ssd_recovery` stand, and keeps to their rules: after
a failed write a file takes no more; a footer makes a file durable; a killed process leaves what was written, a loss of
power only what was synced and whatever else it pleases; a folder without a key is nobody's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES, Row, SegmentNumber, footer_blocks, record_blocks
from dataplane.core.ssd_books import Append, Bury, DropSegment, Seal, SegmentBooks, SsdPartition
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId


class DiskError(Exception):
    """A write, a removal or a read failed."""


class NotDurableError(DiskError):
    """A sync failed: what was written may be gone."""


@dataclass(frozen=True, slots=True)
class Value:
    """One stored block; no other has its number."""

    number: int
    partition: Partition
    key: BlockKey
    payload: bytes


@dataclass(eq=False, slots=True)
class Record:
    """A value at ``block``; one that is not good is torn or rotten, and does not verify."""

    block: int
    value: Value
    is_good: bool = True


@dataclass(frozen=True, slots=True)
class Grave:
    """Keys declared dead at ``block``."""

    block: int
    keys: tuple[BlockKey, ...]


@dataclass(eq=False, slots=True)
class File:
    """A segment file; ``is_over`` after a failed write."""

    number: SegmentNumber
    folder: Folder
    written: list[Record | Grave] = field(default_factory=list)
    end_block: int = 1
    footer: tuple[list[Row], tuple[BlockKey, ...]] | None = None
    is_over: bool = False

    @property
    def size_bytes(self) -> int:
        footer = footer_blocks(len(self.footer[0]), len(self.footer[1])) if self.footer else 0
        return (self.end_block + footer) * BLOCK_BYTES

    def at(self, block: int) -> Record | None:
        return next((one for one in self.written if isinstance(one, Record) and one.block == block), None)


@dataclass(eq=False, slots=True)
class Folder:
    """A partition's folder."""

    tenant: TenantId
    number: SegmentNumber
    uid: str
    epoch: int
    has_key: bool = True

    @property
    def partition(self) -> Partition:
        return Partition(self.tenant, NamespaceId("ns"), self.uid, self.epoch)


class ModelDisk:
    """All files of one node.

    Attributes:
        fault_share: how often an operation fails, by kind: ``write``, ``torn``, ``sync``, ``unlink``, ``read``.
        device_bytes: more than this never fits, whatever the tier may believe.
        done: how often each fault happened.
    """

    def __init__(self, rng: Random, done: Counter[str], device_bytes: int) -> None:
        self._rng = rng
        self.done = done
        self.device_bytes = device_bytes
        self.fault_share: dict[str, float] = {}
        self.files: dict[SegmentNumber, File] = {}
        self.folders: dict[SegmentNumber, Folder] = {}

    # ---- what the writing thread does

    def write_record(self, append: Append, value: Value) -> None:
        file = self._file(append.segment, is_first=append.block == 1)
        record = Record(append.block, value)
        try:
            self._write(file, record_blocks(append.size_bytes))
        except DiskError:
            if self._rng.random() < 0.5:  # half of it is there
                record.is_good = False
                file.written.append(record)
                file.end_block = append.block + 1
            raise
        file.written.append(record)
        file.end_block = append.block + record_blocks(append.size_bytes)

    def write_grave(self, bury: Bury) -> None:
        file = self._file(bury.segment, is_first=bury.block == 1)
        self._write(file, 1)
        file.written.append(Grave(bury.block, bury.keys))
        file.end_block = bury.block + 1

    def seal(self, seal: Seal) -> None:
        file = self.files[seal.segment.number]
        file.written = [one for one in file.written if one.block < seal.end_block]
        file.end_block = seal.end_block
        file.is_over = True
        self._fault("write", "a footer failed")
        self._fault("torn", "a footer was torn")
        file.footer = (list(seal.rows), tuple(seal.tombstones))
        if self._happens("sync"):
            self.done["fault: a sync failed"] += 1
            file.footer = None
            raise NotDurableError

    def drop(self, drop: DropSegment) -> None:
        self._fault("unlink", "a file could not be removed")
        file = self.files.pop(drop.segment.number, None)
        if file is not None:
            self._tidy(file.folder)

    def destroy_key(self, partition: SsdPartition) -> None:
        folder = self.folders.get(partition.number)
        if folder is not None:
            self._fault("unlink", "a key could not be destroyed")
            folder.has_key = False
            self._tidy(folder)

    # ---- what reading threads do

    def read(self, number: SegmentNumber, block: int, key: BlockKey) -> Value:
        """Raises DiskError: it could not be read, or is not whole."""
        self._fault("read", "a read failed")
        file = self.files.get(number)
        record = file.at(block) if file is not None and file.folder.has_key else None
        if record is None or not record.is_good or record.value.key != key:
            raise DiskError
        return record.value

    # ---- what befalls it

    def rot(self) -> bool:
        """A bit of some record flips."""
        records = [one for file in self.files.values() for one in file.written if isinstance(one, Record)]
        if not records:
            return False
        self._rng.choice(records).is_good = False
        return True

    def lose_power(self) -> None:
        """Of files without a footer any record may be torn, and from some record on all may be gone."""
        for file in list(self.files.values()):
            if file.footer is not None:
                continue
            kept = file.written[: self._rng.randint(0, len(file.written))]
            for one in kept:
                if isinstance(one, Record) and self._rng.random() < 0.2:
                    one.is_good = False
            self.done["records lost with power"] += len(file.written) - len(kept)
            file.written = kept
            if not kept and self._rng.random() < 0.5:
                del self.files[file.number]

    def tidy(self) -> None:
        """What a recovery does before it hands anything over: nobody's files go, unsealed ones are cut."""
        for file in list(self.files.values()):
            usable = [one for one in file.written if isinstance(one, Grave) or one.is_good]
            if not file.folder.has_key or (file.footer is None and not usable):
                del self.files[file.number]
            elif file.footer is None:
                last = usable[-1]
                length = record_blocks(len(last.value.payload)) if isinstance(last, Record) else 1
                file.written, file.end_block, file.is_over = usable, last.block + length, True
        for folder in list(self.folders.values()):
            if not folder.has_key and not any(file.folder is folder for file in self.files.values()):
                del self.folders[folder.number]

    @staticmethod
    def contents(file: File) -> tuple[list[Row], list[BlockKey]]:
        """Rows and tombstones of a file, from its footer or else from what was scanned."""
        if file.footer is not None:
            return list(file.footer[0]), list(file.footer[1])
        rows: dict[BlockKey, Row] = {}
        dead: dict[BlockKey, None] = {}
        for one in file.written:
            if isinstance(one, Grave):
                dead.update(dict.fromkeys(one.keys))
                for key in one.keys:
                    rows.pop(key, None)
            else:
                rows[one.value.key] = (one.value.key, one.block, len(one.value.payload))
        return list(rows.values()), list(dead)

    # ---- inside

    def _file(self, segment: SegmentBooks, *, is_first: bool) -> File:
        file = self.files.get(segment.number)
        if file is None:
            if not is_first:
                raise DiskError  # its first write failed
            file = self.files[segment.number] = File(segment.number, self._folder(segment.partition))
        if file.is_over:
            raise DiskError
        return file

    def _folder(self, partition: SsdPartition) -> Folder:
        if partition.number not in self.folders:
            owner = partition.owner.tenant
            self.folders[partition.number] = Folder(owner, partition.number, partition.storage_uid, partition.epoch)
        return self.folders[partition.number]

    def _write(self, file: File, blocks: int) -> None:
        """Raises DiskError, after which the file takes no more."""
        try:
            self._fault("write", "a write failed")
            self._fault("torn", "a write was torn")
            if sum(one.size_bytes for one in self.files.values()) + blocks * BLOCK_BYTES > self.device_bytes:
                self.done["fault: the disk was full"] += 1
                raise DiskError
        except DiskError:
            file.is_over = True
            raise

    def _fault(self, kind: str, told: str) -> None:
        if self._happens(kind):
            self.done[f"fault: {told}"] += 1
            raise DiskError

    def _happens(self, kind: str) -> bool:
        return self._rng.random() < self.fault_share.get(kind, 0.0)

    def _tidy(self, folder: Folder) -> None:
        if not folder.has_key and not any(file.folder is folder for file in self.files.values()):
            self.folders.pop(folder.number, None)
