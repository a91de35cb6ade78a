"""An engine that keeps sealed records as objects in a store that others reach too.

::

    STATE_DIR/mooncake/TENANT/PARTITION/key, NUMBER.seg   the ledger: keys, heads, tombstones, footers; never a record
    store:  SEGMENT/OBJECT                                one sealed record, or 8 MiB of it

The ledger is a folder as :class:`dataplane.io.ssd_disk.Disk` keeps it, whose segment files have holes where the records
would be. What decides whether an entry is found, deleted or readable is on this node alone: whoever reaches the store
can take records away or put others in their place, and neither brings a deleted entry back nor makes a wrong one
readable. A record is bound by its seal to segment, block, key, length, checksum, namespace and epoch, under a key that
only its partition's data key leads to; names say nothing of whose they are, and cannot be foreseen without that key.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import ClassVar, Final, Protocol

import structlog

from dataplane.core.segments import (
    BLOCK_BYTES,
    BadFormatError,
    GoneError,
    Row,
    SegmentCipher,
    payload_blocks,
    record_blocks,
    salt_of,
    segment_name,
)
from dataplane.io.ssd_disk import Disk, Wanted, aligned, open_record
from dataplane.io.ssd_files import Files
from dataplane.io.ssd_places import SegmentPath
from dataplane.io.ssd_recovery import read_footer
from saltern.keys import BlockKey

_log = structlog.get_logger(__name__)
#: Longest object; a longer record is several.
OBJECT_MAX_BYTES: Final = 8 * 1024 * 1024
_OBJECT_BLOCKS: Final = OBJECT_MAX_BYTES // BLOCK_BYTES


class Fetched(Enum):
    """What came of one object that was asked for."""

    WHOLE = "whole"  #: as many bytes as were asked for; whose they are the seal must say
    GONE = "gone"
    RESIZED = "resized"  #: there is something else under this name
    FAILED = "failed"  #: who should have it did not give it


class ObjectStore(Protocol):
    """Keeps objects by name, on any thread. Nothing that it gives is trusted; nothing that it is given is secret.

    Raises:
        OSError: from every method: the store cannot be reached, or refuses (ENOSPC: it is full).
    """

    def check(self) -> None:
        """Raise if the store cannot be reached now; asks nobody."""

    def put(self, objects: Sequence[tuple[str, memoryview]]) -> None:
        """Keep objects, each at most OBJECT_MAX_BYTES; on an error some may be there."""

    def get(self, objects: Sequence[tuple[str, Sequence[memoryview]]]) -> list[Fetched]:
        """Fill the views of each object, one after the other, if it is exactly as long as they are together.

        What is in the views is not changed by anybody afterwards: it is this process's own copy.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are gone already are fine."""

    def remove_below(self, folder: str) -> None:
        """Remove every object whose name begins with ``folder`` and a slash."""

    def close(self) -> None:
        """Let go of the store; what it keeps stays."""


@dataclass(slots=True)
class EngineCounts:
    """What an engine has done since the start; only ever grows. Bytes are of sealed records, in whole blocks.

    Attributes:
        gone, forged, unreachable: records that were asked for and are a miss: not there any more; not what was sealed;
            nobody answered, or who has it failed.
        removals_failed: calls, each of them tried again until it succeeds.
    """

    writes: int = 0
    written_bytes: int = 0
    writes_failed: int = 0
    reads: int = 0
    read_bytes: int = 0
    gone: int = 0
    forged: int = 0
    unreachable: int = 0
    removed: int = 0
    removals_failed: int = 0


