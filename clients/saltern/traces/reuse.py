"""Hit rates of LRU caches of every size at once: how far back each block was last used, in one pass over a trace.

A block is in an LRU cache of C blocks if it is among the C that were used last: its *stack distance* is at most C
(R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970). Distances are
counted as B. T. Bennett and V. J. Kruskal do ("LRU stack processing", IBM Journal of R&D 19(4), 1975): one bit for each
use, which stands while it is its block's last, and partial sums over words of bits (P. M. Fenwick, 1994).

Uses and hits are those of :mod:`saltern.traces.hit_rates`: a request hits its longest cached prefix, so its block i is
hit in caches that hold blocks 0 to i, and then it uses all its blocks, tail first. The blocks that one request used are
a *run* of bits; whoever shares a prefix shares a run, so a run costs what a block would.

A trace whose blocks do not fit into memory is sampled by block (C. Waldspurger et al., "Efficient MRC construction with
SHARDS", FAST'15): of a share R of all blocks, chosen by a hash, distances are counted and divided by R.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from saltern.errors import InvalidArgumentError
from saltern.traces.request import Identity, Trace, TraceRequest

#: Uses in one word of bits.
_WORD_BITS: Final = 1024
_NEVER: Final = -1
#: Fibonacci hashing: the upper bits of a product decide which blocks are sampled.
_FACTOR: Final = 0x9E3779B97F4A7C15
_HASH_RANGE: Final = 2**64
#: (position of its first block in the prompt, use of that block, blocks): each was used just before the one before it.
_Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Prompt tokens that an LRU cache hits, for each number of blocks that it may hold.

    Attributes:
        requests, input_tokens, accesses: of the traffic, whether sampled or not.
        unique_blocks: that all of it needs; an estimate where blocks were sampled.
        sampled: share of the blocks that was looked at; 1 for all, and then the curve is exact.
        hits: prompt tokens hit, at index d by a cache of ``d / sampled`` blocks; never falling.
    """

    requests: int
    input_tokens: int
    accesses: int
    unique_blocks: int
    sampled: float
    hits: array[float]

    def hit_tokens(self, capacity_blocks: int) -> float:
        return self.hits[min(int(capacity_blocks * self.sampled), len(self.hits) - 1)]

    def hit_rate(self, capacity_blocks: int) -> float:
        """Hit tokens over prompt tokens; 0 where there are none."""
        return self.hit_tokens(capacity_blocks) / self.input_tokens if self.input_tokens else 0.0

    @property
    def infinite_hit_rate(self) -> float:
        """Of a cache that holds everything: no size does better."""
        return self.hits[-1] / self.input_tokens if self.input_tokens else 0.0

    def capacity_for(self, hit_tokens: float) -> int | None:
        """The fewest blocks that hit so many tokens; None where no cache does."""
        at = bisect_left(self.hits, hit_tokens)
        return None if at == len(self.hits) else self._blocks(at)

    def _blocks(self, at: int) -> int:
        return -int(-at // self.sampled)


class StackDistances:
    """Counts tokens hit by stack distance, request by request.

    Args:
        block_tokens: of a whole block.
        sampled: share of the blocks that :meth:`use` looks at.
    """

    def __init__(self, block_tokens: int, sampled: float = 1.0) -> None:
        self._block_tokens, self._sampled = block_tokens, sampled
        self._last_use: dict[str, dict[int, int]] = {}
        self._uses = 1  # so that no use stands just above _NEVER
        self._live = 0  # distinct blocks: as many bits stand
        self._words: list[int] = []
        self._sums = [0]  # Fenwick tree over the words' counts of bits, from 1 on
        #: What tokens hit change by from one distance to the next, and what that changes by: a run is three numbers.
        self._changes: Counter[int] = Counter()
        self._requests = self._input_tokens = self._accesses = self._block_tokens_seen = self._sampled_tokens = 0

    def use(self, request: TraceRequest) -> None:
        """Look up a prompt's blocks, then use all of them, tail first."""
        blocks: Sequence[int] = request.block_ids
        tokens = min(request.input_tokens, len(blocks) * self._block_tokens)
        self._requests += 1
        self._input_tokens += request.input_tokens
        self._accesses += len(blocks)
        self._block_tokens_seen += tokens
        whole, rest_tokens = divmod(tokens, self._block_tokens) if blocks else (0, 0)
        if self._sampled < 1:
            partial = blocks[whole : whole + 1]
            blocks, seen = self._chosen(blocks[:whole]), self._chosen(blocks[whole:])
            whole = len(blocks)
            rest_tokens = rest_tokens if partial and seen[:1] == list(partial) else 0
            blocks += seen
        if len(set(blocks)) < len(blocks):  # an id names all before it, so only its first place can be true
            blocks = list(dict.fromkeys(blocks))
        if not blocks:
            return
        self._sampled_tokens += whole * self._block_tokens + rest_tokens
        runs = self._take_runs(self._last_use.setdefault(request.tenant, {}), blocks)
        self._count_hits(runs, whole, rest_tokens)
        self._fill(len(blocks))
        for _, newest, length in runs:
            self._clear(newest - length + 1, length)

    def curve(self) -> HitCurve:
        """What caches of every size hit of all that was used."""
        scale = 1 / self._sampled
        # SHARDS-adj: tokens that a sample has too many or too few of are those of hot blocks, at the least distances.
        missing_tokens = self._block_tokens_seen - self._sampled_tokens * scale if self._sampled < 1 else 0.0
        hits = array("d", [0.0])
        found_tokens = step_tokens = 0
        for distance in range(1, self._live + 1):
            step_tokens += self._changes.get(distance, 0)
            found_tokens += step_tokens
            hits.append(min(max(hits[-1], found_tokens * scale + missing_tokens), self._input_tokens))
        return HitCurve(
            requests=self._requests,
            input_tokens=self._input_tokens,
            accesses=self._accesses,
            unique_blocks=round(self._live * scale),
            sampled=self._sampled,
            hits=hits,
        )

    # ---- one request

    def _chosen(self, blocks: Sequence[int]) -> list[int]:
        limit = self._sampled * _HASH_RANGE
        return [block for block in blocks if block * _FACTOR % _HASH_RANGE < limit]

    def _take_runs(self, last_use: dict[int, int], blocks: Sequence[int]) -> list[_Run]:
        """Where known blocks were used last, as runs, head first; and note that they are used now."""
        runs: list[_Run] = []
        find = last_use.get
        use = self._uses + len(blocks)
        start, newest, expected = 0, _NEVER, _NEVER
        for at, block in enumerate(blocks):
            use -= 1
            last = find(block, _NEVER)
            last_use[block] = use
            if last == expected:
                expected = last - 1 if last > 0 else _NEVER
                continue
            if newest != _NEVER:
                runs.append((start, newest, at - start))
            start, newest = at, last
            expected = last - 1 if last > 0 else _NEVER
        if newest != _NEVER:
            runs.append((start, newest, len(blocks) - start))
        return runs

    def _count_hits(self, runs: Sequence[_Run], whole: int, rest_tokens: int) -> None:
        """Count tokens of the prefix that is known, each at the least size of a cache that holds it and all before."""
        block_tokens = self._block_tokens
        reached = deepest = 0
        for start, newest, length in runs:
            if start != reached:
                return  # the block before was never used: no cache has it
            reached += length
            nearest = self._live_from(newest)
            behind = min(length, max(0, deepest + 1 - nearest))
            if behind:  # used later than what is before them: never so where ids name all before them
                tokens = max(0, min(whole, start + behind) - start) * block_tokens
                self._step(deepest, 1, tokens + (rest_tokens if start <= whole < start + behind else 0))
            self._step(nearest + behind, min(whole, reached) - start - behind, block_tokens)
            if start + behind <= whole < reached:
                self._step(nearest + whole - start, 1, rest_tokens)
            deepest = max(deepest, nearest + length - 1)

    def _step(self, distance: int, count: int, tokens: int) -> None:
        """Hit ``tokens`` more at each of ``count`` distances."""
        if count > 0 and tokens:
            self._changes[distance] += tokens
            self._changes[distance + count] -= tokens

    # ---- which uses are the last of their blocks

    def _live_from(self, use: int) -> int:
        """Blocks that were used last in this use or later."""
        word, bit = divmod(use, _WORD_BITS)
        return self._live - self._sum(word) - (self._words[word] & ((1 << bit) - 1)).bit_count()

    def _fill(self, count: int) -> None:
        """The next ``count`` uses are the last of their blocks."""
        end = self._uses + count
        while len(self._words) * _WORD_BITS < end:
            self._append_word()
        self._change(self._uses, count, sign=1)
        self._uses = end

    def _clear(self, use: int, count: int) -> None:
        """These uses are the last of their blocks no more."""
        self._change(use, count, sign=-1)

    def _change(self, use: int, count: int, *, sign: int) -> None:
        self._live += sign * count
        while count:
            word, bit = divmod(use, _WORD_BITS)
            part = min(count, _WORD_BITS - bit)
            self._words[word] ^= ((1 << part) - 1) << bit
            at = word + 1
            while at < len(self._sums):
                self._sums[at] += sign * part
                at += at & -at
            use += part
            count -= part

    def _append_word(self) -> None:
        self._words.append(0)
        at = len(self._words)
        self._sums.append(self._sum(at - 1) - self._sum(at - (at & -at)))

    def _sum(self, words: int) -> int:
        """Bits in the first so many words."""
        found = 0
        while words:
            found += self._sums[words]
            words &= words - 1
        return found


@dataclass(frozen=True, slots=True)
class ReuseCurves:
    """Of all tenants in one cache, and of each by itself, by name."""

    all: HitCurve
    tenants: dict[str, HitCurve]


def hit_curves(trace: Trace, *, sampled: float = 1.0) -> ReuseCurves:
    """Read a trace once; its memory is about 150 bytes for each distinct block, and twice that with several tenants.

    Args:
        sampled: share of the blocks to look at, above 0; 1 for all of them.

    Raises:
        InvalidArgumentError: the trace has no prefix identity, or is damaged, or the share is none.
    """
    if trace.identity is Identity.NONE or not trace.block_tokens:
        raise InvalidArgumentError(
            f"trace {trace.name!r} has no prefix identity, so no hit rate",
            reason="TRACE_WITHOUT_IDENTITY",
            hint="use a trace with hash ids or texts, or synthesise ids and say so",
        )
    if not 0 < sampled <= 1:
        raise InvalidArgumentError(
            f"cannot sample {sampled:g} of the blocks", reason="INVALID_SAMPLE", hint="choose a share above 0, up to 1"
        )
    together = StackDistances(trace.block_tokens, sampled)
    alone: dict[str, StackDistances] = {}
    for request in trace:
        together.use(request)
        by_itself = alone.get(request.tenant)
        if by_itself is None:
            by_itself = alone[request.tenant] = StackDistances(trace.block_tokens, sampled)
        by_itself.use(request)
    return ReuseCurves(together.curve(), {name: alone[name].curve() for name in sorted(alone)})
