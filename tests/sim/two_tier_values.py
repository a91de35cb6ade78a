"""What worlds of two tiers are made of: rules, jobs of the shell, and what must be true of entries."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dataplane.core.entry import Promotion, PutTicket
from dataplane.core.partition import Partition
from dataplane.core.segments import SegmentNumber
from dataplane.core.ssd_books import Append, Bury, DestroyKey, DropSegment, Relocate, Seal, SsdAction, SsdRead
from saltern.keys import BlockKey
from saltern.names import NamespaceId
from tenants.quota import Tier, TierQuota
from tests.sim.disk import Value

NS: Final = NamespaceId("ns")
BY_A_CLEAN_STOP: Final = SegmentNumber(0)


@dataclass(eq=False, slots=True)
class Rules:
    """One tenant's policy."""

    dram: TierQuota
    ssd: TierQuota
    uid: str
    epochs: tuple[int, ...] = (1,)
    namespace_limits: dict[Tier, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Staged:
    """A record on its way to the disk."""

    append: Append
    value: Value
    relocate: Relocate | None = None


@dataclass(eq=False, slots=True)
class Reading:
    """A read on its way: for a get (``promotion``), or to write an entry anew (``relocate``)."""

    read: SsdRead
    promotion: Promotion | None = None
    relocate: Relocate | None = None


@dataclass(eq=False, slots=True)
class Writing:
    """A put whose bytes have not all come."""

    ticket: PutTicket
    value: Value


@dataclass(slots=True)
class Truth:
    """What must be found if it is found at all.

    Attributes:
        current: the value that a key has now; absent once it was deleted.
        dead: numbers of values that were deleted or replaced and whose tombstone is on disk, by the file it lies in.
        graves: numbers that a delete or a put has outdated, until a tombstone for the key is written.
    """

    current: dict[tuple[Partition, BlockKey], Value] = field(default_factory=dict)
    dead: dict[int, SegmentNumber] = field(default_factory=dict)
    graves: dict[tuple[Partition, BlockKey], set[int]] = field(default_factory=dict)


Job: TypeAlias = Staged | SsdAction
KINDS: Final[dict[type, str]] = {
    Staged: "write a record",
    Bury: "write a tombstone",
    Seal: "seal a segment",
    DropSegment: "remove a segment",
    DestroyKey: "destroy a key",
}


def payload(partition: Partition, key: BlockKey, number: int, size_bytes: int) -> bytes:
    tag = hashlib.blake2b(f"{partition} {key.hex()} {number}".encode(), digest_size=32).digest()
    return (tag * (size_bytes // 32 + 1))[:size_bytes]


def in_order(place: tuple[Partition, BlockKey]) -> tuple[str, str, int, bytes]:
    """Sorts what a set holds, so that a seed is the same in every process."""
    partition, key = place
    return partition.tenant, partition.namespace_uid, partition.epoch, key


def short(key: BlockKey) -> str:
    return f"k{int.from_bytes(key, 'big')}"


def told_of(job: Job) -> str:
    match job:
        case Staged(append, value):
            return f"#{value.number} is written to segment {append.segment.number} at {append.block}"
        case Bury(segment, block, keys):
            return f"a tombstone of {len(keys)} keys is written to segment {segment.number} at {block}"
        case Seal(segment):
            return f"segment {segment.number} is sealed"
        case DropSegment(segment):
            return f"segment {segment.number} is removed"
        case _:
            return "a key is destroyed"
