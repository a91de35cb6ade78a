"""How long a node takes to find what it has on SSD, and what each entry of the index costs in memory."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dataplane.core.segments import BLOCK_BYTES, Row, SegmentNumber, record_blocks
from dataplane.core.ssd_log import SEGMENT_MAX_BYTES
from dataplane.core.ssd_tier import SsdTier
from dataplane.io.ssd_disk import Disk, aligned
from dataplane.io.ssd_files import Files
from dataplane.io.ssd_keys import load_node_key
from dataplane.io.ssd_places import Folder, SegmentPath
from dataplane.io.ssd_recovery import adopt, find_segments
from saltern.keys import KEY_BYTES, BlockKey
from saltern.names import TenantId

#: The smallest payload that fills a whole block; half of a record is its head then.
PAYLOAD_BYTES: Final = BLOCK_BYTES
_RUN: Final = 256


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """One start over a folder that a stopped node left.

    Attributes:
        recovery_s: from an open folder to an index that serves.
        index_bytes_per_entry: growth of the process's resident memory, the 32-byte key included.
    """

    entries: int
    segments: int
    file_bytes: int
    write_s: float
    recovery_s: float
    cpu_s: float
    index_bytes_per_entry: float


def measure_recovery(folder: Path, entries: int) -> RecoveryReport:
    """Write ``entries`` small entries with the node's own writer into sealed segments of full size, and recover them.

    Takes 8 KiB an entry on the device, and removes it. Run it in a process that has not done much: memory that was
    freed before hides growth.
    """
    root = folder / "recovery"
    began_s = time.perf_counter()
    segments = _write(root, folder, entries)
    write_s = time.perf_counter() - began_s
    paths = list(root.rglob("*.seg"))
    try:
        disk = Disk(root, load_node_key(folder, Files()))
        disk.files.probe(root)
        tier = SsdTier(1 << 50)
        gc.collect()
        before_bytes = _resident_bytes()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        found = find_segments(disk)
        adopt(found, tier)
        recovery_s, spent_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        del found
        gc.collect()
        grown_bytes = _resident_bytes() - before_bytes
        indexed = sum(len(books.entries) for owner in tier.tenants.values() for books in owner.partitions.values())
        assert indexed == entries, "recovery found what was written"
        disk.close()
        return RecoveryReport(
            entries=entries,
            segments=segments,
            file_bytes=sum(path.stat().st_size for path in paths),
            write_s=round(write_s, 2),
            recovery_s=round(recovery_s, 3),
            cpu_s=round(spent_s, 3),
            index_bytes_per_entry=round(grown_bytes / entries, 1),
        )
    finally:
        for path in paths:
            path.unlink()


def _write(root: Path, state_dir: Path, entries: int) -> int:
    """Fill and seal segments as a node does; returns how many."""
    disk = Disk(root, load_node_key(state_dir, Files()))
    disk.files.probe(root)
    folder = Folder(TenantId("bench"), 1, "bench", 1)
    blocks = record_blocks(PAYLOAD_BYTES)
    memory = aligned(_RUN * blocks * BLOCK_BYTES)
    payload = os.urandom(PAYLOAD_BYTES)
    per_segment = SEGMENT_MAX_BYTES // (blocks * BLOCK_BYTES) - 1
    segments = 0
    for start in range(0, entries, per_segment):
        segments += 1
        place = SegmentPath(folder, SegmentNumber(1 + segments))
        rows: list[Row] = []
        for first in range(start, min(start + per_segment, entries), _RUN):
            count = min(_RUN, start + per_segment - first, entries - first)
            block = 1 + len(rows) * blocks
            for at in range(count):
                key = BlockKey((first + at).to_bytes(KEY_BYTES, "big"))
                record = memory[at * blocks * BLOCK_BYTES : (at + 1) * blocks * BLOCK_BYTES]
                disk.cipher(place).seal_record(record, block + at * blocks, key, payload, 0)
                rows.append((key, block + at * blocks, PAYLOAD_BYTES))
            starts = [block + at * blocks for at in range(count)]
            disk.write_records(place, starts, memory[: count * blocks * BLOCK_BYTES])
        disk.seal(place, 1 + len(rows) * blocks, rows, ())
    disk.close()
    return segments


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
