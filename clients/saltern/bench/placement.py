"""Placement rules beside each other on a recorded trace: ``python -m saltern.bench.placement TRACE``.

Simulated, with caches that never evict: what is measured is where blocks lie and nothing else. After half of the
requests one node is lost, with its blocks, for good. Our own rule is the code that the client runs
(:mod:`saltern.placement`, :mod:`saltern.chain_plan`).

=============  ========================================================================================================
column         meaning
=============  ========================================================================================================
hit            token hit rate over the 300 requests after the half, nothing lost
after loss     the same after losing one node: mean over all nodes, and the worst of them
busiest/mean   blocks read from the busiest node, over the mean
fullest/mean   blocks on the fullest node, over the mean
copies         blocks stored over distinct blocks
nodes          nodes that one prompt asks, at once
=============  ========================================================================================================
"""

from __future__ import annotations

import argparse
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from saltern.chain_plan import Sighting, Source, copies_wanted, plan_reads, plan_writes
from saltern.grant import NodeEndpoint
from saltern.keys import BlockHash
from saltern.names import NamespaceId, TenantId
from saltern.placement import Pair, Placement, ReadLoad
from saltern.traces.hash_ids import BLOCK_TOKENS
from saltern.traces.load import load_trace
from saltern.traces.options import LoadOptions
from saltern.traces.request import TraceRequest

#: Requests after the loss over which the hit rate is taken.
WINDOW_REQUESTS: Final = 300
NODES: Final = 8
CLIENTS: Final = 8
_EPOCH: Final = 1
_NAMESPACE: Final = NamespaceId("trace")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one rule costs and gives on one trace; see the columns above."""

    hit: float
    after_loss_mean: float
    after_loss_worst: float
    busiest: float
    fullest: float
    copies: float
    nodes_asked: float

    def cells(self) -> list[str]:
        return [
            *(f"{value:.3f}" for value in (self.hit, self.after_loss_mean, self.after_loss_worst)),
            *(f"{value:.2f}" for value in (self.busiest, self.fullest, self.copies, self.nodes_asked)),
        ]


HEADINGS: Final = ["rule", "hit", "after loss", "worst", "busiest/mean", "fullest/mean", "copies", "nodes"]


class World(ABC):
    """Nodes that keep every block they are given, under one rule.

    Attributes:
        reads: blocks read from each node.
        asked: nodes asked, summed over prompts.
    """

    def __init__(self, nodes: int, block_tokens: int) -> None:
        self.reads = [0] * nodes
        self.asked = 0
        self._block_tokens = block_tokens
        self._alive = list(range(nodes))
        #: The nodes of every block, one bit each.
        self._where: dict[tuple[str, int], int] = {}
        self._placements: dict[str, Placement] = {}

    @abstractmethod
    def serve(self, request: TraceRequest) -> int:
        """Read a prompt's prefix, store the rest; returns how many blocks were there."""

    def lose(self, node: int) -> None:
        self._alive.remove(node)
        self._placements.clear()
        self._where = {block: held & ~(1 << node) for block, held in self._where.items()}

    def resident(self) -> list[int]:
        """Blocks on each node."""
        return [sum(held >> node & 1 for held in self._where.values()) for node in range(len(self.reads))]

    def copies(self) -> float:
        return sum(self.resident()) / len(self._where)

    def _placement(self, tenant: str) -> Placement:
        if tenant not in self._placements:
            nodes = [NodeEndpoint(str(node)) for node in self._alive]
            self._placements[tenant] = Placement(TenantId(tenant), _NAMESPACE, nodes, block_tokens=self._block_tokens)
        return self._placements[tenant]


