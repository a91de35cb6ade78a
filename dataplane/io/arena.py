"""The memory that entries live in: one mapping for the life of the node, private, or a file in memory that outlives it.

The arena hands out views and knows nothing of who may use them; the core decides that. Freed memory keeps its old bytes
until the next put overwrites them, and that is safe because a read covers exactly the bytes of a committed entry,
each of which its own put has written (I2, I7).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final

from dataplane.core.compaction import Move
from dataplane.io.host_memory import (
    MADV_POPULATE_WRITE,
    HugePages,
    Placement,
    advise_pages,
    bind_to_numa_node,
    check_numa_node,
    placement_of,
    round_to_pages,
    too_few_huge_pages,
)
from saltern.errors import ResourceExhaustedError


class Arena:
    """``capacity_bytes`` of memory, not part of core dumps or forked children.

    Args:
        prefault: take the memory from the system now, so that no put pays for it and too little memory shows at start.
        huge_pages: what pages to ask for.
        numa_node: where all of it shall be; None for wherever the system puts it.
        descriptor: a file in memory (:mod:`dataplane.io.warm_files`) to map instead of private memory; what it holds
            stays. All of it is allocated at once, whatever ``prefault`` says: on a full tmpfs a later write would end
            the process with SIGBUS.
        file_page_bytes: size of the pages of that file's file system.

    Raises:
        ResourceExhaustedError: OUT_OF_MEMORY, ARENA_DIR_FULL, HUGE_PAGES_UNAVAILABLE, NUMA_NODE_TOO_SMALL.
        FailedPreconditionError: NUMA_NODE_UNKNOWN, NUMA_BIND_REFUSED.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        prefault: bool = False,
        huge_pages: HugePages = HugePages.TRANSPARENT,
        numa_node: int | None = None,
        descriptor: int | None = None,
        file_page_bytes: int = mmap.PAGESIZE,
    ) -> None:
        self.capacity_bytes: Final = capacity_bytes
        self.is_prefaulted: Final = prefault
        if numa_node is not None:
            check_numa_node(numa_node, capacity_bytes)
        if descriptor is None:
            self._memory = _map_private(capacity_bytes, huge_pages)
        else:
            self._memory = _map_file(capacity_bytes, descriptor, file_page_bytes)
        try:
            if numa_node is not None:
                bind_to_numa_node(self._memory, numa_node)  # before the first page is there
            with contextlib.suppress(OSError):  # a kernel without huge pages is slower, not wrong
                advise_pages(self._memory, huge_pages)
            for advice in (mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK):
                with contextlib.suppress(OSError):
                    self._memory.madvise(advice)
            if prefault:
                self._prefault(writes=descriptor is None)
            if descriptor is not None:
                _allocate(descriptor, len(self._memory))
        except BaseException:
            self._memory.close()
            raise
        self._view = memoryview(self._memory)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """A writable view of ``size_bytes`` at ``offset``, both as the core gave them out."""
        assert 0 <= offset <= offset + size_bytes <= self.capacity_bytes, "the core gives out offsets inside the arena"
        return self._view[offset : offset + size_bytes]

    def relocate(self, moves: Sequence[Move]) -> None:
        """Copy bytes within the arena, one move after the other; about 10 ms for 64 MiB, in which nothing else runs."""
        view = self._view
        for source, target, size_bytes in moves:
            # Where the two overlap, assigning between views of one memory copies as memmove does.
            view[target : target + size_bytes] = view[source : source + size_bytes]

    def placement(self) -> Placement:
        """What the system really gave; to be asked only of a prefaulted arena."""
        return placement_of(self._memory)

    def close(self) -> None:
        """Give the memory back; with views still in use it goes when the last of them does."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()

    def _prefault(self, *, writes: bool) -> None:
        """Take every page now; where the kernel cannot do that by itself, by writing, if nothing is there to keep."""
        try:
            self._memory.madvise(MADV_POPULATE_WRITE)
        except OSError:
            for offset in range(0, self.capacity_bytes if writes else 0, mmap.PAGESIZE):
                self._memory[offset] = 0


def _map_private(capacity_bytes: int, huge_pages: HugePages) -> mmap.mmap:
    # Private, because transparent huge pages are off for shared mappings on most systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | huge_pages.map_flags
    try:
        return mmap.mmap(-1, round_to_pages(capacity_bytes, huge_pages.page_bytes or 1), flags=flags)
    except (OSError, OverflowError) as error:
        if huge_pages.page_bytes:
            raise too_few_huge_pages(huge_pages.page_bytes, capacity_bytes) from None
        raise ResourceExhaustedError(
            f"the system refuses an arena of {capacity_bytes} bytes: {error}",
            reason="OUT_OF_MEMORY",
            hint="lower --dram-bytes or give the host more memory",
        ) from None


def _map_file(capacity_bytes: int, descriptor: int, page_bytes: int) -> mmap.mmap:
    """Map a file whose length is ``capacity_bytes`` in whole pages of its file system."""
    try:
        return mmap.mmap(descriptor, round_to_pages(capacity_bytes, page_bytes), flags=mmap.MAP_SHARED)
    except (OSError, OverflowError) as error:
        if page_bytes > mmap.PAGESIZE:
            raise too_few_huge_pages(page_bytes, capacity_bytes) from None
        raise _no_room(capacity_bytes, str(error)) from None


def _allocate(descriptor: int, length: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, length)
    except OSError as error:
        reason = "it is full" if error.errno == errno.ENOSPC else str(error.strerror)
        raise _no_room(length, reason) from None


def _no_room(length: int, reason: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"the folder of --arena-dir has no room for an arena of {length} bytes: {reason}",
        reason="ARENA_DIR_FULL",
        hint="mount it with a larger size=, remove what others left in it, or lower --dram-bytes",
    )
