"""All cache nodes of a replay, and where a prompt's blocks are looked for and put: the client's own rules over them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from dataplane.core.partition import Partition
from dataplane.replay.node import CacheNode, Counts
from saltern.chain_plan import Sighting, Source, copies_wanted, plan_reads, plan_writes
from saltern.errors import UnavailableError
from saltern.grant import NodeEndpoint
from saltern.keys import BlockKey
from saltern.names import TenantId
from saltern.placement import Pair, Placement, ReadLoad
from saltern.replay.collector import Evictions
from saltern.replay.naming import block_hash
from saltern.replay.results import NodeResult, SsdResult

_EPOCH: Final = 1
#: Pairs of chains that are remembered; beyond, all are worked out anew.
_PAIRS_MAX: Final = 500_000


class Prompt(NamedTuple):
    """Blocks of one prompt, head first, and who asks.

    Attributes:
        local_blocks: the first of them that the engine has itself, and does not ask for.
        load: what this engine's client has read from each node lately.
    """

    partition: Partition
    block_ids: Sequence[int]
    keys: list[BlockKey]
    local_blocks: int
    load: ReadLoad


class Located(NamedTuple):
    """What is where.

    Attributes:
        prefix: blocks from the first one on that can be read.
        reads, writes: positions for each node, ascending.
    """

    prefix: int
    reads: list[tuple[CacheNode, Sequence[int]]]
    writes: list[tuple[CacheNode, Sequence[int]]]


class Locator(Protocol):
    """A rule of placement."""

    def locate(self, prompt: Prompt, now_s: float) -> Located:
        """Find a prompt's blocks, and say where those that are missing belong."""

    def lose(self, node: CacheNode) -> None:
        """A node is gone for good."""


class SoleNode:
    """There is but one, which has everything."""

    def __init__(self, node: CacheNode) -> None:
        self._node: CacheNode | None = node

    def locate(self, prompt: Prompt, now_s: float) -> Located:
        node = self._node
        if node is None or node.away_until_s > now_s:
            return Located(0, [], [])
        prefix, _ = node.lookup(prompt.partition, prompt.keys)
        return Located(prefix, [(node, range(prompt.local_blocks, prefix))], [(node, range(prefix, len(prompt.keys)))])

    def lose(self, node: CacheNode) -> None:
        self._node = None


class ClientPlacement:
    """The rules of the SDK (:mod:`saltern.placement`, :mod:`saltern.chain_plan`), by the functions that it calls."""

    def __init__(self, nodes: Sequence[CacheNode], block_tokens: int) -> None:
        self._nodes = {node.node_id: node for node in nodes}
        self._block_tokens = block_tokens
        self._placements: dict[Partition, Placement] = {}
        self._pairs: dict[tuple[Partition, int], Pair] = {}

    def locate(self, prompt: Prompt, now_s: float) -> Located:
        try:
            placement = self._placement(prompt.partition)
        except UnavailableError:
            return Located(0, [], [])
        pair = self._pair(placement, prompt)
        sighting = Sighting(len(prompt.keys))
        answering = []
        for endpoint in pair.asked:
            node = self._nodes[endpoint.node_id]
            if node.away_until_s <= now_s:
                answering.append(endpoint.node_id)
                found = node.lookup(prompt.partition, prompt.keys)[1]
                sighting.found[Source(endpoint.node_id, _EPOCH)] = bytearray(found)
        prefix = sighting.prefix
        reads = plan_reads(sighting, range(prompt.local_blocks, prefix), prompt.load)
        for source, positions in reads.items():
            prompt.load.note(source.node_id, len(positions))
        writable = [endpoint.node_id for endpoint in pair.writable if endpoint.node_id in answering]
        twice = max(prefix, prompt.local_blocks) >= placement.head_blocks
        missing = [*copies_wanted(sighting, _EPOCH, writable, twice=twice), *range(prefix, len(prompt.keys))]
        writes = plan_writes(sighting, missing, _EPOCH, writable, twice=twice)
        return Located(
            prefix,
            [(self._nodes[source.node_id], positions) for source, positions in reads.items()],
            [(self._nodes[node_id], positions) for node_id, positions in writes.items()],
        )

    def lose(self, node: CacheNode) -> None:
        del self._nodes[node.node_id]
        self._placements.clear()
        self._pairs.clear()

    def _placement(self, partition: Partition) -> Placement:
        placement = self._placements.get(partition)
        if placement is None:
            nodes = [NodeEndpoint(node_id) for node_id in self._nodes]
            placement = Placement(partition.tenant, partition.namespace, nodes, block_tokens=self._block_tokens)
            self._placements[partition] = placement
        return placement

    def _pair(self, placement: Placement, prompt: Prompt) -> Pair:
        ids, head = prompt.block_ids, placement.head_blocks
        anchor = ids[head if len(ids) > head else 0]
        pair = self._pairs.get((prompt.partition, anchor))
        if pair is None:
            if len(self._pairs) > _PAIRS_MAX:
                self._pairs.clear()
            pair = placement.pair_of(placement.anchor_of(list(map(block_hash, ids))))
            self._pairs[prompt.partition, anchor] = pair
        return pair


