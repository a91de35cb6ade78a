"""What an earlier process left in the SSD folder: read, checked, tidied up (I7, I8).

A sealed segment is known from its footer alone. One without a footer, or whose footer has rotted, is read record by
record: what verifies is kept, a torn record is a miss, and the file is cut behind the last good one. A folder without a
key is what an interrupted deletion left, and goes (I12). What another version or somebody else has written is left
alone, and told.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dataplane.core.segments import (
    BLOCK_BYTES,
    FIXED_BLOCKS,
    BadFormatError,
    OtherVersionError,
    Row,
    Rows,
    SegmentCipher,
    SegmentNumber,
    Tombstones,
    partition_identity,
    record_blocks,
)
from dataplane.core.ssd_books import Outdate
from dataplane.core.ssd_tier import SsdTier
from dataplane.io.ssd_disk import LOCK_FILE, Disk, aligned
from dataplane.io.ssd_keys import KEY_FILE, KEY_FILE_MAX_BYTES, unwrap_key
from dataplane.io.ssd_places import Folder, SegmentPath
from saltern.errors import InvalidArgumentError
from saltern.keys import BlockKey
from saltern.names import TenantId, parse_tenant_id

_NUMBER: Final = re.compile(r"0[0-9a-f]{15}", re.ASCII)
_SEGMENT_NAME: Final = re.compile(r"(0[0-9a-f]{15})\.seg", re.ASCII)
_PARTIAL_KEY: Final = f".{KEY_FILE}.partial"
_MAGIC_BYTES: Final = 8


@dataclass(slots=True)
class FoundSegment:
    """A segment that can be used; see :meth:`dataplane.core.ssd_tier.SsdTier.adopt_segment`."""

    path: SegmentPath
    end_block: int
    rows: Collection[Row] | Rows
    tombstones: Sequence[BlockKey]
    is_sealed: bool


@dataclass(slots=True)
class Found:
    """Everything that was found.

    Attributes:
        problems: what was not as it should be, one line each; empty after a clean stop and after a plain crash.
        unusable_bytes: files that were left alone.
        highest_number: of any folder or segment, usable or not: new ones must not take its name.
    """

    folders: list[Folder] = field(default_factory=list)
    segments: list[FoundSegment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unusable_bytes: int = 0
    highest_number: int = 0


def find_segments(disk: Disk) -> Found:
    """Read the folder of ``disk``, which must not be in use yet; removes what is of no use to anybody.

    Raises:
        OSError: the folder itself cannot be listed.
    """
    found = Found()
    for path in sorted(disk.root.iterdir()):
        if path.name == LOCK_FILE:
            continue
        tenant = _tenant_of(path)
        if tenant is None:
            _leave_alone(found, path, "not made by Saltern")
            continue
        try:
            for inner in sorted(path.iterdir()):
                if _NUMBER.fullmatch(inner.name) and _is_folder(inner):
                    _find_partition(disk, found, tenant, inner)
                else:
                    _leave_alone(found, inner, "not made by Saltern")
            if not any(path.iterdir()):
                path.rmdir()
        except OSError as error:
            found.problems.append(f"{path}: {error.strerror or error}")
    return found


def adopt(found: Found, tier: SsdTier) -> None:
    """Hand over what was found; takes about a microsecond an entry."""
    tier.unusable_bytes = found.unusable_bytes
    tier.skip_numbers(found.highest_number)
    partitions = {
        folder: tier.adopt_partition(folder.tenant, SegmentNumber(folder.number), folder.storage_uid, folder.epoch)
        for folder in found.folders
    }
    for one in sorted(found.segments, key=lambda segment: segment.path.number):
        partition = partitions[one.path.folder]
        tier.adopt_segment(partition, one.path.number, one.end_block, one.rows, one.tombstones, is_sealed=one.is_sealed)
    tier.adopt_end()


def _find_partition(disk: Disk, found: Found, tenant: TenantId, path: Path) -> None:
    (path / _PARTIAL_KEY).unlink(missing_ok=True)
    number = int(path.name, 16)
    found.highest_number = max(found.highest_number, number)
    key_path = path / KEY_FILE
    segments = {}
    for inner in sorted(path.iterdir()):
        match = _SEGMENT_NAME.fullmatch(inner.name)
        if match:
            found.highest_number = max(found.highest_number, int(match[1], 16))
        if match and _is_file(inner):
            segments[SegmentNumber(int(match[1], 16))] = inner
        elif inner.name != KEY_FILE:
            _leave_alone(found, inner, "not made by Saltern")
    try:
        with key_path.open("rb") as file:
            key = unwrap_key(disk.node_key, file.read(KEY_FILE_MAX_BYTES), tenant, number)
    except FileNotFoundError:
        _finish_deletion(disk, path, segments.values())
        return
    except BadFormatError as error:
        if not any(key_path.read_bytes()):  # overwritten, and then the process died
            _finish_deletion(disk, path, [*segments.values(), key_path])
            return
        _leave_alone(found, path, str(error))
        return
    folder = Folder(tenant, number, key.storage_uid, key.epoch)
    for older in [other for other in found.folders if _is_same_partition(other, folder)]:
        # A partition has one folder: the older one was about to be destroyed when the process died (I12).
        _discard(disk, found, older)
    found.folders.append(folder)
    disk.adopt_key(folder, key.data_key)
    for segment_number, segment_path in segments.items():
        place = SegmentPath(folder, segment_number)
        try:
            segment = _find_segment(disk, found, place, key.data_key)
        except OtherVersionError as error:
            _leave_alone(found, segment_path, str(error))
        except OSError as error:
            _leave_alone(found, segment_path, (error.strerror or str(error)).lower())
        else:
            if segment is not None:
                found.segments.append(segment)
            elif segment_path.exists():
                disk.discard(segment_path)


def discard_outdated(disk: Disk, found: Found, outdated: Collection[Outdate]) -> None:
    """I12: what cannot be reconciled with deletions that it was not told of goes, key first. Raises OSError."""
    for folder in list(found.folders):
        if Outdate(folder.tenant, folder.storage_uid, folder.epoch) in outdated:
            _discard(disk, found, folder)
            path = disk.folder_path(folder)
            found.problems.append(f"{path}: entries were deleted while it could not be read; removed")


def _discard(disk: Disk, found: Found, folder: Folder) -> None:
    found.folders.remove(folder)
    found.segments = [segment for segment in found.segments if segment.path.folder != folder]
    disk.forget_key(folder)
    path = disk.folder_path(folder)
    disk.files.destroy_small(path / KEY_FILE)
    _finish_deletion(disk, path, [inner for inner in path.iterdir() if _SEGMENT_NAME.fullmatch(inner.name)])


def _is_same_partition(one: Folder, other: Folder) -> bool:
    return (one.tenant, one.storage_uid, one.epoch) == (other.tenant, other.storage_uid, other.epoch)


def _finish_deletion(disk: Disk, folder: Path, paths: Iterable[Path]) -> None:
    """I12: without its key nothing in a folder can be read."""
    for path in paths:
        if path.name == KEY_FILE:
            disk.files.unlink(path)
        else:
            disk.discard(path)
    if not any(folder.iterdir()):
        folder.rmdir()


def _find_segment(disk: Disk, found: Found, place: SegmentPath, data_key: bytes) -> FoundSegment | None:
    """Read one segment; None if nothing in it is of use. Raises OtherVersionError, OSError."""
    files, path = disk.files, disk.path(place)
    descriptor = files.open(path, writable=True)
    try:
        size_blocks = files.size(descriptor) // BLOCK_BYTES
        if size_blocks < (FIXED_BLOCKS if disk.has_records else 1):
            return None  # the process died before the first record
        block = aligned(BLOCK_BYTES)
        _read(disk, descriptor, block, 0)
        identity = partition_identity(place.folder.storage_uid, place.folder.epoch)
        try:
            cipher = SegmentCipher.open_head(block, data_key, place.number, identity)
        except OtherVersionError:
            raise
        except BadFormatError as error:
            if any(block[:_MAGIC_BYTES]):
                found.problems.append(f"{path}: {error}; removed")
            return None
        disk.ciphers[place] = cipher
        sealed = read_footer(disk, descriptor, cipher, place, size_blocks)
        if sealed is not None:
            return sealed
        scanned = _scan(disk, descriptor, cipher, place, size_blocks)
        # Where records are elsewhere a file without a footer does not tell them: dropping the segment removes them.
        if scanned.rows or scanned.tombstones or not disk.has_records:
            files.truncate(descriptor, scanned.end_block * BLOCK_BYTES)
            return scanned
        del disk.ciphers[place]
        return None
    finally:
        os.close(descriptor)


def read_footer(
    disk: Disk, descriptor: int, cipher: SegmentCipher, place: SegmentPath, size_blocks: int
) -> FoundSegment | None:
    """What the footer of a segment's file says; None if there is none that verifies. Raises OSError."""
    last = aligned(BLOCK_BYTES)
    try:
        _read(disk, descriptor, last, size_blocks - 1)
        footer_blocks = cipher.footer_size_blocks(last)
        end_block = size_blocks - footer_blocks
        if end_block < 1:
            return None
        memory = aligned(footer_blocks * BLOCK_BYTES)
        _read(disk, descriptor, memory, end_block)
        footer = cipher.open_footer(memory, data_end_block=end_block)
    except BadFormatError:
        return None
    return FoundSegment(place, end_block, footer.rows, footer.tombstones, is_sealed=True)


