"""The SSD tier of a node in virtual time: the books that a real node keeps, and a device that carries out at once.

What is admitted, what gives way, what is written anew: all that is :class:`dataplane.core.ssd_tier.SsdTier`. What it
asks for is done the moment it asks; how long the device was busy with it is reckoned beside. A block is one record.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dataplane.core.entry import Entry
from dataplane.core.extents import GRANULE_BYTES
from dataplane.core.segments import BLOCK_BYTES, record_blocks
from dataplane.core.ssd_books import Bury, DropSegment, Outdate, Relocate, Seal
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.usage import DropReason
from dataplane.replay.link import Link
from saltern.names import TenantId

#: Of a simulated block. Real ones are so much longer than their heads that those do not count.
_RECORD_BYTES: Final = record_blocks(GRANULE_BYTES) * BLOCK_BYTES
#: Heads and footers of segments, for which a real device has room beside the blocks.
_SEGMENTS_SHARE: Final = 64
_SEGMENTS_BYTES: Final = 64 * BLOCK_BYTES
_SEGMENT_MIN_BYTES: Final = 8 * BLOCK_BYTES
#: What may wait for the device is dropped beyond (``--ssd-staging`` of a node), but some blocks may always wait.
STAGING_BYTES: Final = 128 * 2**20
_STAGING_BLOCKS_MIN: Final = 8
_NS_PER_S: Final = 1e9


def quota_bytes(blocks: int) -> int:
    """What the simulated tier must be given to hold so many blocks."""
    records_bytes = blocks * _RECORD_BYTES
    return records_bytes + records_bytes // _SEGMENTS_SHARE + _SEGMENTS_BYTES if blocks else 0


class SsdCounts(NamedTuple):
    """Of one tenant, in blocks; ``written`` counts those that were written anew as well."""

    written: int = 0
    evicted: int = 0
    dropped: dict[str, int] = {}  # noqa: RUF012 - nobody changes it

    def __sub__(self, other: SsdCounts) -> SsdCounts:
        dropped = {reason: count - other.dropped.get(reason, 0) for reason, count in self.dropped.items()}
        return SsdCounts(self.written - other.written, self.evicted - other.evicted, dropped)


class NodeSsd:
    """One node's.

    Args:
        block_bytes: the real length of a block.
        tenants: that share it.

    Attributes:
        tier: for the core above it.
        out, into: how busy the device is with reads and with writes.
    """

    def __init__(
        self,
        capacity_blocks: int,
        block_bytes: int,
        *,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        tenants: int = 1,
    ) -> None:
        self._block_bytes = block_bytes
        # What the quotas of all tenants together may add up to (I5).
        self._capacity_bytes = quota_bytes(capacity_blocks) + tenants * (_SEGMENTS_BYTES + BLOCK_BYTES)
        self._rates = read_bytes_per_s, write_bytes_per_s
        self._staging_s = max(STAGING_BYTES, _STAGING_BLOCKS_MIN * block_bytes) / write_bytes_per_s
        self._now_s = 0.0
        self._before: dict[TenantId, SsdCounts] = {}
        self.lose_all()
        self.begin()

    def begin(self) -> None:
        """Begin a column with what is there."""
        self.out, self.into = map(Link, self._rates)
        self._before = self._counts()

    def lose_all(self) -> None:
        """The device is gone with all that it had; there is an empty one."""
        self.tier = SsdTier(self._capacity_bytes, segment_min_bytes=_SEGMENT_MIN_BYTES)

    def at(self, now_ns: int) -> None:
        """Time is this from here on."""
        self._now_s = now_ns / _NS_PER_S

    def demote(self, entry: Entry) -> None:
        """Write what DRAM gives up, if the tier takes it and the device keeps up; as a node's store does."""
        tier, partition = self.tier, entry.index.partition
        if not tier.wants(partition, entry.key):
            return
        if self.into.free_s - self._now_s > self._staging_s:
            tier.drop(partition, DropReason.NO_STAGING)
            return
        append = tier.append_start(partition, entry.key, entry.size_bytes, int(self._now_s * _NS_PER_S))
        if append is not None:
            self.into.carry(self._block_bytes, self._now_s)
            tier.append_end(append, written=True)
        self._carry_out()

    def _carry_out(self) -> None:
        """Do what the tier asks for, in its order."""
        tier, actions = self.tier, self.tier.actions
        while actions:
            action = actions.popleft()
            match action:
                case Relocate():
                    self._relocate(action)
                case Seal():
                    tier.seal_end(action, written=True)
                case DropSegment():
                    tier.drop_end(action, removed=True)
                case Bury():
                    tier.bury_end(action, written=True)
                case Outdate():
                    tier.outdate_end(action, written=True)
                case _:
                    pass  # DestroyKey: there is none

    def _relocate(self, action: Relocate) -> None:
        tier = self.tier
        if action.entry.is_alive:
            read = tier.read_start(action.entry, relocates=True)
            append = tier.relocate_append(action, int(self._now_s * _NS_PER_S))
            if append is not None:
                self.into.carry(self._block_bytes, self._now_s)
                tier.append_end(append, written=True)
            tier.read_end(read, intact=True)
        tier.relocate_end(action)

    # ---- what it tells

    def _counts(self) -> dict[TenantId, SsdCounts]:
        found = {}
        for tenant, owner in self.tier.tenants.items():
            counted = owner.counters
            dropped = {str(reason): count for reason, count in counted.dropped_by_reason.items()}
            found[tenant] = SsdCounts(counted.demotions + counted.relocations, counted.evictions, dropped)
        return found

    def counts(self) -> dict[TenantId, SsdCounts]:
        """By tenant, since the column began."""
        return {tenant: counts - self._before.get(tenant, SsdCounts()) for tenant, counts in self._counts().items()}

    def blocks(self) -> int:
        """That can be found."""
        owners = self.tier.tenants.values()
        return sum(len(partition.entries) for owner in owners for partition in owner.partitions.values())
