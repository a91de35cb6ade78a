"""The files of the SSD tier. Everything in here blocks and runs on worker threads, never on the event loop.

::

    SSD_DIR/lock
    SSD_DIR/TENANT/PARTITION/key            see dataplane.io.ssd_keys
    SSD_DIR/TENANT/PARTITION/NUMBER.seg     see dataplane.core.segments

One thread at a time writes; any number read. What is on disk counts as *flushed*, and so survives a loss of power, once
its segment is sealed (the file and its name are synced then) or :meth:`Disk.flush` has returned. A killed process loses
nothing that was written: the kernel has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from dataplane.core.segments import (
    BLOCK_BYTES,
    NONCE_BYTES,
    SALT_BYTES,
    BadFormatError,
    DataRecord,
    Row,
    SegmentCipher,
    partition_identity,
)
from dataplane.io.ssd_files import Files
from dataplane.io.ssd_keys import KEY_FILE, PartitionKey, new_data_key, wrap_key
from dataplane.io.ssd_places import Folder, SegmentPath
from saltern.errors import FailedPreconditionError
from saltern.keys import BlockKey

LOCK_FILE: Final = "lock"
SEGMENT_SUFFIX: Final = ".seg"
#: Most records in one read.
RUN_MAX: Final = 64


class SegmentClosedError(OSError):
    """An earlier write to the segment failed; that one told why."""


class NotDurableError(OSError):
    """A segment could not be made durable. Never to be tried again: the kernel forgets what it failed to write."""


def aligned(size_bytes: int) -> memoryview:
    """Memory that starts at a page, as O_DIRECT wants it; freed with its last view."""
    return memoryview(mmap.mmap(-1, max(size_bytes, BLOCK_BYTES)))


@dataclass(slots=True, eq=False)
class Wanted:
    """A record to read.

    Attributes:
        target: page-aligned memory, exactly the blocks of its payload. What is beyond the payload is zero then.
    """

    block: int
    key: BlockKey
    size_bytes: int
    target: memoryview


class _Local(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.heads = aligned(RUN_MAX * BLOCK_BYTES)


class Disk:
    """Segments, keys and folders below ``root``; the engine ``local`` (:mod:`dataplane.io.engines`).

    Attributes:
        run_bytes: what one read takes at most: large enough for the device, small enough to spread over threads.
        has_records: False for an engine that keeps records elsewhere, and here only heads, tombstones and footers.

    Raises:
        FailedPreconditionError: SSD_DIR_UNUSABLE, or SSD_DIR_IN_USE by another process.
    """

    has_records: ClassVar[bool] = True
    run_bytes: ClassVar[int] = 1024 * 1024

    def __init__(self, root: Path, node_key: bytes, files: Files | None = None) -> None:
        self.root: Final = root
        self.files: Final = files or Files()
        self.node_key: Final = node_key
        #: Ciphers of every segment, and the descriptor of those that are written.
        self.ciphers: Final[dict[SegmentPath, SegmentCipher]] = {}
        self.data_keys: Final[dict[Folder, bytes]] = {}
        #: Folders that are there, with their key file.
        self._made: set[Folder] = set()
        self._paths: dict[SegmentPath, Path] = {}
        self._writing: dict[SegmentPath, int] = {}
        self._local = _Local()
        #: Written since the last sync.
        self._dirty: set[SegmentPath] = set()
        self._lock = self._take_lock()

    def close(self) -> None:
        """Close every file; writes nothing."""
        for descriptor in self._writing.values():
            os.close(descriptor)
        self._writing.clear()
        os.close(self._lock)

    def folder_path(self, folder: Folder) -> Path:
        return self.root / folder.tenant / f"{folder.number:016x}"

    def path(self, segment: SegmentPath) -> Path:
        path = self._paths.get(segment)
        if path is None:
            path = self.folder_path(segment.folder) / f"{segment.number:016x}{SEGMENT_SUFFIX}"
            self._paths[segment] = path
        return path

    def check(self) -> None:
        """Raise OSError if whoever keeps the records is known to be out of reach; files have to be tried."""

    # ---- any thread but for each segment one at a time

    def cipher(self, segment: SegmentPath) -> SegmentCipher:
        """The cipher of a segment; made, with its partition's data key, for a new one.

        What is sealed with a new key is of no use to anybody before the key is on disk; it gets there with the first
        write to the partition's folder.
        """
        cipher = self.ciphers.get(segment)
        if cipher is None:
            folder = segment.folder
            data_key = self.data_keys.setdefault(folder, new_data_key())
            identity = partition_identity(folder.storage_uid, folder.epoch)
            cipher = SegmentCipher(data_key, segment.number, os.urandom(SALT_BYTES), identity)
            self.ciphers[segment] = cipher
        return cipher

    def adopt_key(self, folder: Folder, data_key: bytes) -> None:
        """Take over a key that was found on disk."""
        self.data_keys[folder] = data_key
        self._made.add(folder)

    def forget_key(self, folder: Folder) -> None:
        """Never seal or open with the folder's key again."""
        self.data_keys.pop(folder, None)
        self._made.discard(folder)

    # ---- the writing thread

    def write_records(self, segment: SegmentPath, blocks: Sequence[int], memory: memoryview) -> None:
        """Write sealed records that follow each other in one go.

        Args:
            blocks: where each of them begins.

        Raises:
            OSError: none of them counts as written. The segment takes no more after that: its blocks must not be
                written a second time with other content.
        """
        self._write(segment, self._descriptor(segment, is_new=blocks[0] == 1), memory, blocks[0])

    def write_tombstones(self, segment: SegmentPath, block: int, keys: Sequence[BlockKey]) -> None:
        """Write one tombstone record. Raises OSError as :meth:`write_records` does."""
        sealed = _copy(self.cipher(segment).seal_tombstones(block, keys))
        self._write(segment, self._descriptor(segment, is_new=block == 1), sealed, block)

    def erase(self, segment: SegmentPath, block: int) -> None:
        """A record that a tombstone declares deleted. In a file it stays until the file goes."""

    def seal(self, segment: SegmentPath, end_block: int, rows: Sequence[Row], tombstones: Sequence[BlockKey]) -> None:
        """Write the footer and make the segment durable. Raises OSError, of which NotDurableError loses the segment."""
        footer = self.ciphers[segment].seal_footer(rows, tombstones, os.urandom(NONCE_BYTES))
        descriptor = self._writing.get(segment)
        if descriptor is None:
            descriptor = self._writing[segment] = self.files.open(self.path(segment), writable=True)
        try:
            # Beyond the end there may be blocks of a record that failed or was torn.
            self.files.truncate(descriptor, end_block * BLOCK_BYTES)
            self.files.write_at(descriptor, _copy(footer), end_block * BLOCK_BYTES)
            self._make_durable(segment, descriptor)
        finally:
            self._stop_writing(segment)

    def drop(self, segment: SegmentPath) -> None:
        """Remove a segment, and its folder with the last one. Raises OSError."""
        self._stop_writing(segment)
        self.files.unlink(self.path(segment))
        self.ciphers.pop(segment, None)
        self._paths.pop(segment, None)
        self._remove_if_empty(segment.folder)

    def destroy_key(self, folder: Folder) -> None:
        """I12: from here on nothing in the folder can be read. Raises OSError."""
        self.forget_key(folder)
        self.files.destroy_small(self.folder_path(folder) / KEY_FILE)
        self._remove_if_empty(folder)

    def discard(self, path: Path) -> None:
        """Remove a segment's file that was found without its key. Raises OSError."""
        self.files.unlink(path)

    def flush(self) -> None:
        """Make everything durable that was written before. Raises OSError."""
        for segment in list(self._dirty):
            self._dirty.discard(segment)
            self._make_durable(segment, self._writing[segment])

    # ---- any thread

    def read(self, segment: SegmentPath, wanted: Sequence[Wanted]) -> list[int | Exception]:
        """Read records that follow each other, at most RUN_MAX, in one go, and open each where it was read to.

        Returns:
            For each record its checksum, or BadFormatError if it is not what was written (I7), or OSError if it could
            not be read: a bad place on the device costs the record that lies there, and not those beside it.
        """
        try:
            return list(self._read_run(segment, wanted))
        except OSError as error:
            if len(wanted) == 1:
                return [error]
        return [outcome for one in wanted for outcome in self.read(segment, [one])]

    def _read_run(self, segment: SegmentPath, wanted: Sequence[Wanted]) -> list[int | BadFormatError]:
        """Raises OSError: at least one of the records could not be read."""
        cipher = self.ciphers.get(segment)
        if cipher is None:
            return [BadFormatError("the segment is gone")] * len(wanted)
        heads = self._local.heads
        views = []
        for at, one in enumerate(wanted):
            views += [heads[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES], one.target]
        descriptor = self.files.open(self.path(segment))
        try:
            left_bytes = self.files.read_at(descriptor, views, wanted[0].block * BLOCK_BYTES)
        finally:
            os.close(descriptor)
        outcomes: list[int | BadFormatError] = []
        for head, one in zip(views[::2], wanted, strict=True):
            left_bytes -= BLOCK_BYTES + len(one.target)
            try:
                if left_bytes < 0:
                    raise BadFormatError("the segment ends inside the record")
                outcomes.append(open_record(cipher, head, one))
            except BadFormatError as error:
                outcomes.append(error)
        return outcomes

    # ---- inside

    def _take_lock(self) -> int:
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot use the SSD folder {self.root}: {(error.strerror or 'unusable').lower()}",
                reason="SSD_DIR_UNUSABLE",
                hint="give --ssd-dir a folder that this user can write",
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise FailedPreconditionError(
                f"another process uses the SSD folder {self.root}",
                reason="SSD_DIR_IN_USE",
                hint="stop the other node, or give each node an --ssd-dir of its own",
            ) from None
        return descriptor

    def _descriptor(self, segment: SegmentPath, *, is_new: bool) -> int:
        descriptor = self._writing.get(segment)
        if descriptor is not None:
            return descriptor
        if not is_new:
            raise SegmentClosedError("the segment takes no more records")
        cipher = self.ciphers.get(segment)
        if cipher is None or segment.folder not in self.data_keys:
            raise SegmentClosedError("the segment's key is gone")
        if segment.folder not in self._made:
            self._make_folder(segment.folder)
        descriptor = self.files.create(self.path(segment))
        self._writing[segment] = descriptor
        self._write(segment, descriptor, _copy(cipher.encode_head()), 0)
        return descriptor

    def _make_folder(self, folder: Folder) -> None:
        """Make a partition's folder; its key is durable before anything that is sealed with it is written."""
        path = self.folder_path(folder)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = PartitionKey(self.data_keys[folder], folder.storage_uid, folder.epoch)
        self.files.write_small(path / KEY_FILE, wrap_key(self.node_key, key, folder.tenant, folder.number))
        self.files.sync_folder(path.parent)
        self.files.sync_folder(self.root)
        self._made.add(folder)

    def _write(self, segment: SegmentPath, descriptor: int, memory: memoryview, block: int) -> None:
        try:
            self.files.write_at(descriptor, memory, block * BLOCK_BYTES)
        except OSError:
            # I12: a part of it may be there, whole records too, that nobody was told of and so nobody can delete.
            with contextlib.suppress(OSError):
                self.files.truncate(descriptor, block * BLOCK_BYTES)
            self._stop_writing(segment)
            raise
        self._dirty.add(segment)

    def _make_durable(self, segment: SegmentPath, descriptor: int) -> None:
        try:
            self.files.sync(descriptor)
            self.files.sync_folder(self.folder_path(segment.folder))
        except OSError as error:
            raise NotDurableError(*error.args) from error

    def _stop_writing(self, segment: SegmentPath) -> None:
        self._dirty.discard(segment)
        descriptor = self._writing.pop(segment, None)
        if descriptor is not None:
            os.close(descriptor)

    def _remove_if_empty(self, folder: Folder) -> None:
        """A folder without key and segments goes, and the tenant's with its last one."""
        path = self.folder_path(folder)
        if folder in self._made:
            return
        with contextlib.suppress(OSError):
            path.rmdir()
            path.parent.rmdir()


def open_record(cipher: SegmentCipher, head: memoryview, wanted: Wanted) -> int:
    """Open in place what was read for ``wanted``; return its checksum. Raises BadFormatError: it is not that (I7)."""
    record = cipher.open_record_head(head, wanted.block)
    if not isinstance(record, DataRecord) or record.key != wanted.key or record.size_bytes != wanted.size_bytes:
        raise BadFormatError("another record lies there")
    cipher.open_payload(wanted.target[: record.size_bytes], wanted.block, record)
    return record.checksum


def _copy(data: bytes) -> memoryview:
    memory = aligned(len(data))
    memory[: len(data)] = data
    return memory
