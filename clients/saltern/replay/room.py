"""Memory of a replay's nodes in blocks, and what each tenant may have of it on each node; the same for every engine.

A quota over all nodes is split evenly, as the control plane does among nodes that are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from saltern.errors import InvalidArgumentError
from saltern.replay.setup import ReplaySetup, TenantQuota
from saltern.traces.request import Trace

#: A node hands out its memory in pieces of this size (docs/node.md), so a block takes a whole number of them.
GRANULE_BYTES: Final = 4096
#: Index and key of one block: what the simulator needs of the machine that it runs on, about.
_INDEX_BYTES: Final = 400
_BLOCKS_MAX: Final = 200_000_000
_NO_QUOTA: Final = TenantQuota()


class Share(NamedTuple):
    """What one tenant may have on one node."""

    reserved_blocks: int
    limit_blocks: int
    weight: int = 100
    ssd_reserved_blocks: int = 0
    ssd_limit_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the nodes, in blocks.

    Attributes:
        block_bytes: of keys and values of a whole block.
        node_blocks, ssd_blocks: that one node holds in memory and on SSD.
    """

    block_bytes: int
    node_blocks: int
    nodes: int
    ssd_blocks: int = 0

    @classmethod
    def of(cls, trace: Trace, setup: ReplaySetup) -> Room:
        """Of a trace without prefix identity there are no blocks.

        Raises:
            InvalidArgumentError: INVALID_REPLAY: a node holds not one, or all hold more than can be simulated.
        """
        block_bytes = trace.block_tokens * setup.model.kv_bytes_per_token
        node_blocks = setup.node_bytes // rounded_up(block_bytes) if block_bytes else 0
        ssd_blocks = setup.node_ssd_bytes // rounded_up(block_bytes) if block_bytes else 0
        if block_bytes and not (node_blocks and (node_blocks + ssd_blocks) * setup.nodes <= _BLOCKS_MAX):
            raise InvalidArgumentError(
                f"cannot replay with nodes of {node_blocks} blocks of {block_bytes} bytes",
                reason="INVALID_REPLAY",
                hint=f"choose memory for at least one block on each node and at most {_BLOCKS_MAX} on all; here each "
                f"takes about {_INDEX_BYTES} bytes",
            )
        return cls(block_bytes, node_blocks, setup.nodes, ssd_blocks)

    def blocks_of(self, size_bytes: int) -> int:
        """Of a quota over all nodes, on each."""
        return size_bytes // self.nodes // rounded_up(self.block_bytes)

    def shared(self, setup: ReplaySetup, tenants: Sequence[str]) -> dict[str, Share]:
        """What was set up: reservations and limits.

        Without a limit a tenant may have more memory than there is: one of just that is met as the pool is full, and a
        control plane would move it to where it is met most, which helps nobody.
        """
        shares = {}
        for name in tenants:
            quota = setup.quotas.get(name, _NO_QUOTA)
            dram = self._shared(self.node_blocks, quota.reserved_bytes, quota.limit_bytes, 2 * self.node_blocks)
            ssd = self._shared(self.ssd_blocks, quota.ssd_reserved_bytes, quota.ssd_limit_bytes, self.ssd_blocks)
            shares[name] = Share(*dram, quota.weight, *ssd)
        return shares

    def _shared(
        self, capacity: int, reserved_bytes: int | None, limit_bytes: int | None, no_limit: int
    ) -> tuple[int, int]:
        reserved = min(capacity, self.blocks_of(reserved_bytes or 0))
        limit = no_limit if limit_bytes is None else min(capacity, self.blocks_of(limit_bytes))
        return reserved, max(reserved, limit)

    def walls(self, setup: ReplaySetup, tenants: Sequence[str]) -> dict[str, Share]:
        """Each tenant by itself: its reservation; those without one have equal parts of what nobody has reserved."""
        quotas = {name: setup.quotas.get(name, _NO_QUOTA) for name in tenants}
        dram = self._walls(self.node_blocks, {name: quota.reserved_bytes for name, quota in quotas.items()})
        ssd = self._walls(self.ssd_blocks, {name: quota.ssd_reserved_bytes for name, quota in quotas.items()})
        return {
            name: Share(dram[name], dram[name], ssd_reserved_blocks=ssd[name], ssd_limit_blocks=ssd[name])
            for name in tenants
        }

    def _walls(self, capacity: int, reserved_bytes: Mapping[str, int | None]) -> dict[str, int]:
        reserved = {
            name: min(capacity, self.blocks_of(size)) for name, size in reserved_bytes.items() if size is not None
        }
        others = len(reserved_bytes) - len(reserved)
        part = (capacity - sum(reserved.values())) // others if others else 0
        return {name: reserved.get(name, part) for name in reserved_bytes}


def rounded_up(size_bytes: int) -> int:
    """What so many bytes take in a node."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
