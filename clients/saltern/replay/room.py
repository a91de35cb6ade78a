"""Memory of a replay's nodes in blocks, and what each tenant may have of it on each node; the same for every engine.

A quota over all nodes is split evenly, as the control plane does among nodes that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the nodes, in blocks.

    Attributes:
        block_bytes: of keys and values of a whole block.
        node_blocks: that one node holds.
    """

    block_bytes: int
    node_blocks: int
    nodes: int

    @classmethod
    def of(cls, trace: Trace, setup: ReplaySetup) -> Room:
        """Of a trace without prefix identity there are no blocks.

        Raises:
            InvalidArgumentError: INVALID_REPLAY: a node holds not one, or all hold more than can be simulated.
        """
        block_bytes = trace.block_tokens * setup.model.kv_bytes_per_token
        node_blocks = setup.node_bytes // rounded_up(block_bytes) if block_bytes else 0
        if block_bytes and not (node_blocks and node_blocks * setup.nodes <= _BLOCKS_MAX):
            raise InvalidArgumentError(
                f"cannot replay with nodes of {node_blocks} blocks of {block_bytes} bytes",
                reason="INVALID_REPLAY",
                hint=f"choose memory for at least one block on each node and at most {_BLOCKS_MAX} on all; here each "
                f"takes about {_INDEX_BYTES} bytes",
            )
        return cls(block_bytes, node_blocks, setup.nodes)

    def blocks_of(self, size_bytes: int) -> int:
        """Of a quota over all nodes, on each."""
        return min(self.node_blocks, size_bytes // self.nodes // rounded_up(self.block_bytes))

    def shared(self, setup: ReplaySetup, tenants: Sequence[str]) -> dict[str, Share]:
        """What was set up: reservations and limits; without a limit, all there is."""
        shares = {}
        for name in tenants:
            quota = setup.quotas.get(name, _NO_QUOTA)
            limit = self.node_blocks if quota.limit_bytes is None else self.blocks_of(quota.limit_bytes)
            reserved = self.blocks_of(quota.reserved_bytes or 0)
            shares[name] = Share(reserved, max(reserved, limit), quota.weight)
        return shares

    def walls(self, setup: ReplaySetup, tenants: Sequence[str]) -> dict[str, Share]:
        """Each tenant by itself: its reservation; those without one have equal parts of what nobody has reserved."""
        reserved = {
            name: self.blocks_of(quota.reserved_bytes)
            for name in tenants
            if (quota := setup.quotas.get(name, _NO_QUOTA)).reserved_bytes is not None
        }
        others = len(tenants) - len(reserved)
        part = (self.node_blocks - sum(reserved.values())) // others if others else 0
        walls = {name: reserved.get(name, part) for name in tenants}
        return {name: Share(blocks, blocks) for name, blocks in walls.items()}


def rounded_up(size_bytes: int) -> int:
    """What so many bytes take in a node."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
