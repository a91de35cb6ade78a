"""The few file operations of the SSD tier, in one place so that tests can make each of them fail.

Segments are read and written past the page cache (O_DIRECT) where the file system allows it: cached pages would be a
second copy of what DRAM holds already, outside everybody's budget. Offsets, lengths and addresses are whole blocks.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dataplane.core.segments import BLOCK_BYTES

_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_PROBE: Final = ".direct-io-probe"


class Files:
    """Operations on real files. Every method raises OSError.

    Attributes:
        is_direct: whether segments bypass the page cache; found out by :meth:`probe`.
    """

    is_direct = False

    def probe(self, folder: Path) -> None:
        """Find out whether the file system of ``folder`` takes O_DIRECT."""
        path = folder / _PROBE
        block = mmap.mmap(-1, BLOCK_BYTES)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _DIRECT, 0o600)
            try:
                self.is_direct = bool(_DIRECT) and os.pwrite(descriptor, block, 0) == BLOCK_BYTES
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_direct = False
        finally:
            block.close()
            path.unlink(missing_ok=True)

    def create(self, path: Path) -> int:
        """Create a segment that must not exist; return its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct(), 0o600)

    def open(self, path: Path, *, writable: bool = False) -> int:
        """Open a segment that exists; never through a link."""
        access = os.O_RDWR if writable else os.O_RDONLY
        return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | self._direct())

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write all of ``data``, in as many steps as the system wants."""
        while data:
            written = os.pwrite(descriptor, data, offset)
            if written <= 0 or written % BLOCK_BYTES:
                raise OSError(errno.EIO, "short write")
            data = data[written:]
            offset += written

    def read_at(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Read into ``views`` one after the other; return how many bytes came, fewer at the end of the file."""
        return os.preadv(descriptor, views, offset)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        os.ftruncate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        """Return when what was written is durable."""
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Return when the folder's names are durable."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def write_small(self, path: Path, content: bytes) -> None:
        """Write a small file whole or not at all, durably."""
        partial = path.with_name(f".{path.name}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.rename(path)
        self.sync_folder(path.parent)

    def destroy_small(self, path: Path) -> None:
        """Overwrite a small file and remove it, durably; what is gone already is fine.

        Flash and copy-on-write file systems may keep the old bytes for a while where no file leads to them.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        path.unlink(missing_ok=True)
        self.sync_folder(path.parent)

    def _direct(self) -> int:
        return _DIRECT if self.is_direct else 0
