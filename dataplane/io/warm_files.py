"""The folder that keeps a node's DRAM over a restart: a lock, the arena, and the index of what is in it.

::

    DIR/lock                   held (flock) while a node runs
    DIR/arena-GENERATION       the arena; GENERATION is random, and new with every cold start
    DIR/index                  written by a clean stop, consumed by the next start (dataplane.core.snapshot)

The bytes of all tenants lie in that file as they lie in the memory of any node: readable by root and by the node's own
user, by nobody else. So the folder must be in memory (tmpfs or hugetlbfs: nothing may end on a disk, I12), must belong
to the node's user, and nobody else may be able to put something else in its place.

**Why a stale index never meets other bytes (I7).** An index names the generation of its arena. It appears under its
name by rename, when nothing writes to the arena any more; it loses its name before the first change to that arena; and
whoever starts without one makes a new arena, of another generation. kill -9 between any two of these steps leaves
either both as they belong together, or no index that matches.

On hugetlbfs no file can be written but through a mapping, in whole huge pages; there the index lies in the node's state
folder instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dataplane.core.snapshot import ENTRY_BYTES, ArenaIdentity, BadSnapshotError, Snapshot, decode_snapshot
from dataplane.io.host_memory import HugePages, round_to_pages
from saltern.errors import FailedPreconditionError
from saltern.names import NodeId
from saltern.sizes import format_size

_ARENA: Final = "arena-{}"
_GENERATION: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_INDEX: Final = "index"
_INDEX_ON_DISK: Final = "dram-index"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS: Final = Path("/proc/self/mountinfo")
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW
#: Room for the head of an index; its entries are bounded by the arena.
_HEAD_ROOM_BYTES: Final = 64 * 1024 * 1024
_GRANULE_BYTES: Final = 4096


class ArenaFolder:
    """Opens the folder, takes its lock, and finds out whether what lies there can be served again.

    Args:
        index_folder: for the index where ``folder`` cannot hold it.
        huge_pages: an explicit size must be that of a hugetlbfs mount.

    Attributes:
        descriptor: the arena's file, ``file_bytes`` long.
        page_bytes: size of the pages of its file system.
        snapshot: what the file holds, from a clean stop; None for a cold start.
        reason: why something that was there was thrown away; empty if nothing was there.

    Raises:
        FailedPreconditionError: ARENA_DIR_UNUSABLE, ARENA_DIR_NOT_MEMORY, ARENA_DIR_UNSAFE, ARENA_DIR_IN_USE,
            HUGE_PAGES_MISMATCH.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node_id: NodeId,
        capacity_bytes: int,
        index_folder: Path,
        huge_pages: HugePages = HugePages.TRANSPARENT,
    ) -> None:
        self._folder: Final = folder.absolute()
        _make_folder(self._folder)
        kind, self.page_bytes = _memory_kind(self._folder)
        if huge_pages.page_bytes not in (0, self.page_bytes):
            raise _page_mismatch(self._folder, huge_pages, kind)
        self._index: Final = self._folder / _INDEX if kind == "tmpfs" else index_folder.absolute() / _INDEX_ON_DISK
        self._node_id: Final = node_id
        self._capacity_bytes: Final = capacity_bytes
        self.file_bytes: Final = round_to_pages(capacity_bytes, self.page_bytes)
        self.snapshot: Snapshot | None = None
        self.reason = ""
        self.descriptor = -1
        self._lock = _take_lock(self._folder)
        try:
            self._partial.unlink(missing_ok=True)
            try:
                self.snapshot = self._find()
            except BadSnapshotError as error:
                self.reason = str(error)
            if self.snapshot is None:
                self._start_anew()
        except OSError as error:
            self.close()
            raise _unusable(self._folder, error) from None
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> ArenaIdentity:
        """What an index written now says of its arena."""
        inode = os.fstat(self.descriptor).st_ino
        return ArenaIdentity(str(self._node_id), _boot_id(), self._generation, inode, self._capacity_bytes)

    def set_aside(self) -> None:
        """Take the index's name away, before the first change to the arena; does nothing if it has none.

        Raises:
            FailedPreconditionError: ARENA_DIR_UNUSABLE; nothing may be written to the arena then.
        """
        try:
            with contextlib.suppress(FileNotFoundError):
                self._index.rename(self._partial)
                _sync_folder(self._index.parent)
        except OSError as error:
            raise _unusable(self._index.parent, error) from None

    def put_back(self) -> None:
        """Undo :meth:`set_aside`, as long as the arena has not changed. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._partial.rename(self._index)

    def discard(self) -> None:
        """Remove an index that was set aside: it is never used again."""
        with contextlib.suppress(OSError):  # the next start removes it
            self._partial.unlink(missing_ok=True)

    def save(self, pieces: Iterable[bytes]) -> int:
        """Write an index, whole or not at all; nothing may change the arena any more. Returns its length.

        Raises:
            OSError: it could not be written; there is none then.
        """
        written = 0
        self.discard()
        try:
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    written += file.write(piece)
                file.flush()
                os.fsync(descriptor)
            self._partial.rename(self._index)
            _sync_folder(self._index.parent)
        except OSError:
            self.discard()
            raise
        return written

    def close(self) -> None:
        """Let the folder go; what is in it stays."""
        for descriptor in (self.descriptor, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._lock = -1

    # ---- inside

    @property
    def _partial(self) -> Path:
        return self._index.with_name(f"{self._index.name}.partial")

    def _find(self) -> Snapshot | None:
        """Read the index and open the arena that it names; None if there is none.

        Raises:
            BadSnapshotError: there is one that cannot be used.
        """
        try:
            data = self._read_index()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadSnapshotError(f"it cannot be read: {error.strerror}") from None
        snapshot = decode_snapshot(data)
        arena = snapshot.arena
        if arena.node_id != self._node_id:
            raise BadSnapshotError(f"it is of node {arena.node_id!r}")
        if arena.boot_id != _boot_id():
            raise BadSnapshotError("the system was booted since it was written")
        if arena.capacity_bytes != self._capacity_bytes:
            before, now = format_size(arena.capacity_bytes), format_size(self._capacity_bytes)
            raise BadSnapshotError(f"the arena was {before} long, and is to be {now}")
        if _GENERATION.fullmatch(arena.generation) is None:
            raise BadSnapshotError("it names no arena")
        try:
            descriptor = os.open(self._folder / _ARENA.format(arena.generation), os.O_RDWR | _FLAGS)
        except OSError as error:
            raise BadSnapshotError(f"its arena cannot be opened: {error.strerror}") from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or (found.st_ino, found.st_size) != (arena.inode, self.file_bytes):
            os.close(descriptor)
            raise BadSnapshotError("the arena is not the file that it was written for")
        self.descriptor = descriptor
        self._generation = arena.generation
        self._remove_arenas(but=arena.generation)
        return snapshot

    def _read_index(self) -> bytes:
        """Raises OSError, BadSnapshotError."""
        descriptor = os.open(self._index, os.O_RDONLY | _FLAGS)
        with os.fdopen(descriptor, "rb") as file:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes > _HEAD_ROOM_BYTES + self._capacity_bytes // _GRANULE_BYTES * ENTRY_BYTES:
                raise BadSnapshotError("it is longer than one of this arena can be")
            return file.read()

    def _start_anew(self) -> None:
        """Make a new, empty arena, of a generation that no index names. Raises OSError."""
        self._index.unlink(missing_ok=True)
        self._remove_arenas(but="")
        self._generation = secrets.token_hex(16)
        path = self._folder / _ARENA.format(self._generation)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        os.ftruncate(self.descriptor, self.file_bytes)

    def _remove_arenas(self, *, but: str) -> None:
        """Give back the memory of arenas that no node will use any more."""
        for path in self._folder.glob(_ARENA.format("*")):
            if path.name != _ARENA.format(but):
                path.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    try:
        for one in reversed([folder, *folder.parents]):
            if not one.exists():
                one.mkdir(exist_ok=True, mode=0o700)  # parents too, whatever the umask says
        found = folder.lstat()
        parents = [(parent, parent.stat()) for parent in folder.resolve().parents]
    except OSError as error:
        raise _unusable(folder, error) from None
    me = os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        raise _unsafe(folder, "it is not a folder but a link or a file")
    if found.st_uid != me:
        raise _unsafe(folder, f"it belongs to user {found.st_uid}, not to {me}")
    if found.st_mode & 0o022:
        raise _unsafe(folder, f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})")
    for parent, there in parents:
        if there.st_uid not in (0, me) or (there.st_mode & 0o022 and not there.st_mode & stat.S_ISVTX):
            raise _unsafe(folder, f"others can replace it, because they can write to {parent}")


def _memory_kind(folder: Path) -> tuple[str, int]:
    """(type of the file system, size of its pages).

    Raises:
        FailedPreconditionError: ARENA_DIR_NOT_MEMORY.
    """
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kind = ""
    for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split(" ")[2] == wanted:
            kind = source.split(" ")[0]
    if kind == "tmpfs":
        return kind, mmap.PAGESIZE
    if kind == "hugetlbfs":
        return kind, os.statvfs(folder).f_bsize
    raise FailedPreconditionError(
        f"the folder {folder} is not in memory but on {kind or 'a file system that cannot be told'}",
        reason="ARENA_DIR_NOT_MEMORY",
        hint="give --arena-dir a folder on tmpfs or hugetlbfs, such as /dev/shm/saltern/node-1",
    )


def _take_lock(folder: Path) -> int:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise FailedPreconditionError(
            f"another process uses the arena folder {folder}",
            reason="ARENA_DIR_IN_USE",
            hint="stop the other node, or give each node an --arena-dir of its own",
        ) from None
    return descriptor


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unusable(folder: Path, error: OSError) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"cannot use the arena folder {folder}: {(error.strerror or 'unusable').lower()}",
        reason="ARENA_DIR_UNUSABLE",
        hint="give --arena-dir a folder that this user can write, and that is not full",
    )


def _unsafe(folder: Path, reason: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the arena folder {folder} is not safe: {reason}",
        reason="ARENA_DIR_UNSAFE",
        hint="give --arena-dir a folder of the node's own user with mode 0700, below folders that others cannot change",
    )


def _page_mismatch(folder: Path, huge_pages: HugePages, kind: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"--huge-pages {huge_pages} and the {kind} at {folder} do not go together",
        reason="HUGE_PAGES_MISMATCH",
        hint=f"mount a hugetlbfs with pagesize={huge_pages.removesuffix('iB')}, or choose --huge-pages transparent",
    )