class SingleWorld(World):
    """Every block has one place, by the hash of a block of its chain that ``anchor`` names.

    Args:
        anchor: from the ids of a chain and a position to the id whose hash decides.
        everywhere: blocks from the first one on that every node keeps besides.
    """

    def __init__(
        self, nodes: int, block_tokens: int, anchor: Callable[[Sequence[int], int], int], everywhere: int = 0
    ) -> None:
        super().__init__(nodes, block_tokens)
        self._anchor = anchor
        self._everywhere = everywhere
        self._homes: dict[tuple[str, int], int] = {}

    def lose(self, node: int) -> None:
        super().lose(node)
        self._homes.clear()

    def serve(self, request: TraceRequest) -> int:
        ids, tenant = request.block_ids, request.tenant
        homes = [self._home(tenant, self._anchor(ids, position)) for position in range(len(ids))]
        prefix = 0
        while prefix < len(ids) and self._where.get((tenant, ids[prefix]), 0) >> homes[prefix] & 1:
            self.reads[homes[prefix]] += 1
            prefix += 1
        self.asked += len(set(homes))
        every_node = sum(1 << node for node in self._alive)
        for position, (block, home) in enumerate(zip(ids, homes, strict=True)):
            held = every_node if position < self._everywhere else 1 << home
            self._where[tenant, block] = self._where.get((tenant, block), 0) | held
        return prefix

    def _home(self, tenant: str, block: int) -> int:
        home = self._homes.get((tenant, block))
        if home is None:
            home = self._homes[tenant, block] = int(self._placement(tenant).home_of(_hash(block)).node_id)
        return home


class PairWorld(World):
    """The rule of :mod:`saltern.placement`, by the functions that the client itself plans with.

    Args:
        clients: inference servers, each with a client of its own that knows only its own reads.
        sticky: chains with the same first block always come to the same client; otherwise requests go round.
    """

    def __init__(self, nodes: int, block_tokens: int, *, clients: int = CLIENTS, sticky: bool = False) -> None:
        super().__init__(nodes, block_tokens)
        self._loads = [ReadLoad() for _ in range(clients)]
        self._sticky = sticky
        self._requests = 0
        self._pairs: dict[tuple[str, bytes], Pair] = {}

    def lose(self, node: int) -> None:
        super().lose(node)
        self._pairs.clear()

    def serve(self, request: TraceRequest) -> int:
        ids, tenant = request.block_ids, request.tenant
        turn = zlib.crc32(f"{tenant} {ids[0]}".encode()) if self._sticky else self._requests
        load = self._loads[turn % len(self._loads)]
        self._requests += 1
        placement = self._placement(tenant)
        pair = self._pair(placement, tenant, ids)
        self.asked += len(pair.asked)

        held = [self._where.get((tenant, block), 0) for block in ids]
        sighting = Sighting(len(ids))
        for node in pair.asked:
            bit = int(node.node_id)
            sighting.found[Source(node.node_id, _EPOCH)] = bytearray(mask >> bit & 1 for mask in held)
        prefix = sighting.prefix
        for source, positions in plan_reads(sighting, range(prefix), load).items():
            load.note(source.node_id, len(positions))
            self.reads[int(source.node_id)] += len(positions)

        twice = prefix >= placement.head_blocks
        writable = [node.node_id for node in pair.writable]
        wanted = copies_wanted(sighting, _EPOCH, writable, twice=twice)
        to_write = [*wanted, *range(prefix, len(ids))]
        for node_id, positions in plan_writes(sighting, to_write, _EPOCH, writable, twice=twice).items():
            bit = 1 << int(node_id)
            for position in positions:
                block = tenant, ids[position]
                self._where[block] = self._where.get(block, 0) | bit
        return prefix

    def _pair(self, placement: Placement, tenant: str, ids: Sequence[int]) -> Pair:
        deep = ids[placement.head_blocks if len(ids) > placement.head_blocks else 0]
        pair = self._pairs.get((tenant, _hash(deep)))
        if pair is None:
            pair = placement.pair_of(placement.anchor_of([_hash(block) for block in ids]))
            self._pairs[tenant, _hash(deep)] = pair
        return pair


WorldMaker = Callable[[int, int], World]
OURS: Final = "pair (ours)"


def _by_head(depth: int) -> Callable[[Sequence[int], int], int]:
    """Blocks before ``depth`` by the first block, the others by the block at ``depth``."""
    return lambda ids, position: ids[depth] if position >= depth else ids[0]


def _by_tail(depth: int) -> Callable[[Sequence[int], int], int]:
    """All blocks by the block at ``depth``, where there is one."""
    return lambda ids, _: ids[depth] if len(ids) > depth else ids[0]