def _scan(disk: Disk, descriptor: int, cipher: SegmentCipher, place: SegmentPath, size_blocks: int) -> FoundSegment:
    """Keep every record that verifies. A bad one costs itself: the next is looked for a block further on."""
    memory = aligned(size_blocks * BLOCK_BYTES)
    _read(disk, descriptor, memory, 0)
    rows: dict[BlockKey, Row] = {}
    tombstones: dict[BlockKey, None] = {}
    block = end_block = 1
    while block < size_blocks:
        try:
            record = cipher.open_record_head(memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES], block)
            if isinstance(record, Tombstones):
                for key in record.keys:
                    rows.pop(key, None)
                    tombstones[key] = None
                length = 1
            else:
                length = record_blocks(record.size_bytes)
                start = (block + 1) * BLOCK_BYTES
                cipher.open_payload(memory[start : start + record.size_bytes], block, record)
                rows[record.key] = (record.key, block, record.size_bytes)
        except BadFormatError:
            block += 1
            continue
        block += length
        end_block = min(block, size_blocks)
    return FoundSegment(place, end_block, list(rows.values()), list(tombstones), is_sealed=False)


def _read(disk: Disk, descriptor: int, memory: memoryview, block: int) -> None:
    done = 0
    while done < len(memory):
        count = disk.files.read_at(descriptor, [memory[done:]], block * BLOCK_BYTES + done)
        if count <= 0 or count % BLOCK_BYTES:
            raise BadFormatError("the file ends inside a block")
        done += count


def _tenant_of(path: Path) -> TenantId | None:
    try:
        return parse_tenant_id(path.name) if _is_folder(path) else None
    except InvalidArgumentError:
        return None


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _leave_alone(found: Found, path: Path, why: str) -> None:
    found.problems.append(f"{path}: {why}; left alone")
    inside = [path] if not _is_folder(path) else [inner for inner in path.rglob("*") if _is_file(inner)]
    found.unusable_bytes += sum(-(-inner.lstat().st_size // BLOCK_BYTES) * BLOCK_BYTES for inner in inside)
