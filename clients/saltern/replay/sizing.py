"""Machines for so many blocks of cache: how many nodes, what each holds on which tier, and what that costs an hour.

DRAM holds what is used soonest again, SSD the rest: as little DRAM as lets the devices keep up with what is read from
them, since a byte of DRAM costs many of SSD. A node is added where memory, device or network would have too much to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from saltern.replay.capacity import Divider, Division
from saltern.replay.cost import store_usd_per_hour
from saltern.replay.room import rounded_up
from saltern.replay.setup import ReplaySetup, TenantQuota
from saltern.traces.reuse import HitCurve

#: What may be used on the average of what a link or a device can carry: traffic comes in bursts.
BUSY_MAX: Final = 0.5
#: Shares of the blocks that may be in DRAM where there is SSD below it.
_DRAM_SHARES: Final = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
_SIZE_STEPS: Final = 32
_SIZE_STEP_MIN_BYTES: Final = 2**20
_NODES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """What sizes must carry.

    Attributes:
        together: the curve of all tenants in one cache.
        recorded_s: length of the traffic.
        block_bytes: of keys and values of one block.
    """

    together: HitCurve
    divider: Divider
    recorded_s: float
    block_tokens: int
    block_bytes: int

    def hit_blocks(self, blocks: int) -> float:
        return self.together.hit_tokens(blocks) / self.block_tokens

    def bytes_per_s(self, blocks: float) -> float:
        return blocks * self.block_bytes / self.recorded_s if self.recorded_s else 0.0


@dataclass(frozen=True, slots=True)
class Sizing:
    """A division on machines.

    Attributes:
        setup: nodes, their memory and SSD, and reservations, ready for a replay.
        dram, ssd: blocks of each tenant.
        reason: what the number of nodes follows from.
    """

    setup: ReplaySetup
    dram: Division
    ssd: Division
    reason: str

    @property
    def blocks(self) -> int:
        return sum(self.dram.values()) + sum(self.ssd.values())

    @property
    def usd_per_hour(self) -> float:
        return store_usd_per_hour(self.setup)


def size(base: ReplaySetup, traffic: Traffic, division: Mapping[str, int]) -> Sizing:
    """Machines for a division.

    Args:
        base: with the most memory and SSD that one node may have.
    """
    total = max(1, sum(division.values()))
    if not base.node_ssd_bytes:
        return _sized(base, traffic, division, 1.0)
    shares = [share for share in _DRAM_SHARES if share * total >= 1] or [1.0]
    found = [_sized(base, traffic, division, share) for share in shares]
    return min(found, key=lambda one: (one.setup.nodes > _nodes_for_space(base, traffic, one), one.usd_per_hour))


def _sized(base: ReplaySetup, traffic: Traffic, division: Mapping[str, int], dram_share: float) -> Sizing:
    dram = {tenant: math.ceil(blocks * dram_share) for tenant, blocks in division.items()}
    ssd = {tenant: blocks - dram[tenant] for tenant, blocks in division.items()}
    total_dram, total_ssd = max(1, sum(dram.values())), sum(ssd.values())
    needs = _nodes_needed(base, traffic, total_dram, total_ssd)
    reason, needed = max(needs.items(), key=lambda one: one[1])
    nodes = min(_NODES_MAX, max(1, math.ceil(needed)))
    extent_bytes = rounded_up(traffic.block_bytes)
    node_bytes = round_size(math.ceil(total_dram / nodes) * extent_bytes)
    node_ssd_bytes = round_size(math.ceil(total_ssd / nodes) * extent_bytes) if total_ssd else 0
    quotas = {
        tenant: TenantQuota(
            reserved_bytes=dram[tenant] * extent_bytes, ssd_reserved_bytes=ssd[tenant] * extent_bytes or None
        )
        for tenant in division
    }
    setup = msgspec.structs.replace(
        base, nodes=nodes, node_bytes=node_bytes, node_ssd_bytes=node_ssd_bytes, quotas=quotas
    )
    return Sizing(setup, dram, ssd, reason)


def _nodes_needed(base: ReplaySetup, traffic: Traffic, dram_blocks: int, ssd_blocks: int) -> dict[str, float]:
    """By what asks for them; whole nodes are the next integer."""
    hardware = base.hardware
    extent_bytes = rounded_up(traffic.block_bytes)
    hit = traffic.hit_blocks(dram_blocks + ssd_blocks)
    missed = traffic.together.accesses - hit
    needs = {
        "memory": dram_blocks * extent_bytes / base.node_bytes,
        "network, reads": traffic.bytes_per_s(hit) / (BUSY_MAX * hardware.link_bytes_per_s),
        "network, writes": traffic.bytes_per_s(missed) / (BUSY_MAX * hardware.link_bytes_per_s),
    }
    if ssd_blocks:
        from_ssd = hit - traffic.hit_blocks(dram_blocks)
        needs |= {
            "SSD": ssd_blocks * extent_bytes / base.node_ssd_bytes,
            "SSD, reads": traffic.bytes_per_s(from_ssd) / (BUSY_MAX * hardware.ssd_read_bytes_per_s),
            "SSD, writes": traffic.bytes_per_s(missed) / (BUSY_MAX * hardware.ssd_write_bytes_per_s),
        }
    return needs


def _nodes_for_space(base: ReplaySetup, traffic: Traffic, sizing: Sizing) -> int:
    """Nodes that it takes whatever is read from SSD."""
    needs = _nodes_needed(base, traffic, max(1, sum(sizing.dram.values())), sum(sizing.ssd.values()))
    needs.pop("SSD, reads", None)
    return max(1, math.ceil(max(needs.values())))


def round_size(size_bytes: int) -> int:
    """The next size that one would order: of steps of a thirty-second of its power of two, at least a MiB."""
    step_bytes = max(_SIZE_STEP_MIN_BYTES, (1 << max(0, size_bytes.bit_length() - 1)) // _SIZE_STEPS)
    return -(-size_bytes // step_bytes) * step_bytes
