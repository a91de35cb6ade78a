"""The memory that entries live in: one private anonymous mapping for the life of the node.

The arena hands out views and knows nothing of who may use them; the core decides that. Freed memory keeps its old bytes
until the next put overwrites them, and that is safe because a read covers exactly the bytes of a committed entry,
each of which its own put has written (I2, I7).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

from saltern.errors import ResourceExhaustedError

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not named by the mmap module of Python 3.11


class Arena:
    """``capacity_bytes`` of memory, never backed by a file and not part of core dumps or forked children.

    Args:
        prefault: take the memory from the system now, so that no put pays for it and too little memory shows at start.

    Raises:
        ResourceExhaustedError: the system refuses that much memory.
    """

    def __init__(self, capacity_bytes: int, *, prefault: bool = False) -> None:
        self.capacity_bytes: Final = capacity_bytes
        try:
            # Private, because transparent huge pages are off for shared mappings on most systems.
            self._memory = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ResourceExhaustedError(
                f"the system refuses an arena of {capacity_bytes} bytes: {error}",
                reason="OUT_OF_MEMORY",
                hint="lower --dram-bytes or give the host more memory",
            ) from None
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel without huge pages is slower, not wrong
                self._memory.madvise(advice)
        if prefault:
            self._prefault()
        self._view = memoryview(self._memory)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """A writable view of ``size_bytes`` at ``offset``, both as the core gave them out."""
        assert 0 <= offset <= offset + size_bytes <= self.capacity_bytes, "the core gives out offsets inside the arena"
        return self._view[offset : offset + size_bytes]

    def close(self) -> None:
        """Give the memory back; with views still in use it goes when the last of them does."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()

    def _prefault(self) -> None:
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            for offset in range(0, self.capacity_bytes, mmap.PAGESIZE):
                self._memory[offset] = 0
