"""The limits that the tier is compared with: its device and its cipher, each without the rest."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dataplane.bench_ssd.report import Span, timed
from dataplane.core.segments import (
    BLOCK_BYTES,
    SALT_BYTES,
    SegmentCipher,
    SegmentNumber,
    partition_identity,
    record_blocks,
)
from dataplane.io.ssd_disk import aligned
from dataplane.io.ssd_files import Files
from saltern.keys import KEY_BYTES, BlockKey


class RawDevice:
    """Sequential reads and writes of one file past the page cache, by so many threads at a time.

    Raises:
        OSError: the file system of ``folder`` does not serve.
    """

    def __init__(self, folder: Path, *, block_bytes: int, blocks: int) -> None:
        self.files = Files()
        self.files.probe(folder)
        self.size_bytes = block_bytes * blocks
        self._path = folder / "raw"
        self._block_bytes = block_bytes
        self._blocks = blocks

    def write(self, threads: int) -> Span:
        """Write the whole file anew and make it durable."""
        data = aligned(self._block_bytes)
        data[:] = os.urandom(self._block_bytes)
        self.files.unlink(self._path)
        descriptor = self.files.create(self._path)
        try:
            with timed() as span:
                self._spread(threads, lambda block: self.files.write_at(descriptor, data, block * self._block_bytes))
                self.files.sync(descriptor)
        finally:
            os.close(descriptor)
        return span

    def read(self, threads: int) -> Span:
        """Read the whole file."""
        descriptor = self.files.open(self._path)
        memories = [aligned(self._block_bytes) for _ in range(threads)]

        def read(block: int) -> None:
            self.files.read_at(descriptor, [memories[block % threads]], block * self._block_bytes)

        try:
            with timed() as span:
                self._spread(threads, read)
        finally:
            os.close(descriptor)
        return span

    def close(self) -> None:
        self.files.unlink(self._path)

    def _spread(self, threads: int, work: object) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, range(self._blocks)):  # type: ignore[arg-type]
                pass


def seal_on_one_thread(block_bytes: int, blocks: int) -> Span:
    """Seal so many records in place, one after the other."""
    cipher = SegmentCipher(os.urandom(32), SegmentNumber(1), os.urandom(SALT_BYTES), partition_identity("uid", 1))
    key = BlockKey(bytes(KEY_BYTES))
    memory = aligned(record_blocks(block_bytes) * BLOCK_BYTES)
    payload = memory[BLOCK_BYTES : BLOCK_BYTES + block_bytes]
    payload[:] = os.urandom(block_bytes)
    with timed() as span:
        for number in range(1, blocks + 1):
            cipher.seal_record(memory, number, key, payload, 0)
    return span
