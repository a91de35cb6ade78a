"""Operations as work requests that a device takes: pure arithmetic, no I/O.

A request carries at most ``max_message_bytes`` between one remote range and ``max_spans`` local ones; a chain has at
most ``max_requests`` of them. Nothing is reordered: RDMA promises order on one queue pair only in posting order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from saltern.errors import InvalidArgumentError
from saltern.rdma.values import LocalSpan, Operation, Write

#: However much more a device says that it takes: beyond it some drivers count in signed 32 bits.
MESSAGE_MAX_BYTES: Final = 1 << 30


class Verb(IntEnum):
    """``ibv_wr_opcode``, those that are used."""

    WRITE = 0
    WRITE_WITH_IMMEDIATE = 1
    READ = 4


@dataclass(frozen=True, slots=True)
class Request:
    """One work request. ``immediate`` counts for WRITE_WITH_IMMEDIATE only."""

    verb: Verb
    local: tuple[LocalSpan, ...]
    remote_address: int
    remote_key: int
    immediate: int = 0


#: Posted together, in order, with one completion at its end. Never empty.
Chain = tuple[Request, ...]


def split(
    operations: Iterable[Operation], *, max_message_bytes: int, max_spans: int, max_requests: int
) -> tuple[Chain, ...]:
    """Chains that carry out ``operations`` in order.

    Raises:
        InvalidArgumentError: RDMA_LENGTHS_DIFFER: an operation whose local and remote lengths differ;
            RDMA_RANGE_INVALID: a remote range that ends past 2^64.
    """
    message_bytes = min(max_message_bytes, MESSAGE_MAX_BYTES)
    requests = [request for operation in operations for request in _requests(operation, message_bytes, max_spans)]
    return tuple(tuple(requests[at : at + max_requests]) for at in range(0, len(requests), max_requests))


def _requests(operation: Operation, message_bytes: int, max_spans: int) -> Iterator[Request]:
    remote = operation.remote
    length_bytes = sum(span.length_bytes for span in operation.local)
    if length_bytes != remote.length_bytes:
        raise InvalidArgumentError(
            f"an RDMA operation of {length_bytes} local and {remote.length_bytes} remote bytes",
            reason="RDMA_LENGTHS_DIFFER",
            hint="name exactly as many bytes on both sides",
        )
    if not 0 <= remote.address <= 2**64 - remote.length_bytes or not 0 <= remote.remote_key < 2**32:
        raise InvalidArgumentError(
            f"remote range of {remote.length_bytes} bytes ends outside of the address space",
            reason="RDMA_RANGE_INVALID",
            hint="describe a registered buffer",
        )
    immediate = operation.immediate if isinstance(operation, Write) else None
    plain = Verb.WRITE if isinstance(operation, Write) else Verb.READ
    pieces = list(_pieces(operation.local, message_bytes, max_spans)) or [()]
    if length_bytes == 0 and immediate is None:
        return  # nothing to move and nobody to tell
    address = remote.address
    for number, piece in enumerate(pieces, 1):
        tells = immediate is not None and number == len(pieces)
        yield Request(
            verb=Verb.WRITE_WITH_IMMEDIATE if tells else plain,
            local=piece,
            remote_address=address,
            remote_key=remote.remote_key,
            immediate=immediate if tells and immediate is not None else 0,
        )
        address += sum(span.length_bytes for span in piece)


def _pieces(local: Sequence[LocalSpan], message_bytes: int, max_spans: int) -> Iterator[tuple[LocalSpan, ...]]:
    """Runs of at most ``max_spans`` spans and ``message_bytes`` bytes; spans are cut where they must be."""
    left = deque(span for span in local if span.length_bytes)
    while left:
        piece: list[LocalSpan] = []
        room_bytes = message_bytes
        while left and room_bytes and len(piece) < max_spans:
            span = left.popleft()
            taken_bytes = min(span.length_bytes, room_bytes)
            piece.append(LocalSpan(span.address, taken_bytes, span.local_key))
            if taken_bytes < span.length_bytes:
                rest_bytes = span.length_bytes - taken_bytes
                left.appendleft(LocalSpan(span.address + taken_bytes, rest_bytes, span.local_key))
            room_bytes -= taken_bytes
        yield tuple(piece)
