"""Placement rules of ``placement_reference.py`` (it comes with the traces) over the simulated engine's own nodes.

Every block has one place, by rendezvous hashing of the block of its chain that the rule names; the hash is the
reference's. Nodes never evict; what is measured is where blocks lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Final

from dataplane.core.eviction import Eviction
from dataplane.core.reservations import Reservations
from dataplane.replay.fleet import ClientPlacement, Fleet, Located, Locator, Prompt
from dataplane.replay.node import CacheNode
from dataplane.replay.quotas import partitions_of, policy_of
from dataplane.replay.simulation import Simulation
from saltern.replay.arrivals import Arrivals
from saltern.replay.collector import Collector
from saltern.replay.profiles import HardwareProfile, ModelProfile
from saltern.replay.results import Column
from saltern.replay.setup import ReplaySetup, Slo, ToolDelays, Use
from saltern.traces.request import Trace, TraceRequest
from tenants.quota import Tier, TierQuota

INSTANT: Final = HardwareProfile(flops_per_s=math.inf, link_bytes_per_s=math.inf, latency_s=0.0)
MODEL: Final = ModelProfile(linear_flops_per_token=1.0, attention_flops_per_pair=0.0, kv_bytes_per_token=8)
#: As the reference: so many nodes, of which this one is lost; the rate is taken over so many requests after the half.
NODES: Final = 8
LOST: Final = 3
WINDOW_REQUESTS: Final = 300
_GRANULE_BYTES: Final = 4096

Anchor = Callable[[Sequence[int], int], int]


def by_segment(blocks: int) -> Anchor:
    return lambda ids, at: ids[at // blocks * blocks]


def by_head(blocks: int) -> Anchor:
    return lambda ids, at: ids[blocks] if len(ids) > blocks and at >= blocks else ids[0]


RULES: Final[dict[str, Anchor]] = {
    "root": lambda ids, _: ids[0],
    "block": lambda ids, at: ids[at],
    "seg16": by_segment(16),
    "seg64": by_segment(64),
    "head16": by_head(16),
    "head32": by_head(32),
    "head64": by_head(64),
}


@cache
def score(key: tuple[str, int], node: int) -> bytes:
    return blake2b(repr((key, node)).encode(), digest_size=8).digest()


class AnchoredPlacement:
    """Implements the simulated engine's Locator."""

    def __init__(self, nodes: Sequence[CacheNode], anchor: Anchor) -> None:
        self._nodes = dict(enumerate(nodes))
        self._anchor = anchor
        self._homes: dict[tuple[str, int], int] = {}

    def locate(self, prompt: Prompt, now_s: float) -> Located:
        ids, tenant = prompt.block_ids, str(prompt.partition.tenant)
        placed: dict[int, list[int]] = {}
        for at in range(len(ids)):
            placed.setdefault(self._home(tenant, self._anchor(ids, at)), []).append(at)
        there = bytearray(len(ids))
        for home, positions in placed.items():
            found = self._nodes[home].lookup(prompt.partition, [prompt.keys[at] for at in positions])[1]
            for at, is_there in zip(positions, found, strict=True):
                there[at] = is_there
        gap = there.find(0)
        prefix = len(there) if gap < 0 else gap
        return Located(
            prefix,
            [(self._nodes[home], [at for at in positions if at < prefix]) for home, positions in placed.items()],
            [(self._nodes[home], [at for at in positions if at >= prefix]) for home, positions in placed.items()],
        )

    def lose(self, node: CacheNode) -> None:
        self._nodes = {number: kept for number, kept in self._nodes.items() if kept is not node}
        self._homes.clear()

    def _home(self, tenant: str, block: int) -> int:
        key = tenant, block
        if key not in self._homes:
            self._homes[key] = max(self._nodes, key=lambda node: score(key, node))
        return self._homes[key]


def hit_rate(
    trace: Trace, make: Callable[[Sequence[CacheNode]], Locator], *, loses: bool, capacity_blocks: int = 1_000_000
) -> float:
    """Token hit rate over the window after the half, with a node lost at the half or not."""
    requests = sum(1 for _ in trace)
    half = requests // 2
    quotas = {name: {Tier.DRAM: TierQuota(0, capacity_blocks * _GRANULE_BYTES)} for name in trace.tenants}
    nodes = [
        CacheNode(
            f"node-{number}",
            capacity_blocks,
            policy_of(quotas),
            eviction=Eviction.LRU,
            reservations=Reservations.STRICT,
            link_bytes_per_s=math.inf,
        )
        for number in range(NODES)
    ]
    fleet = Fleet(nodes, make(nodes))
    setup = ReplaySetup(model=MODEL, hardware=INSTANT, nodes=NODES, node_bytes=1, use=Use.CHAIN)
    simulation = Simulation(
        setup,
        trace.block_tokens,
        fleet=fleet,
        partitions=partitions_of(trace.tenants),
        collector=Collector(Column.NODE_LOST, Slo(), dict),
        failures=[(half, lambda _: fleet.lose(LOST))] if loses else [],
    )
    served = hit_tokens = tokens = 0

    def count(request: TraceRequest, blocks: int) -> None:
        nonlocal served, hit_tokens, tokens
        if half <= served < half + WINDOW_REQUESTS:
            hit_tokens += min(request.input_tokens, blocks * trace.block_tokens)
            tokens += request.input_tokens
        served += 1

    simulation.on_served = count
    simulation.run(Arrivals(trace, ToolDelays()))
    return hit_tokens / tokens


def client_hit_rate(trace: Trace, *, loses: bool) -> float:
    """The same under the rule of the SDK."""
    return hit_rate(trace, lambda nodes: ClientPlacement(nodes, trace.block_tokens), loses=loses)
