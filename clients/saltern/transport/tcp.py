"""Entries in the frame, over TCP: gathered from and scattered to where they lie, never joined in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from saltern.credentials import Grant
from saltern.deadline import Deadline
from saltern.errors import StatusCode
from saltern.transport.address import resolve
from saltern.transport.connection import Connection
from saltern.transport.registry import BufferRegistry
from saltern.transport.session import FRAME_BYTES, FRAME_KEYS, Session, absent, corrupted
from saltern.transport.slots import GetSlot, PutSlot, split_frames
from saltern.transport.tls import TlsDialer, dial
from saltern.wire import Get, Opcode, Put, checksum, join_sums

#: A get reserves nothing on the node, so that its frames may be larger; the payload of a frame ends at 256 MiB.
_GET_FRAME_BYTES = 64 * 1024 * 1024
#: Small entries of a get are received together, up to so many bytes.
_GATHER_BYTES = 256 * 1024


class TcpSession(Session):
    """A session over TCP."""

    transport: ClassVar[str] = "tcp"

    def __init__(self, connection: Connection, grant: Grant, registry: BufferRegistry, deadline: Deadline) -> None:
        self._registry = registry
        #: Where entries that are taken at once are received, each over the one before: it stays in the core's cache.
        self._lent = bytearray()
        super().__init__(connection, grant, deadline)

    @classmethod
    def open(
        cls,
        wire_endpoint: str,
        grant: Grant,
        registry: BufferRegistry,
        deadline: Deadline,
        *,
        node_id: str,
        tls: TlsDialer | None = None,
        server_name: str = "",
    ) -> TcpSession:
        """Connect and say HELLO.

        Args:
            registry: the client's buffers: memory of a GPU among them is touched by this host's CPU here.
            tls: what the client was told of TLS; None for plain text.
            server_name: what the node's certificate must be for; empty for a node that serves plain text.

        Raises:
            UnavailableError, DeadlineExceededError: not reachable in time, or not in the way that the client was told.
            UnauthenticatedError, PermissionDeniedError: the node refused the token.
        """
        address = resolve(wire_endpoint, deadline)
        peer = f"node {node_id} at {wire_endpoint}"
        connection = dial(address, deadline, peer=peer, tls=tls, server_name=server_name)
        return cls(connection, grant, registry, deadline)

    def put(self, slots: Sequence[PutSlot], deadline: Deadline) -> None:
        sizes = [slot.view.nbytes for slot in slots]

        def send(frame: slice) -> int:
            # Hashing here overlaps with the node's reading of the frame before, which the socket still holds.
            batch = slots[frame]
            body = Put(
                b"".join([slot.key for slot in batch]),
                sizes[frame],
                join_sums([checksum(slot.view) for slot in batch]),
            )
            return self._connection.send(Opcode.PUT, body, deadline, payload=[slot.view for slot in batch])

        with self._registry.cpu_access([slot.view for slot in slots]):
            self._pipeline(
                split_frames(sizes, frame_bytes=FRAME_BYTES, keys_max=FRAME_KEYS),
                send,
                lambda frame, request_id: self._finish_put(slots[frame], request_id, deadline),
            )

    def get(self, slots: Sequence[GetSlot], deadline: Deadline) -> None:
        rooms = [slot.room_bytes for slot in slots]

        def send(frame: slice) -> int:
            body = Get(b"".join([slot.key for slot in slots[frame]]), rooms[frame])
            return self._connection.send(Opcode.GET, body, deadline)

        with self._registry.cpu_access([slot.buffer for slot in slots]):
            self._pipeline(
                split_frames(rooms, frame_bytes=_GET_FRAME_BYTES, keys_max=FRAME_KEYS),
                send,
                lambda frame, request_id: self._finish_get(slots[frame], request_id, deadline),
            )

    def _finish_get(self, slots: Sequence[GetSlot], request_id: int, deadline: Deadline) -> None:
        reply, sums, payload_bytes = self._open_get(slots, request_id, deadline)
        hits: list[tuple[GetSlot, int, int]] = []
        for slot, code, size, sum_ in zip(slots, reply.codes, reply.sizes, sums, strict=True):
            if code == StatusCode.OK:
                hits.append((slot, size, sum_))
            else:
                slot.result = absent(code, slot)
        if payload_bytes != sum(size for _, size, _ in hits):
            raise self._connection.violation("the payload does not add up to the sizes of the hits", "LENGTH_MISMATCH")
        if not payload_bytes:
            return
        self._receive_hits(hits, deadline)
        self._connection.complete()

    def _receive_hits(self, hits: Sequence[tuple[GetSlot, int, int]], deadline: Deadline) -> None:
        """Receive each entry where it belongs and verify it at once, while it is hot in the cache."""
        index = 0
        while index < len(hits):
            slot, size, sum_ = hits[index]
            if slot.buffer is not None:
                view = slot.buffer[:size]
                self._connection.read_into(view, deadline)
                _judge(slot, view, sum_)
                index += 1
                continue
            if slot.taker is not None:
                view = self._lendable(slot.room_bytes)[:size]
                self._connection.read_into(view, deadline)
                _judge(slot, view, sum_)
                index += 1
                continue
            # Entries that bring no buffer share one piece of memory while they are small.
            end, total_bytes = index + 1, size
            while end < len(hits) and _is_loose(hits[end][0]) and total_bytes + hits[end][1] <= _GATHER_BYTES:
                total_bytes += hits[end][1]
                end += 1
            data, offset = memoryview(self._connection.read_exactly(total_bytes, deadline)), 0
            for slot, size, sum_ in hits[index:end]:
                _judge(slot, data[offset : offset + size], sum_)
                offset += size
            index = end

    def _lendable(self, room_bytes: int) -> memoryview:
        if len(self._lent) < room_bytes:
            self._lent = bytearray(room_bytes)
        return memoryview(self._lent)


def _is_loose(slot: GetSlot) -> bool:
    """Whether an entry's bytes get memory of their own."""
    return slot.buffer is None and slot.taker is None


def _judge(slot: GetSlot, view: memoryview, sum_: int) -> None:
    slot.result = slot.hit(view) if checksum(view) == sum_ else corrupted("the transfer")
