"""Stopping and starting a node without losing what it holds in DRAM: the shell around dataplane.core.snapshot.

::

    start --> index found? --> first policy: index set aside, entries adopted --> serving --> drained: index written

Until the first policy comes nothing is served and nothing changes, so a node that stops or is killed before leaves
everything as it found it. Whatever goes wrong on this way costs the cache and nothing else: the start is cold.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import structlog

from dataplane.core.cache import CacheCore
from dataplane.core.extents import ArenaOffset
from dataplane.core.snapshot import BadSnapshotError
from dataplane.io.arena import Arena
from dataplane.io.clock import Clock
from dataplane.io.warm_files import ArenaFolder
from dataplane.settings import NodeSettings
from saltern import wire
from saltern.sizes import format_size

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DramStart:
    """How the DRAM tier began; ``str()`` says it in one line.

    Attributes:
        entries, size_bytes: served again; 0 after a cold start.
        reason: why a snapshot was thrown away; empty if there was none.
    """

    entries: int = 0
    size_bytes: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.entries:
            return f"warm with {self.entries} entries, {format_size(self.size_bytes)}"
        return f"cold, snapshot thrown away: {self.reason}" if self.reason else "cold"


class WarmRestart:
    """Adopts what an earlier process left, and leaves it to the next one.

    Attributes:
        start: how the tier began; known once the first policy is in force.
    """

    def __init__(self, folder: ArenaFolder, arena: Arena, core: CacheCore, clock: Clock) -> None:
        self._folder: Final = folder
        self._arena: Final = arena
        self._core: Final = core
        self._clock: Final = clock
        self._has_policy = False
        self.start = DramStart(reason=folder.reason)
        if folder.reason:
            _log.warning("snapshot thrown away: DRAM starts cold", reason=folder.reason)

    def before_policy(self) -> None:
        """Call before a policy is applied: puts may change the arena right after, so the index has to go first.

        Raises:
            FailedPreconditionError: it cannot be; the policy must not come into force.
        """
        if not self._has_policy:
            self._folder.set_aside()

    def after_policy(self) -> None:
        """Call when a policy is in force, before anything else happens: adopt what it names."""
        if self._has_policy:
            return
        self._has_policy = True
        self._folder.discard()
        snapshot, self._folder.snapshot = self._folder.snapshot, None
        if snapshot is None:
            return
        try:
            with _no_garbage_collection():
                adopted = self._core.adopt(snapshot, self._digest, self._clock.monotonic_ns())
        except BadSnapshotError as error:
            self.start = DramStart(reason=str(error))
            _log.warning("snapshot thrown away: DRAM starts cold", reason=str(error))
            return
        self.start = DramStart(adopted.entries, adopted.size_bytes)
        _log.info(
            "DRAM adopted",
            entries=adopted.entries,
            size_bytes=adopted.size_bytes,
            purged_entries=adopted.purged_entries,
            evicted_entries=adopted.evicted_entries,
        )

    def save(self) -> None:
        """Write the index for the next process; call it when nothing can change the arena any more. Never raises."""
        try:
            if not self._has_policy:
                self._folder.put_back()  # what the process before has left is still right
                return
            with _no_garbage_collection():
                index_bytes = self._folder.save(self._core.snapshot(self._folder.identity))
        except OSError as error:
            _log.warning("DRAM cannot be kept: the next start is cold", reason=error.strerror or str(error))
            return
        _log.info("DRAM kept for the next start", index_bytes=index_bytes)

    def close(self) -> None:
        """Let the folder go."""
        self._folder.close()

    def _digest(self, offset: ArenaOffset, size_bytes: int) -> int:
        return wire.checksum(self._arena.view(offset, size_bytes))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A million new objects would start it dozens of times over all that is there, and none of them is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def open_arena(settings: NodeSettings) -> tuple[Arena, ArenaFolder | None]:
    """Take the memory that ``settings`` ask for; with a folder, the one that an earlier process has left there, if any.

    Raises:
        SalternError: as :class:`Arena` and :class:`ArenaFolder` do; nothing is left open then.
    """
    wanted = settings.arena
    folder = None
    if wanted.folder is not None:
        folder = ArenaFolder(
            wanted.folder,
            node_id=settings.node_id,
            capacity_bytes=settings.dram_bytes,
            index_folder=wanted.index_folder or wanted.folder,
            huge_pages=wanted.huge_pages,
        )
    try:
        arena = Arena(
            settings.dram_bytes,
            prefault=settings.prefault,
            huge_pages=wanted.huge_pages,
            numa_node=wanted.numa_node,
            descriptor=None if folder is None else folder.descriptor,
            file_page_bytes=mmap.PAGESIZE if folder is None else folder.page_bytes,
        )
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    return arena, folder
