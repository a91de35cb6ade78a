"""Clients: each holds one partition and moves one batch at a time, a few bytes at each turn.

They drive the same :class:`PutBatch` and :class:`GetBatch` as the node's doors do, over a real arena, so that every
byte that a reader gets is a byte that went through the core's hands.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.core.partition import Partition
from dataplane.io.batches import GetBatch, PutBatch
from saltern.keys import BlockKey
from tests.sim.model import SimEntry


@dataclass(eq=False)
class Item:
    """One entry of a put: its bytes, and the sum that the client claims."""

    key: BlockKey
    payload: bytes
    is_sum_right: bool


@dataclass(eq=False)
class Putting:
    """A put batch on its way.

    Attributes:
        target: the memory of the entry that is being received; None between entries.
        entry: the same in the model.
        codes: what each entry should be answered, as far as it has been.
    """

    batch: PutBatch
    items: list[Item]
    position: int = 0
    target: memoryview | None = None
    entry: SimEntry | None = None
    codes: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Getting:
    """A get batch on its way.

    Attributes:
        entries: what it pinned; ``is_loan`` of a peer, in a sharing group.
        received: what it has of its current hit.
    """

    batch: GetBatch
    keys: list[BlockKey]
    entries: list[SimEntry | None]
    is_loan: list[bool]
    position: int = 0
    received: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class Session:
    """One client's connection; it outlives the policy that admitted it."""

    number: int
    partition: Partition
    busy: Putting | Getting | None = None

    def __str__(self) -> str:
        return f"s{self.number}({name_of(self.partition)})"


def name_of(partition: Partition) -> str:
    group = f"~{partition.group_uid}" if partition.group_uid else ""
    return f"{partition.tenant}/{partition.namespace}#{partition.namespace_uid}{group}@{partition.epoch}"