class Fleet:
    """Every node, those that are gone included: their books stay.

    Attributes:
        locator: the rule of placement.
    """

    def __init__(self, nodes: Sequence[CacheNode], locator: Locator) -> None:
        self.nodes: Final = list(nodes)
        self.locator: Final = locator

    def begin(self) -> None:
        """Begin a column with what is there."""
        for node in self.nodes:
            node.begin()

    def lose(self, number: int) -> None:
        """A node and its blocks are gone for good."""
        node = self.nodes[number]
        self.locator.lose(node)
        node.lose_all()
        node.away_until_s = math.inf

    def restart(self, until_s: float, *, keeps: bool) -> None:
        """Every node is away until then, and has what it had, or only what is on SSD."""
        for node in self.nodes:
            node.away_until_s = until_s
            if not keeps:
                node.lose_memory()

    def occupancy_blocks(self) -> dict[TenantId, int]:
        held: Counter[TenantId] = Counter()
        for node in self.nodes:
            held.update(node.blocks_by_tenant())
        return dict(held)

    def evictions(self) -> dict[TenantId, Evictions]:
        """Of each tenant, over all nodes, since the column began."""
        counts: dict[TenantId, Counts] = {}
        takers: dict[TenantId, Counter[str]] = {}
        for node in self.nodes:
            for tenant, counted in node.counts().items():
                counts[tenant] = counted if tenant not in counts else counts[tenant] + counted
            for (owner, taker), count in node.taken.items():
                takers.setdefault(owner, Counter())[taker] += count
        if len(counts) == 1:  # nobody else is there
            takers = {tenant: Counter({tenant: count.evicted.total()}) for tenant, count in counts.items()}
        return {
            tenant: Evictions(count.evicted, takers.get(tenant, Counter()), count.refused)
            for tenant, count in counts.items()
        }

    def ssd_result(self, block_bytes: int, hit_tokens: int) -> SsdResult | None:
        """The SSD tier of all nodes since the column began; None where they have none."""
        found = SsdResult(hit_tokens=hit_tokens)
        ssds = [node.ssd for node in self.nodes if node.ssd is not None]
        dropped: Counter[str] = Counter()
        for ssd in ssds:
            found.read_bytes += ssd.out.moved_bytes
            found.read_s += ssd.out.busy_s
            found.written_s += ssd.into.busy_s
            found.written_bytes += ssd.into.moved_bytes
            found.resident_bytes += ssd.blocks() * block_bytes
            for counts in ssd.counts().values():
                found.evictions += counts.evicted
                dropped.update(counts.dropped)
        found.dropped_by_reason = {reason: count for reason, count in sorted(dropped.items()) if count}
        return found if ssds else None

    def results(self, block_bytes: int) -> dict[str, NodeResult]:
        return {node.node_id: node.result(block_bytes) for node in self.nodes}