class ObjectEngine(Disk):
    """Records in ``store``, the ledger in the folder ``root``; see the module.

    Raises:
        FailedPreconditionError: as :class:`dataplane.io.ssd_disk.Disk`.
    """

    has_records: ClassVar[bool] = False
    run_bytes: ClassVar[int] = OBJECT_MAX_BYTES  # what a call costs beside the bytes is more than a read of a file

    def __init__(self, root: Path, node_key: bytes, store: ObjectStore, files: Files | None = None) -> None:
        super().__init__(root, node_key, files)
        self._store = store
        #: Objects of each segment, by the block that they begin at; of one that was recovered its footer tells.
        self._objects: dict[SegmentPath, set[int]] = {}
        #: Segments that may have objects which no list names: removed by their common name.
        self._unlisted: set[SegmentPath] = set()
        self._counts = EngineCounts()
        self._counts_lock = threading.Lock()

    @property
    def counts(self) -> EngineCounts:
        with self._counts_lock:
            return replace(self._counts)

    def check(self) -> None:
        self._store.check()

    @property
    def is_connected(self) -> bool:
        try:
            self._store.check()
        except OSError:
            return False
        return True

    def close(self) -> None:
        super().close()
        self._store.close()

    # ---- the writing thread

    def write_records(self, segment: SegmentPath, blocks: Sequence[int], memory: memoryview) -> None:
        self._descriptor(segment, is_new=blocks[0] == 1)
        cipher, first = self.ciphers[segment], blocks[0]
        end = first + len(memory) // BLOCK_BYTES
        places = [
            (at, min(at + _OBJECT_BLOCKS, stop))
            for start, stop in zip(blocks, [*blocks[1:], end], strict=True)
            for at in range(start, stop, _OBJECT_BLOCKS)
        ]
        objects = [
            (cipher.object_name(at), memory[(at - first) * BLOCK_BYTES : (stop - first) * BLOCK_BYTES])
            for at, stop in places
        ]
        try:
            self._store.put(objects)
        except OSError:
            # I12: some may be there that nobody was told of, and so nobody can delete. The segment takes no more.
            self._unlisted.add(segment)
            self._try_to_remove([name for name, _ in objects])
            self._stop_writing(segment)
            self._count(writes_failed=len(blocks))
            raise
        self._objects.setdefault(segment, set()).update(at for at, _ in places)
        self._count(writes=len(blocks), written_bytes=len(memory))

    def erase(self, segment: SegmentPath, block: int) -> None:
        cipher = self.ciphers.get(segment)
        if cipher is None:
            return
        listed = self._listed(segment)
        places = [block]
        while listed is not None and places[-1] + _OBJECT_BLOCKS in listed:
            places.append(places[-1] + _OBJECT_BLOCKS)
        if not self._try_to_remove([cipher.object_name(at) for at in places]):
            self._unlisted.add(segment)
        if listed is not None:
            listed.difference_update(places)

    def seal(self, segment: SegmentPath, end_block: int, rows: Sequence[Row], tombstones: Sequence[BlockKey]) -> None:
        listed, cipher = self._objects.get(segment), self.ciphers[segment]
        if listed is not None:
            alive = {at for _, block, size_bytes in rows for at in _places(block, size_bytes)}
            dead = listed - alive
            if dead and not self._try_to_remove([cipher.object_name(at) for at in dead]):
                self._unlisted.add(segment)
            self._objects[segment] = alive
        elif not rows:  # a start found it without a footer: what it had is not known any more
            self._remove(lambda: self._store.remove_below(cipher.name), 1)
            self._objects[segment] = set()
        super().seal(segment, end_block, rows, tombstones)

    def drop(self, segment: SegmentPath) -> None:
        cipher = self.ciphers.get(segment)
        if cipher is not None:
            listed = None if segment in self._unlisted else self._listed(segment)
            if listed is None:
                self._remove(lambda: self._store.remove_below(cipher.name), 1)
            elif listed:
                names = [cipher.object_name(at) for at in listed]
                self._remove(lambda: self._store.remove(names), len(names))
        super().drop(segment)
        self._objects.pop(segment, None)
        self._unlisted.discard(segment)

    def discard(self, path: Path) -> None:
        """As in a file; while the store cannot be reached the file stays for the next start to try again."""
        try:
            descriptor = self.files.open(path)
            try:
                head = aligned(BLOCK_BYTES)
                self.files.read_at(descriptor, [head], 0)
            finally:
                os.close(descriptor)
            folder = segment_name(salt_of(head))
        except BadFormatError:
            pass  # no head, and so no object
        else:
            try:
                self._remove(lambda: self._store.remove_below(folder), 1)
            except OSError:
                _log.warning("engine: objects of a deleted partition are left for the next start", path=str(path))
                return
        super().discard(path)

    # ---- any thread

    def read(self, segment: SegmentPath, wanted: Sequence[Wanted]) -> list[int | Exception]:
        cipher = self.ciphers.get(segment)
        if cipher is None:
            return [BadFormatError("the segment is gone") for _ in wanted]
        heads = [self._local.heads[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(len(wanted))]
        objects: list[tuple[str, Sequence[memoryview]]] = []
        shares = []
        for head, one in zip(heads, wanted, strict=True):
            pieces = [(cipher.object_name(one.block + at), views) for at, views in _pieces(head, one.target)]
            objects += pieces
            shares.append(len(pieces))
        try:
            fetched = iter(self._store.get(objects))
        except OSError as error:
            self._count(unreachable=len(wanted))
            return [error for _ in wanted]
        outcomes = []
        for head, one, share in zip(heads, wanted, shares, strict=True):
            outcomes.append(self._judge(cipher, head, one, [next(fetched) for _ in range(share)]))
        return outcomes

    def _judge(
        self, cipher: SegmentCipher, head: memoryview, one: Wanted, fetched: Sequence[Fetched]
    ) -> int | Exception:
        """I7: nothing but the seal says that it is the record that was asked for."""
        if Fetched.FAILED in fetched:
            self._count(unreachable=1)
            return OSError("who keeps the record did not give it")
        if Fetched.GONE in fetched:
            self._count(gone=1)
            return GoneError("the record is not there any more")
        try:
            if Fetched.RESIZED in fetched:
                raise BadFormatError("something of another length lies there")
            checksum = open_record(cipher, head, one)
        except BadFormatError as error:
            self._count(forged=1)
            return error
        self._count(reads=1, read_bytes=BLOCK_BYTES + len(one.target))
        return checksum

    # ---- inside

    def _listed(self, segment: SegmentPath) -> set[int] | None:
        """Objects of a segment; None if it is not known which it has."""
        listed = self._objects.get(segment)
        if listed is None and (cipher := self.ciphers.get(segment)) is not None:
            with contextlib.suppress(OSError):
                descriptor = self.files.open(self.path(segment))
                try:
                    found = read_footer(self, descriptor, cipher, segment, self.files.size(descriptor) // BLOCK_BYTES)
                finally:
                    os.close(descriptor)
                if found is not None:
                    listed = {at for _, block, size_bytes in found.rows for at in _places(block, size_bytes)}
                    self._objects[segment] = listed
        return listed

    def _remove(self, call: Callable[[], None], count: int) -> None:
        try:
            call()
        except OSError:
            self._count(removals_failed=1)
            raise
        self._count(removed=count)

    def _try_to_remove(self, names: Sequence[str]) -> bool:
        """Whether they are gone now; if not, they go with their segment, and are charged until then."""
        try:
            self._remove(lambda: self._store.remove(names), len(names))
        except OSError:
            return False
        return True

    def _count(self, **by: int) -> None:
        with self._counts_lock:
            for name, count in by.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)


def _places(block: int, size_bytes: int) -> range:
    """Where the objects begin that hold the record from ``block`` on."""
    return range(block, block + record_blocks(size_bytes), _OBJECT_BLOCKS)


def _pieces(head: memoryview, payload: memoryview) -> Iterator[tuple[int, list[memoryview]]]:
    """The objects of a record: each by its block, counted from the record's, and the views that it fills."""
    assert len(payload) == payload_blocks(len(payload)) * BLOCK_BYTES, "targets are whole blocks"
    first_bytes = OBJECT_MAX_BYTES - BLOCK_BYTES
    yield 0, [head, payload[:first_bytes]]
    for start in range(first_bytes, len(payload), OBJECT_MAX_BYTES):
        yield start // BLOCK_BYTES + 1, [payload[start : start + OBJECT_MAX_BYTES]]
