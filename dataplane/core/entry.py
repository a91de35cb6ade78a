"""One cache entry, and the two handles on it that leave the core: a ticket to write it, a pin to read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from dataplane.core.extents import ArenaOffset
from saltern.errors import InternalError, SalternError
from saltern.keys import BlockKey

if TYPE_CHECKING:
    from dataplane.core.partition import Partition
    from dataplane.core.ssd_books import SsdRead
    from dataplane.core.tenant_cache import PartitionIndex


class EntryState(Enum):
    """What may be done with an entry's bytes.

    WRITING -> READABLE -> DETACHED -> (freed); a detached entry is unreachable but its memory is still being written or
    read by somebody, so it is neither reused nor credited yet (I7, I8). An adopted entry is one whose bytes outlived
    the process that wrote them (:mod:`dataplane.core.adoption`): it becomes readable once they are verified (I7).
    """

    WRITING = "writing"
    ADOPTED = "adopted"
    READABLE = "readable"
    DETACHED = "detached"


class Link:
    """A place in a doubly linked eviction order: 16 bytes an entry where an OrderedDict takes about 180."""

    __slots__ = ("colder", "warmer")
    colder: Link
    warmer: Link


class Entry(Link):
    """One KV block: immutable once readable.

    Attributes:
        size_bytes: length of the block; ``extent_bytes`` is what it occupies, in whole granules.
        checksum: XXH3-64 over the node's own copy, 0 until committed.
        is_proven: of use to the eviction order alone (:mod:`dataplane.core.two_queue`).
        pins: readers that hold it; an entry with pins is neither evicted nor reused.
        touched_ns: last use; strictly increasing from touch to touch, so no two entries are equally old.
    """

    __slots__ = (
        "checksum",
        "extent_bytes",
        "index",
        "is_proven",
        "key",
        "offset",
        "pins",
        "size_bytes",
        "state",
        "touched_ns",
    )

    def __init__(
        self, key: BlockKey, index: PartitionIndex, offset: ArenaOffset, size_bytes: int, extent_bytes: int
    ) -> None:
        self.key = key
        self.index = index
        self.offset = offset
        self.size_bytes = size_bytes
        self.extent_bytes = extent_bytes
        self.state = EntryState.WRITING
        self.checksum = 0
        self.pins = 0
        self.is_proven = False
        self.touched_ns = 0


@dataclass(slots=True, eq=False)
class PutTicket:
    """The right to write ``size_bytes`` at ``offset`` of the arena; commit or abort it exactly once."""

    offset: ArenaOffset
    size_bytes: int
    entry: Entry = field(repr=False)
    is_open: bool = True

    def close(self) -> Entry:
        """Use the ticket up; raises InternalError (TICKET_REUSED) if it was used before."""
        if not self.is_open:
            raise InternalError("a put ticket was used twice", reason="TICKET_REUSED")
        self.is_open = False
        return self.entry


@dataclass(frozen=True, slots=True)
class PutRefused:
    """Why an entry was not admitted. A value, not an exception: a batch goes on with its next entry."""

    error: SalternError


@dataclass(slots=True, eq=False)
class Pin:
    """The right to read ``size_bytes`` at ``offset`` of the arena until the pin is given back, exactly once.

    Attributes:
        is_loan: a peer of the entry's owner in a sharing group reads it (:mod:`dataplane.core.loans`).
    """

    offset: ArenaOffset
    size_bytes: int
    checksum: int
    entry: Entry = field(repr=False)
    is_open: bool = True
    is_loan: bool = False


@dataclass(slots=True, eq=False)
class Promotion:
    """An entry on its way from SSD to ``ticket.offset`` of the arena; end it exactly once.

    Attributes:
        source: the partition on SSD that it comes from: the reader's own, or a peer's in a sharing group.
    """

    ticket: PutTicket
    read: SsdRead
    source: Partition
