"""What to read where and what to write where, from what the nodes of a chain were seen to hold. Pure rules, no I/O.

A chain is looked up on its two nodes, under the current salt epoch and, while there is one, the older readable one. A
:class:`Sighting` keeps the answers; ``plan_reads`` and ``plan_writes`` turn it into work for each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from saltern.errors import SalternError
from saltern.placement import ReadLoad


class Source(NamedTuple):
    """Where a block can be read: entries of two epochs lie in two partitions of a node, under different keys."""

    node_id: str
    epoch: int


#: Positions in the chain, ascending, for each node that is to be asked.
Reads: TypeAlias = dict[Source, list[int]]
Writes: TypeAlias = dict[str, list[int]]


class Sighting:
    """What lookups of one chain saw.

    Args:
        length: blocks in the chain.

    Attributes:
        found: for each source one byte, 0 or 1, for each position.
        failed: why a node did not answer, by node id.
    """

    __slots__ = ("failed", "found", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self.found: dict[Source, bytearray] = {}
        self.failed: dict[str, SalternError] = {}

    def note(self, source: Source, positions: Iterable[int], *, present: bool) -> None:
        """Note that these blocks are there, or are not."""
        row = self.found.setdefault(source, bytearray(self.length))
        for position in positions:
            row[position] = present

    def anywhere(self, epoch: int | None = None) -> bytes:
        """One byte for each position: whether the block can be read at all, or under one epoch."""
        # As numbers: chains have thousands of blocks, and this is one operation in C.
        union = 0
        for source, row in self.found.items():
            if epoch is None or source.epoch == epoch:
                union |= int.from_bytes(row, "little")
        return union.to_bytes(self.length, "little")

    @property
    def prefix(self) -> int:
        """How many blocks from the first one on can be read without a gap."""
        return prefix_length(self.anywhere())

    @property
    def error(self) -> SalternError | None:
        """Why the picture may be incomplete, or None."""
        return next(iter(self.failed.values()), None)


def prefix_length(found: bytes | bytearray) -> int:
    """How many bytes from the first one on are not zero."""
    gap = found.find(0)
    return len(found) if gap < 0 else gap


def plan_reads(sighting: Sighting, positions: Iterable[int], load: ReadLoad) -> Reads:
    """Choose a source for every block that has one: the newest epoch, and of two nodes the one read less from."""
    order = sorted(sighting.found, key=lambda source: -source.epoch)
    lightest = {
        epoch: load.lightest([source.node_id for source in order if source.epoch == epoch])
        for epoch in {source.epoch for source in order}
    }
    order.sort(key=lambda source: (-source.epoch, source.node_id != lightest[source.epoch]))
    rows = [(source, sighting.found[source]) for source in order]
    reads: Reads = {}
    for position in positions:
        for source, row in rows:
            if row[position]:
                reads.setdefault(source, []).append(position)
                break
    return reads


def plan_writes(
    sighting: Sighting, positions: Iterable[int], epoch: int, writable: Sequence[str], *, twice: bool
) -> Writes:
    """Choose the nodes of every block to store; a node that has it already is not sent it again.

    Args:
        positions: of the blocks at hand.
        epoch: the newest, under which all is written.
        writable: nodes of the pair that answer and take new blocks, best first. What only others have is written anew:
            a node that is being emptied, or an epoch that ends, takes nothing along that is still in use.
        twice: store on every one of them; otherwise only what none of them has, on the first.
    """
    nothing = bytes(sighting.length)
    rows = [(node_id, sighting.found.get(Source(node_id, epoch), nothing)) for node_id in writable]
    writes: Writes = {}
    for position in positions:
        lacking = [node_id for node_id, row in rows if not row[position]]
        if not twice:
            lacking = lacking[:1] if len(lacking) == len(rows) else []
        for node_id in lacking:
            writes.setdefault(node_id, []).append(position)
    return writes


def copies_wanted(sighting: Sighting, epoch: int, writable: Sequence[str], *, twice: bool) -> tuple[int, ...]:
    """Blocks of the readable prefix that should be stored again by whoever has their bytes after reading them.

    They are on one node where the rule wants them on two, on a node that is being emptied, or under an epoch that ends.
    Taking them along in the next put costs an engine little, and the chain outlives the node or the rotation.
    """
    writes = plan_writes(sighting, range(sighting.prefix), epoch, writable, twice=twice)
    return tuple(sorted({position for wanted in writes.values() for position in wanted}))
