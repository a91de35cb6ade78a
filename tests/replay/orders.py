"""Hit rates of the real eviction orders, and of the best there could be: one tenant, blocks of one size.

    python -m tests.replay.orders TRACES_FOLDER TRACE [FRACTION,...] [ORDER,...]

The semantics are those of golden_hit_rates.json: a request first looks up its longest cached prefix (hit tokens =
min(prompt, blocks of the prefix)), then touches or inserts every block, tail first. Capacities are in blocks.
"""

from __future__ import annotations

import sys
from heapq import heappop, heappush
from pathlib import Path

from dataplane.core.entry import Entry
from dataplane.core.eviction import Eviction, new_order
from dataplane.core.extents import ArenaOffset
from dataplane.core.partition import Partition
from dataplane.core.tenant_cache import PartitionIndex, TenantCache
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tests.replay.traces import ReplayTrace, load

#: As in the core: entries of one batch are nanoseconds apart, batches are not.
_BATCH_NS = 1_000_000


def hit_rate(trace: ReplayTrace, keys: list[BlockKey], eviction: Eviction, capacity_blocks: int) -> float:
    """Hit tokens over prompt tokens, from an empty cache."""
    order = new_order(eviction)
    tenant = TenantId("t")
    index = PartitionIndex(Partition(tenant, NamespaceId("n"), "u", 1), TenantCache(tenant, order), 1, True)
    held: dict[int, Entry] = {}
    now_ns = hit_tokens = tokens = 0
    for request in trace.requests:
        prefix = next((n for n, block in enumerate(request.blocks) if block not in held), len(request.blocks))
        hit_tokens += min(request.tokens, prefix * trace.block_tokens)
        tokens += request.tokens
        now_ns += _BATCH_NS * len(request.blocks)
        for block in reversed(request.blocks):
            now_ns += 1
            entry = held.get(block)
            if entry is not None:
                entry.touched_ns = now_ns
                order.touch(entry)
                continue
            if len(held) >= capacity_blocks:
                victim = next(iter(order))
                order.evict(victim)
                del held[victim.offset]
            entry = held[block] = Entry(keys[block], index, ArenaOffset(block), 1, 1)
            entry.touched_ns = now_ns
            order.insert(entry)
    return hit_tokens / tokens


def best_hit_rate(trace: ReplayTrace, capacity_blocks: int) -> float:
    """Belady's MIN with bypass: what is used last leaves first; of a request's blocks the deepest goes first."""
    never = len(trace.requests)
    next_uses: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        next_uses.append([seen.get(block, never) for block in blocks])
        for block in blocks:
            seen[block] = number
    next_uses.reverse()

    held: dict[int, int] = {}  # block: request that uses it next
    farthest: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale where ``held`` says otherwise
    hit_tokens = tokens = 0
    for request, uses in zip(trace.requests, next_uses, strict=True):
        prefix = next((n for n, block in enumerate(request.blocks) if block not in held), len(request.blocks))
        hit_tokens += min(request.tokens, prefix * trace.block_tokens)
        tokens += request.tokens
        for depth in range(len(uses) - 1, -1, -1):
            block, use = request.blocks[depth], uses[depth]
            if block not in held and len(held) >= capacity_blocks:
                while held.get(farthest[0][2]) != -farthest[0][0]:
                    heappop(farthest)
                if use > -farthest[0][0]:
                    continue
                del held[heappop(farthest)[2]]
            held[block] = use
            heappush(farthest, (-use, -depth, block))
    return hit_tokens / tokens


def main(folder: str, name: str, fractions: str = "0.01,0.02,0.05,0.1,0.2,0.3,0.5", policies: str = "") -> None:
    trace = load(Path(folder), name)
    keys = trace.keys()
    for fraction in map(float, fractions.split(",")):
        capacity_blocks = int(trace.unique_blocks * fraction)
        for policy in policies.split(",") if policies else [*Eviction, "opt"]:
            if policy == "opt":
                rate = best_hit_rate(trace, capacity_blocks)
            else:
                rate = hit_rate(trace, keys, Eviction(policy), capacity_blocks)
            print(f"{name} {fraction:g} {capacity_blocks} {policy} {rate:.4f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
