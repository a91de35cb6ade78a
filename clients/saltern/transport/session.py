"""One open session with a node: what is the same over every transport.

A session is one connection, one verified token, one namespace, one salt epoch (proto/WIRE.md, section 3). It is used by
one thread at a time. Requests are pipelined: while the node works on one frame, the client prepares the next or checks
the last. :mod:`saltern.transport.tcp`, :mod:`saltern.transport.shm` and :mod:`saltern.transport.rdma` move the entries.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

import msgspec

from saltern.credentials import Grant
from saltern.deadline import Deadline
from saltern.errors import (
    DataLossError,
    EntryTooLargeError,
    SalternError,
    StatusCode,
    UnavailableError,
    error_from_status,
)
from saltern.keys import BlockKey
from saltern.results import AlreadyStored, GetResult, Miss, PutResult, Refused, Stored, put_result
from saltern.transport.connection import Connection
from saltern.transport.slots import GetSlot, PutSlot
from saltern.wire import (
    KEYS_MAX,
    SUM_BYTES,
    BodyT,
    Delete,
    DeleteReply,
    Empty,
    GetReply,
    Hello,
    HelloReply,
    Lookup,
    LookupReply,
    Opcode,
    PutReply,
    Refresh,
    RefreshReply,
    error_from_body,
    split_sums,
)

#: Frames in flight: the node works on one while the next waits in its socket.
PIPELINE_FRAMES = 2
#: Bytes moved by one frame: small enough to overlap hashing with copying, large enough to hide a round trip.
FRAME_BYTES = 8 * 1024 * 1024
#: Keys in one frame of a put or get: bounds what is in flight while nobody reads.
FRAME_KEYS = 512
CLIENT_NAME = "saltern-python/0.1"

#: An enum's member costs a descriptor call at each use in Python 3.11; these do not.
_LOOKUP, _DELETE = int(Opcode.LOOKUP), int(Opcode.DELETE)

FrameT = TypeVar("FrameT")
_MISS = Miss()
_STORED = Stored()
_ALREADY_STORED = AlreadyStored()


class Session(ABC):
    """An open session. Raises SalternError; what was answered before an error is in the slots.

    Attributes:
        node: what the node calls itself.
        host: identifies the node's host and process.
        entry_max_bytes: the longest entry that the node accepts in this namespace.
        offers_rdma: whether the node takes entries over RDMA, too.
        grant: the grant whose token the node has verified last.
        is_fresh: no request has succeeded on it yet besides HELLO.
        last_used_s: monotonic time of the last request.
    """

    transport: ClassVar[str]

    def __init__(self, connection: Connection, grant: Grant, deadline: Deadline) -> None:
        """Say HELLO; closes the connection where that fails."""
        self._connection = connection
        self.grant = grant
        self.is_fresh = True
        self.replies = 0
        self.last_used_s = time.monotonic()
        try:
            hello = Hello(grant.access_token, grant.namespace, grant.epoch, CLIENT_NAME, grant.sharing_group_uid)
            reply = self._call(Opcode.HELLO, hello, HelloReply, deadline)
        except BaseException:
            self.close()
            raise
        self.node, self.host, self.entry_max_bytes = reply.node, reply.host, reply.entry_max_bytes
        self.offers_rdma = reply.rdma

    @property
    def usable(self) -> bool:
        return self._connection.usable

    def is_stale(self) -> bool:
        return self._connection.is_stale()

    def abort(self) -> None:
        """Interrupt the call in progress, from another thread."""
        self._connection.abort()

    def close(self) -> None:
        self._connection.close()

    def forget(self) -> None:
        """Drop this process's copy of the connection without a word to the node: a fork's parent goes on using it."""
        self._connection.close()

    def refresh(self, grant: Grant, deadline: Deadline) -> None:
        """Give the node a newer token of the same tenant, namespace and epoch."""
        self._call(Opcode.REFRESH, Refresh(grant.access_token), RefreshReply, deadline)
        self.grant = grant

    def ping(self, deadline: Deadline) -> None:
        self._call(Opcode.PING, Empty(), Empty, deadline)

    def lookup(self, keys: Sequence[BlockKey], deadline: Deadline) -> bytes:
        """One byte, 0 or 1, for each key; at most 4096 keys."""
        reply = self._call(_LOOKUP, Lookup(b"".join(keys)), LookupReply, deadline)
        if len(reply.found) != len(keys):
            raise self._connection.violation("a lookup reply of another length", "LENGTH_MISMATCH")
        return reply.found

    def delete(self, keys: Sequence[BlockKey], deadline: Deadline) -> int:
        """How many of at most 4096 keys were there."""
        return self._call(_DELETE, Delete(b"".join(keys)), DeleteReply, deadline).deleted

    @abstractmethod
    def put(self, slots: Sequence[PutSlot], deadline: Deadline) -> None:
        """Store entries; fills in ``result`` of every slot, or raises with some of them filled."""

    @abstractmethod
    def get(self, slots: Sequence[GetSlot], deadline: Deadline) -> None:
        """Read and verify entries; fills in ``result`` of every slot, or raises with some of them filled.

        A slot whose room was a guess keeps None where the entry is longer.
        """

    def _call(
        self,
        opcode: int,
        body: msgspec.Struct,
        kind: type[BodyT],
        deadline: Deadline,
        *,
        descriptor: int | None = None,
    ) -> BodyT:
        """Send a request on a connection where nothing else is in flight, and read its reply."""
        request_id = self._connection.send(opcode, body, deadline, descriptor=descriptor)
        reply = self._connection.receive_whole(opcode, request_id, deadline)
        self._note_reply()
        return self._connection.decode(kind, reply)

    def _reply(self, opcode: int, kind: type[BodyT], request_id: int, deadline: Deadline) -> BodyT:
        """Read a reply that has no payload, while other replies may follow."""
        header, body = self._connection.receive(opcode, request_id, deadline)
        if header.payload_bytes:
            raise self._connection.violation("a payload where none belongs", "UNEXPECTED_PAYLOAD")
        self._note_reply()
        return self._connection.decode(kind, body)

    def _note_reply(self) -> None:
        self.replies += 1
        self.last_used_s = time.monotonic()

    def _pipeline(
        self, frames: Iterable[FrameT], send: Callable[[FrameT], int], receive: Callable[[FrameT, int], None]
    ) -> None:
        """Send every frame and receive every reply, in order, with at most PIPELINE_FRAMES in flight."""
        in_flight: deque[tuple[FrameT, int]] = deque()
        for frame in frames:
            if len(in_flight) == PIPELINE_FRAMES:
                receive(*in_flight.popleft())
            try:
                in_flight.append((frame, send(frame)))
            except UnavailableError:
                # The node hung up. What it answered before that still counts, and may say why.
                while in_flight:
                    receive(*in_flight.popleft())
                raise
        while in_flight:
            receive(*in_flight.popleft())

    def _finish_put(self, slots: Sequence[PutSlot], request_id: int, deadline: Deadline) -> None:
        """Receive the reply to a put of ``slots`` and fill them in."""
        reply = self._reply(Opcode.PUT, PutReply, request_id, deadline)
        if len(reply.codes) != len(slots):
            raise self._connection.violation("a put reply of another length", "LENGTH_MISMATCH")
        explained = {entry.index: entry.error for entry in reply.errors}
        # The node puts the first 16 into words: the last of a code speaks for the others of that code.
        spokesman = {reply.codes[index]: body for index, body in sorted(explained.items()) if index < len(slots)}
        for index, (slot, code) in enumerate(zip(slots, reply.codes, strict=True)):
            if code == StatusCode.OK:
                slot.result = _STORED
            elif code == StatusCode.ALREADY_EXISTS:
                slot.result = _ALREADY_STORED
            elif (body := explained.get(index) or spokesman.get(code)) is not None:
                slot.result = put_result(error_from_body(body, code))
            else:
                slot.result = _unexplained(code)

    def _open_get(
        self, slots: Sequence[GetSlot], request_id: int, deadline: Deadline
    ) -> tuple[GetReply, list[int], int]:
        """Receive header and body of the reply to a get; return it with its sums and the size of its payload."""
        header, body = self._connection.receive(Opcode.GET, request_id, deadline)
        reply = self._connection.decode(GetReply, body)
        count = len(slots)
        if not len(reply.codes) == len(reply.sizes) == count or len(reply.sums) != count * SUM_BYTES:
            raise self._connection.violation("a get reply of another length", "LENGTH_MISMATCH")
        for slot, code, size in zip(slots, reply.codes, reply.sizes, strict=True):
            if code == StatusCode.OK and not 1 <= size <= slot.room_bytes:
                raise self._connection.violation("an entry longer than there is room for", "LENGTH_MISMATCH")
        self._note_reply()
        return reply, split_sums(reply.sums), header.payload_bytes


def absent(code: int, slot: GetSlot) -> GetResult | None:
    """The result for an entry of a get reply that is no hit; None for one that needs more room than was guessed."""
    room_bytes = slot.room_bytes
    match code:
        case StatusCode.NOT_FOUND:
            return _MISS
        case StatusCode.FAILED_PRECONDITION if slot.room_is_guess:
            return None
        case StatusCode.FAILED_PRECONDITION:
            return Miss(
                EntryTooLargeError(
                    f"the entry is longer than the {room_bytes} bytes given for it",
                    reason="BUFFER_TOO_SMALL",
                    hint="give a buffer of the namespace's block_bytes",
                    metadata={"limit_bytes": str(room_bytes)},
                )
            )
        case StatusCode.DATA_LOSS:
            return Miss(DataLossError("the node found the entry damaged and dropped it", reason="ENTRY_DROPPED"))
        case _:
            return Miss(error_from_status(code, f"the node answered code {code} for the entry"))


def corrupted(where: str) -> Miss:
    """The result for an entry whose bytes do not match their sum (I7)."""
    return Miss(
        DataLossError(
            f"the entry's bytes do not match its checksum after {where}",
            hint="recompute the block; if it happens again, look for faulty memory or network hardware",
        )
    )


def split_requests(keys: Sequence[BlockKey]) -> Iterable[Sequence[BlockKey]]:
    """Cut keys into requests of at most 4096."""
    return (keys[start : start + KEYS_MAX] for start in range(0, len(keys), KEYS_MAX))


def _unexplained(code: int) -> PutResult:
    """A refusal that the node put nowhere into words, not for another entry with this code either."""
    error: SalternError = error_from_status(
        code, f"the node refused the entry with code {code}", hint="the other refusals of the batch may say why"
    )
    return Refused(error)
