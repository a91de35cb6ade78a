"""A node's tiers over several lives in one folder, with entries by number: what tests of the SSD store begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dataplane.core.partition import Partition
from dataplane.core.segments import BLOCK_BYTES
from dataplane.io.ssd import SsdState
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_node import KIB, MIB, SsdNode, policy_of

SIZE = 12 * KIB
RECORD = SIZE + BLOCK_BYTES
DRAM = TierQuota(0, 64 * KIB)
Start = Callable[..., SsdNode]


def value_of(number: int) -> bytes:
    return (number.to_bytes(4, "big") * (SIZE // 4 + 1))[:SIZE]


@contextmanager
def lives(folder: Path) -> Iterator[Start]:
    """Starts a node with tenants a and b; starting another one first kills the one before."""
    nodes: list[SsdNode] = []

    def run(limit: int = MIB, *, reserved: int = 0, policy: bool = True, **options: object) -> SsdNode:
        if nodes:
            nodes.pop().release()
        options = {"dram_bytes": 128 * KIB, "ssd_bytes": 4 * MIB, **options}
        node = SsdNode(folder, **options).recover()  # type: ignore[arg-type]
        nodes.append(node)
        if policy:
            node.apply(policy_of(1, dict.fromkeys("ab", (DRAM, TierQuota(reserved, limit)))))
        return node

    yield run
    if nodes:
        nodes[-1].check()
        nodes[-1].release()


def fill(node: SsdNode, tenant: str, numbers: range) -> Partition:
    partition = node.partition(tenant)
    for number in numbers:
        assert node.put(partition, key_of(number), value_of(number)) == ""
        node.workers.drain()
        node.check()
    return partition


def on_ssd(node: SsdNode, partition: Partition, numbers: range) -> list[int]:
    return [number for number in numbers if node.tier.find(partition, key_of(number)) is not None]


def status(node: SsdNode) -> SsdState:
    return node.store.status.state
