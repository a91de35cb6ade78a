"""What lies in a dead node's SSD folder, read by other code than the node's recovery, and without changing a byte.

It needs the node's key, which the harness owns. A sealed segment tells of its entries in its footer; those were
flushed, and must be there after a restart. An unsealed one is read record by record: a killed process loses nothing
that the kernel has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.core.partition import split_storage_uid
from dataplane.core.segments import (
    BLOCK_BYTES,
    BadFormatError,
    DataRecord,
    SegmentCipher,
    SegmentNumber,
    partition_identity,
    record_blocks,
)
from dataplane.io.ssd_keys import KEY_FILE, NODE_KEY_FILE, PartitionKey, unwrap_key
from saltern.keys import BlockKey
from saltern.names import TenantId


@dataclass(frozen=True, slots=True)
class Place:
    """Whose a partition is: of which epoch of the tenant's own salt, or, ``is_shared``, of its sharing group's."""

    tenant: str
    epoch: int
    is_shared: bool


@dataclass(slots=True)
class PlaceView:
    """Live entries of one place: ``flushed`` lie in sealed segments, ``written`` in one that was open."""

    flushed: set[BlockKey] = field(default_factory=set)
    written: set[BlockKey] = field(default_factory=set)
    sealed_segments: int = 0
    open_segments: int = 0
    file_bytes: int = 0


def view_of(ssd_dir: Path, state_dir: Path) -> dict[Place, PlaceView]:
    """Read every segment below ``ssd_dir``."""
    views: dict[Place, PlaceView] = {}
    for folder, key in _partitions(ssd_dir, state_dir):
        view = views.setdefault(_place_of(folder, key), PlaceView())
        for path in sorted(folder.glob("*.seg")):
            view.file_bytes += path.stat().st_size
            _read_segment(path, key, view)
    return views


def readable_places(ssd_dir: Path, state_dir: Path) -> set[Place]:
    """Whose data keys are there: what lies in any other place can be read by nobody (I12)."""
    return {_place_of(folder, key) for folder, key in _partitions(ssd_dir, state_dir)}


def _partitions(ssd_dir: Path, state_dir: Path) -> Iterator[tuple[Path, PartitionKey]]:
    """Folders of partitions, each with its data key. A node that runs may take one away meanwhile."""
    key_path = state_dir / NODE_KEY_FILE
    if not key_path.exists() or not ssd_dir.exists():
        return
    node_key = key_path.read_bytes()
    for folder in sorted(path for path in ssd_dir.glob("*/*") if path.is_dir()):
        try:
            content = (folder / KEY_FILE).read_bytes()
            yield folder, unwrap_key(node_key, content, TenantId(folder.parent.name), int(folder.name, 16))
        except (FileNotFoundError, BadFormatError):
            continue  # an interrupted deletion: nothing in it is anybody's


def _place_of(folder: Path, key: PartitionKey) -> Place:
    _, group_uid = split_storage_uid(key.storage_uid)
    return Place(folder.parent.name, key.epoch, is_shared=bool(group_uid))


def _read_segment(path: Path, key: PartitionKey, view: PlaceView) -> None:
    raw = memoryview(path.read_bytes())
    number = SegmentNumber(int(path.stem, 16))
    identity = partition_identity(key.storage_uid, key.epoch)
    try:
        cipher = SegmentCipher.open_head(raw[:BLOCK_BYTES], key.data_key, number, identity)
    except BadFormatError:
        return
    blocks = len(raw) // BLOCK_BYTES
    try:
        end = blocks - cipher.footer_size_blocks(raw[(blocks - 1) * BLOCK_BYTES : blocks * BLOCK_BYTES])
        footer = cipher.open_footer(raw[end * BLOCK_BYTES : blocks * BLOCK_BYTES], data_end_block=end)
    except BadFormatError:
        view.open_segments += 1
        _read_records(raw, cipher, view)
        return
    view.sealed_segments += 1
    # Its tombstones speak of older segments; its rows were alive when it was sealed.
    gone = set(footer.tombstones)
    view.flushed -= gone
    view.written -= gone
    view.flushed.update(row[0] for row in footer.rows)


def _read_records(raw: memoryview, cipher: SegmentCipher, view: PlaceView) -> None:
    block = 1
    while (block + 1) * BLOCK_BYTES <= len(raw):
        try:
            record = cipher.open_record_head(raw[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES], block)
        except BadFormatError:
            block += 1
            continue
        if isinstance(record, DataRecord):
            payload = bytearray(raw[(block + 1) * BLOCK_BYTES :][: record.size_bytes])
            try:
                cipher.open_payload(memoryview(payload), block, record)
            except BadFormatError:
                block += 1
                continue
            view.written.add(record.key)
            block += record_blocks(record.size_bytes)
        else:
            gone = set(record.keys)
            view.flushed -= gone
            view.written -= gone
            block += 1
