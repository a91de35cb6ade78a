"""Hit rates of one cache of blocks over a trace: FIFO, LRU, and the best there can be.

A request first looks up its longest cached prefix; its hit tokens are ``min(prompt, blocks of the prefix)``. Then it
touches or inserts every one of its blocks, **tail first**, so that heads are the most recent. Capacities are in blocks
of one size; the rate is hit tokens over prompt tokens of the whole trace, from an empty cache. Tenants share the cache
and no block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Final

from saltern.errors import InvalidArgumentError
from saltern.traces.request import Identity, Trace

#: Entries of OPT's heap that may be out of date before those that are have to go.
_STALE_MIN: Final = 4096


class Policy(StrEnum):
    """Which block leaves a full cache."""

    FIFO = "fifo"  #: the one inserted first; a hit changes nothing
    LRU = "lru"  #: the one touched longest ago
    OPT = "opt"  #: Belady's MIN with bypass: the one needed last, and a block needed later than all is not stored


@dataclass(frozen=True, slots=True)
class Accesses:
    """A trace as numbers: 4 bytes for each block of each request.

    Attributes:
        input_tokens: of each request.
        ends: where each request's blocks end in ``blocks``.
        blocks: block numbers from 0 to ``unique_blocks`` - 1, head first.
    """

    block_tokens: int
    unique_blocks: int
    input_tokens: array[int]
    ends: array[int]
    blocks: array[int]

    def requests(self) -> Iterator[tuple[int, array[int]]]:
        """(prompt tokens, blocks) of each request."""
        start = 0
        for tokens, end in zip(self.input_tokens, self.ends, strict=True):
            yield tokens, self.blocks[start:end]
            start = end


def accesses_of(trace: Trace) -> Accesses:
    """Read a trace once and number its blocks; raises as :func:`bounded_accesses_of`."""
    accesses = bounded_accesses_of(trace, 2**62)
    assert accesses is not None
    return accesses


def bounded_accesses_of(trace: Trace, blocks_max: int) -> Accesses | None:
    """Read a trace once and number its blocks; None if its prompts have more than ``blocks_max`` of them.

    Raises:
        InvalidArgumentError: the trace has no prefix identity, or is damaged.
    """
    if trace.identity is Identity.NONE:
        raise InvalidArgumentError(
            f"trace {trace.name!r} has no prefix identity, so no hit rate",
            reason="TRACE_WITHOUT_IDENTITY",
            hint="use a trace with hash ids or texts, or synthesise ids and say so",
        )
    numbers: dict[str, dict[int, int]] = {}
    unique = 0
    input_tokens, ends, blocks = array("q"), array("q"), array("I")
    for request in trace:
        known = numbers.setdefault(request.tenant, {})
        for block in request.block_ids:
            number = known.get(block)
            if number is None:
                number = known[block] = unique
                unique += 1
            blocks.append(number)
        if len(blocks) > blocks_max:
            return None
        input_tokens.append(request.input_tokens)
        ends.append(len(blocks))
    return Accesses(trace.block_tokens, unique, input_tokens, ends, blocks)


def hit_rate(accesses: Accesses, policy: Policy, capacity_blocks: int) -> float:
    """Hit tokens over prompt tokens; 0 for a trace of no tokens, or a cache of no blocks."""
    total = sum(accesses.input_tokens)
    if not total or capacity_blocks < 1:
        return 0.0
    if policy is Policy.OPT and capacity_blocks < accesses.unique_blocks:  # else nobody has to go, by any policy
        return _best_hit_tokens(accesses, capacity_blocks) / total
    return _queue_hit_tokens(accesses, capacity_blocks, refresh=policy is Policy.LRU) / total


def infinite_hit_rate(accesses: Accesses) -> float:
    """The hit rate of a cache that holds everything."""
    return hit_rate(accesses, Policy.FIFO, max(1, accesses.unique_blocks))


def _queue_hit_tokens(accesses: Accesses, capacity_blocks: int, *, refresh: bool) -> int:
    queue: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for tokens, blocks in accesses.requests():
        hit_tokens += min(tokens, _prefix(blocks, queue) * accesses.block_tokens)
        for block in reversed(blocks):
            if block in queue:
                if refresh:
                    queue.move_to_end(block)
                continue
            if len(queue) >= capacity_blocks:
                queue.popitem(last=False)
            queue[block] = None
    return hit_tokens


def _best_hit_tokens(accesses: Accesses, capacity_blocks: int) -> int:
    next_uses = _next_uses(accesses)
    held: dict[int, int] = {}  # block: request that needs it next
    latest: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale where ``held`` says otherwise
    hit_tokens = start = 0
    for tokens, blocks in accesses.requests():
        hit_tokens += min(tokens, _prefix(blocks, held) * accesses.block_tokens)
        for depth in range(len(blocks) - 1, -1, -1):
            block, use = blocks[depth], next_uses[start + depth]
            if block not in held and len(held) >= capacity_blocks:
                while held.get(latest[0][2]) != -latest[0][0]:
                    heappop(latest)
                if use > -latest[0][0]:
                    continue
                del held[heappop(latest)[2]]
            held[block] = use
            heappush(latest, (-use, -depth, block))
        if len(latest) > 2 * len(held) + _STALE_MIN:  # else it would grow by every hit of the trace
            latest = [entry for entry in latest if held.get(entry[2]) == -entry[0]]
            heapify(latest)
        start += len(blocks)
    return hit_tokens


def _next_uses(accesses: Accesses) -> array[int]:
    """For each access the request that needs the block next; the number of requests where none does."""
    never: Final = len(accesses.ends)
    uses = array("I", [never]) * len(accesses.blocks)
    upcoming = array("I", [never]) * accesses.unique_blocks
    end = len(accesses.blocks)
    for number in range(never - 1, -1, -1):
        start = accesses.ends[number - 1] if number else 0
        for position in range(start, end):
            uses[position] = upcoming[accesses.blocks[position]]
        for position in range(start, end):
            upcoming[accesses.blocks[position]] = number
        end = start
    return uses


def _prefix(blocks: Sequence[int], held: dict[int, int] | OrderedDict[int, None]) -> int:
    return next((number for number, block in enumerate(blocks) if block not in held), len(blocks))
