"""Entries through regions that the node reaches by itself: what shared memory and RDMA have in common.

Entries that lie in registered buffers are moved from and to where they are. All others go through a staging region of
the session, in two halves: while the node works on one, the client fills or empties the other.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from saltern.credentials import Grant
from saltern.deadline import Deadline
from saltern.errors import StatusCode
from saltern.results import Hit
from saltern.transport.connection import Connection
from saltern.transport.memory import RegisteredBuffer, address_of
from saltern.transport.registry import BufferRegistry, Place
from saltern.transport.session import FRAME_BYTES, FRAME_KEYS, PIPELINE_FRAMES, Session, absent, corrupted
from saltern.transport.slots import GetSlot, PutSlot, split_frames
from saltern.wire import REGIONS_MAX, Empty, Get, GetReply, Opcode, Put, Unregister, checksum, join_sums

_STAGING_REGION = 0
_ALIGN_BYTES = 64
#: Copies above this are made by memmove outside the GIL, so that other threads and event loops go on.
_LONG_COPY_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """A run of slots that travels in one frame through one region.

    Attributes:
        part: which slots of the batch.
        region: id of the registered region.
        offsets: where each entry lies in the region.
        buffer: the caller's registered buffer; None for the staging region.
    """

    part: slice
    region: int
    offsets: list[int]
    buffer: RegisteredBuffer | None

    def cpu_access(self) -> AbstractContextManager[None]:
        """Around what the CPU does with the bytes of the region."""
        return nullcontext() if self.buffer is None else self.buffer.cpu_access()


class RegionalSession(Session):
    """A session whose entries lie in regions that the node was told of."""

    #: Whether a region can be memory of a GPU; where it cannot, that is staged as foreign memory is.
    takes_dmabuf: ClassVar[bool] = False

    def __init__(self, connection: Connection, grant: Grant, registry: BufferRegistry, deadline: Deadline) -> None:
        self._registry = registry
        self._staging: RegisteredBuffer | None = None
        #: Region id -> the caller's buffer; weak, so that a buffer that nobody holds goes away.
        self._regions: dict[int, weakref.ref[RegisteredBuffer]] = {}
        self._next_region = 0
        #: Buffers that the node may be writing to right now.
        self._being_written: set[RegisteredBuffer] = set()
        super().__init__(connection, grant, deadline)
        half_bytes = max(FRAME_BYTES, self.entry_max_bytes) + FRAME_KEYS * _ALIGN_BYTES
        self._half_bytes = -(-half_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @abstractmethod
    def _register_region(self, region: int, buffer: RegisteredBuffer, deadline: Deadline) -> None:
        """Tell the node of ``buffer``, in place of what had this id before."""

    def _unregister_region(self, region: int, deadline: Deadline) -> None:
        """Let the node forget a region whose buffer is gone."""
        self._call(Opcode.UNREGISTER, Unregister(region), Empty, deadline)

    def _before_get(self, deadline: Deadline) -> None:
        """What a get needs besides its frame."""

    def _after_get(self, request_id: int, deadline: Deadline) -> None:
        """The reply to a get with hits has come: wait until their bytes are here as well."""

    def put(self, slots: Sequence[PutSlot], deadline: Deadline) -> None:
        frames = self._plan([slot.view for slot in slots], [slot.view.nbytes for slot in slots], deadline)

        def send(frame: Frame) -> int:
            # Hashing here overlaps with the node's copying of the frame before.
            batch = slots[frame.part]
            views = [slot.view for slot in batch]
            if frame.buffer is None:
                with self._registry.cpu_access(views):
                    views = [self._stage(view, offset) for view, offset in zip(views, frame.offsets, strict=True)]
            with frame.cpu_access():
                sums = join_sums([checksum(view) for view in views])
            keys, sizes = b"".join([slot.key for slot in batch]), [view.nbytes for view in views]
            body = Put(keys, sizes, sums, frame.region, frame.offsets)
            return self._connection.send(Opcode.PUT, body, deadline)

        self._pipeline(frames, send, lambda frame, id_: self._finish_put(slots[frame.part], id_, deadline))

    def get(self, slots: Sequence[GetSlot], deadline: Deadline) -> None:
        rooms = [slot.room_bytes for slot in slots]
        frames = self._plan([slot.buffer for slot in slots], rooms, deadline)

        def send(frame: Frame) -> int:
            body = Get(
                b"".join([slot.key for slot in slots[frame.part]]), rooms[frame.part], frame.region, frame.offsets
            )
            self._before_get(deadline)
            if frame.buffer is not None:
                self._being_written.add(frame.buffer)
            return self._connection.send(Opcode.GET, body, deadline)

        try:
            self._pipeline(frames, send, lambda frame, id_: self._finish_get(frame, slots[frame.part], id_, deadline))
        finally:
            if self.usable:
                self._being_written.clear()  # every reply is in: the node has let go

    def _finish_get(self, frame: Frame, slots: Sequence[GetSlot], request_id: int, deadline: Deadline) -> None:
        """Receive a reply and verify its entries while the node copies those of the next frame."""
        reply, sums, payload_bytes = self._open_get(slots, request_id, deadline)
        if payload_bytes:
            raise self._connection.violation("a payload in the reply to a regional get", "UNEXPECTED_PAYLOAD")
        if StatusCode.OK in reply.codes:
            self._after_get(request_id, deadline)
        foreign = [slot.buffer for slot in slots] if frame.buffer is None else []
        with frame.cpu_access(), self._registry.cpu_access(foreign):
            self._take_hits(frame, slots, reply, sums)

    def _take_hits(self, frame: Frame, slots: Sequence[GetSlot], reply: GetReply, sums: Sequence[int]) -> None:
        for slot, code, size, sum_, offset in zip(slots, reply.codes, reply.sizes, sums, frame.offsets, strict=True):
            if code != StatusCode.OK:
                slot.result = absent(code, slot)
                continue
            view = self._staged(offset, size) if frame.buffer is None or slot.buffer is None else slot.buffer[:size]
            if checksum(view) != sum_:
                slot.result = corrupted("the transfer")
            elif frame.buffer is not None or slot.taker is not None:
                slot.result = slot.hit(view)
            else:
                slot.result = Hit(_copy_out(view, slot.buffer))

    def _plan(
        self, views: Sequence[memoryview | None], sizes_bytes: Sequence[int], deadline: Deadline
    ) -> Iterator[Frame]:
        """Cut a batch into frames that each use one region, registering what is not yet."""
        places = self._registry.locate(views, takes_dmabuf=self.takes_dmabuf)
        regions = self._register(places, deadline)
        usable = [place if place is not None and place.buffer in regions else None for place in places]
        if not all(usable) and self._staging is None:
            self._staging = RegisteredBuffer(PIPELINE_FRAMES * self._half_bytes, shared=True)
            self._register_region(_STAGING_REGION, self._staging, deadline)
        return self._frames(usable, regions, sizes_bytes)

    def _frames(
        self, places: Sequence[Place | None], regions: dict[RegisteredBuffer, int], sizes_bytes: Sequence[int]
    ) -> Iterator[Frame]:
        half = 0
        start = 0
        for buffer, run in itertools.groupby(places, lambda place: place.buffer if place else None):
            length = len(list(run))
            run_sizes = sizes_bytes[start : start + length]
            for cut in split_frames(run_sizes, frame_bytes=FRAME_BYTES, keys_max=FRAME_KEYS):
                part = slice(start + cut.start, start + cut.stop)
                if buffer is None:
                    # A half is free again when the frame that used it last has been answered: _pipeline sees to it,
                    # since it has as many frames in flight as there are halves.
                    yield Frame(part, _STAGING_REGION, self._offsets(half, sizes_bytes[part]), None)
                else:
                    offsets = [place.offset for place in places[part] if place is not None]
                    yield Frame(part, regions[buffer], offsets, buffer)
                half = (half + 1) % PIPELINE_FRAMES
            start += length

    def _offsets(self, half: int, sizes_bytes: Sequence[int]) -> list[int]:
        steps = (-(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES for size_bytes in sizes_bytes[:-1])
        return list(itertools.accumulate(steps, initial=half * self._half_bytes))

    def _register(self, places: Sequence[Place | None], deadline: Deadline) -> dict[RegisteredBuffer, int]:
        """Region ids of the buffers of a batch; a batch over more buffers than there are regions stages the rest."""
        for region, reference in list(self._regions.items()):
            held = reference()
            if held is None or held.closed:
                self._unregister_region(region, deadline)
                del self._regions[region]
        known = {held: region for region, reference in self._regions.items() if (held := reference()) is not None}
        wanted = list(dict.fromkeys(place.buffer for place in places if place is not None))[: REGIONS_MAX - 1]
        keep = {known[buffer] for buffer in wanted if buffer in known}
        chosen: dict[RegisteredBuffer, int] = {}
        for buffer in wanted:
            region = known[buffer] if buffer in known else self._vacant_region(keep)
            if buffer not in known:
                self._register_region(region, buffer, deadline)
                self._regions[region] = weakref.ref(buffer)
                keep.add(region)
            chosen[buffer] = region
        return chosen

    def _vacant_region(self, keep: set[int]) -> int:
        """A free region id, else the next in turn that this batch does not use."""
        for region in range(_STAGING_REGION + 1, REGIONS_MAX):
            if region not in self._regions and region not in keep:
                return region
        while True:
            self._next_region = self._next_region % (REGIONS_MAX - 1) + 1
            if self._next_region not in keep:
                return self._next_region

    def _stage(self, view: memoryview, offset: int) -> memoryview:
        staged = self._staged(offset, view.nbytes)
        staged[:] = view
        return staged

    def _staged(self, offset: int, size_bytes: int) -> memoryview:
        assert self._staging is not None
        return self._staging.view[offset : offset + size_bytes]


def _copy_out(staged: memoryview, buffer: memoryview | None) -> memoryview:
    """Copy an entry out of the staging region, into ``buffer`` or memory of its own."""
    size_bytes = staged.nbytes
    if size_bytes <= _LONG_COPY_BYTES:
        if buffer is None:
            return memoryview(bytes(staged))
        buffer[:size_bytes] = staged
        return buffer[:size_bytes]
    target = memoryview(bytearray(size_bytes)) if buffer is None else buffer[:size_bytes]
    ctypes.memmove(address_of(target), address_of(staged), size_bytes)
    return target.toreadonly() if buffer is None else target