def _by_segment(blocks: int) -> Callable[[Sequence[int], int], int]:
    return lambda ids, position: ids[position // blocks * blocks]


#: What else could be done, for comparison: ``head16*`` keeps the first 16 blocks on every node.
RULES: Final[dict[str, WorldMaker]] = {
    "root": lambda nodes, tokens: SingleWorld(nodes, tokens, lambda ids, _: ids[0]),
    "block": lambda nodes, tokens: SingleWorld(nodes, tokens, lambda ids, position: ids[position]),
    **{f"seg{n}": lambda nodes, tokens, n=n: SingleWorld(nodes, tokens, _by_segment(n)) for n in (16, 64)},  # type: ignore[misc]
    **{f"head{n}": lambda nodes, tokens, n=n: SingleWorld(nodes, tokens, _by_head(n)) for n in (16, 32, 64)},  # type: ignore[misc]
    **{f"head{n}*": lambda nodes, tokens, n=n: SingleWorld(nodes, tokens, _by_tail(n), n) for n in (16, 32, 64)},  # type: ignore[misc]
    OURS: PairWorld,
}


def hit_rate(world: World, requests: Sequence[TraceRequest], block_tokens: int, lost: int | None = None) -> float:
    """Serve a trace, losing a node after its half; returns the token hit rate over the window behind that."""
    half = len(requests) // 2
    hit_tokens = total_tokens = 0
    for number, request in enumerate(requests):
        if number == half and lost is not None:
            world.lose(lost)
        prefix = world.serve(request)
        if half <= number < half + WINDOW_REQUESTS:
            hit_tokens += min(request.input_tokens, prefix * block_tokens)
            total_tokens += request.input_tokens
        if lost is not None and number >= half + WINDOW_REQUESTS:
            break
    return hit_tokens / total_tokens


def measure(
    make: WorldMaker,
    requests: Sequence[TraceRequest],
    *,
    nodes: int = NODES,
    block_tokens: int = BLOCK_TOKENS,
    lost: Iterable[int] | None = None,
) -> Figures:
    """All figures of one rule: one run with every node, and one for each node that is lost (default: each in turn)."""
    whole = make(nodes, block_tokens)
    hit = hit_rate(whole, requests, block_tokens)
    losses = [
        hit_rate(make(nodes, block_tokens), requests, block_tokens, node)
        for node in (range(nodes) if lost is None else lost)
    ]
    resident = whole.resident()
    return Figures(
        hit=hit,
        after_loss_mean=sum(losses) / len(losses) if losses else hit,
        after_loss_worst=min(losses, default=hit),
        busiest=max(whole.reads) * nodes / max(1, sum(whole.reads)),
        fullest=max(resident) * nodes / sum(resident),
        copies=whole.copies(),
        nodes_asked=whole.asked / len(requests),
    )


def _hash(block: int) -> BlockHash:
    return BlockHash(block.to_bytes(8, "little"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m saltern.bench.placement", description="Compare placement rules.")
    parser.add_argument("trace", type=Path, help="a trace with prefix identity, see docs/replay.md")
    parser.add_argument("--nodes", type=int, nargs="+", default=[NODES], help="how many nodes (default: 8)")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS, help="tokens in one block (default: 512)")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="inference servers, for our rule (default: 8)")
    parser.add_argument("--sticky", action="store_true", help="each conversation always comes to the same server")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES), metavar="RULE")
    options = parser.parse_args(arguments)
    rules: dict[str, WorldMaker] = {**RULES, OURS: partial(PairWorld, clients=options.clients, sticky=options.sticky)}
    trace = load_trace(options.trace, LoadOptions(block_tokens=options.block_tokens))
    block_tokens = trace.block_tokens  # a file that states its own has the last word
    # A prompt without blocks has no place to lie in.
    requests = [request for request in trace if request.block_ids]
    for nodes in options.nodes:
        print(f"\n{options.trace.name}, {len(requests)} requests, {nodes} nodes\n")  # noqa: T201
        print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")  # noqa: T201
        for name in options.rules:
            figures = measure(rules[name], requests, nodes=nodes, block_tokens=block_tokens)
            print(f"| {' | '.join([name, *figures.cells()])} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
