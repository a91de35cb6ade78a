"""What is in a trace, counted in one pass: sizes, sharing, and when requests arrive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from saltern.traces.request import Trace, TraceRequest

#: Distinct blocks that are told apart; beyond, their number and the hit rate are left open, so that memory is bounded.
UNIQUE_BLOCKS_MAX: Final = 20_000_000
_CHART_BINS: Final = 60
_FIRST_BIN_S: Final = 0.001


@dataclass(slots=True)
class Counts:
    """Of one tenant, or of all.

    Attributes:
        hit_tokens: prompt tokens in each request's longest prefix of blocks seen before, as by a cache without end.
    """

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    blocks: int = 0
    unique_blocks: int = 0
    hit_tokens: int = 0

    @property
    def infinite_hit_rate(self) -> float:
        """Token-weighted; 0 where there are no tokens."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


class ArrivalChart:
    """Requests over time in at most 60 bins, which double in width whenever time runs past the last."""

    def __init__(self) -> None:
        self.bin_s = _FIRST_BIN_S
        self._bins = [0] * _CHART_BINS

    def add(self, at_s: float) -> None:
        while at_s >= self.bin_s * _CHART_BINS:
            halves = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [a + b for a, b in halves] + [0] * (_CHART_BINS // 2)
            self.bin_s *= 2
        self._bins[int(at_s / self.bin_s)] += 1

    def bins(self) -> list[int]:
        """Requests in each bin, up to the last that has any."""
        last = max((number for number, count in enumerate(self._bins) if count), default=-1)
        return self._bins[: last + 1]


@dataclass(slots=True)
class Summary:
    """Filled by :meth:`add`; at any time it says what was read until then.

    Attributes:
        complete: the trace was read to its end.
        countable: blocks could all be told apart; otherwise unique blocks and hit rates mean nothing.
        duration_s: arrival of the last request.
        sessions, subagents: distinct ones; sub-agents are no sessions.
        without_blocks: requests with a prompt and no block ids.
    """

    trace: Trace
    total: Counts = field(default_factory=Counts)
    tenants: dict[str, Counts] = field(default_factory=dict)
    arrivals: ArrivalChart = field(default_factory=ArrivalChart)
    complete: bool = False
    countable: bool = True
    duration_s: float = 0.0
    without_blocks: int = 0
    _seen: dict[str, set[int]] = field(default_factory=dict)
    _sessions: set[tuple[str, str]] = field(default_factory=set)
    _subagents: set[tuple[str, str]] = field(default_factory=set)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def subagents(self) -> int:
        return len(self._subagents)

    def read(self) -> None:
        """Count all requests of the trace; raises as iterating it does, and what was counted stays."""
        self.add(self.trace)
        self.complete = True

    def add(self, requests: Iterable[TraceRequest]) -> None:
        for request in requests:
            new, hit_tokens = self._see_blocks(request)
            for counts in (self.total, self.tenants.setdefault(request.tenant, Counts())):
                counts.requests += 1
                counts.input_tokens += request.input_tokens
                counts.output_tokens += request.output_tokens
                counts.blocks += len(request.block_ids)
                counts.unique_blocks += new
                counts.hit_tokens += hit_tokens
            self.without_blocks += bool(request.input_tokens and not request.block_ids)
            self.duration_s = request.arrival_s
            self.arrivals.add(request.arrival_s)
            if request.session:
                known = self._subagents if request.parent_session else self._sessions
                known.add((request.tenant, request.session))

    def _see_blocks(self, request: TraceRequest) -> tuple[int, int]:
        """(blocks not seen before, tokens of the prefix that was)."""
        if not self.countable:
            return 0, 0
        seen = self._seen.setdefault(request.tenant, set())
        ids = request.block_ids
        prefix = next((number for number, block in enumerate(ids) if block not in seen), len(ids))
        before = len(seen)
        seen.update(ids)
        if self.total.unique_blocks + len(seen) - before > UNIQUE_BLOCKS_MAX:
            self.countable = False
            self._seen.clear()
        return len(seen) - before, min(request.input_tokens, prefix * self.trace.block_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON has it; figures that could not be counted are null."""
        trace = self.trace
        return {
            "name": trace.name,
            "format": trace.provenance.format,
            "sha256": trace.sha256,
            "complete": self.complete,
            "arrival": str(trace.arrival),
            "identity": str(trace.identity),
            "identityNote": trace.identity_note,
            "notes": list(trace.notes),
            "blockTokens": trace.block_tokens,
            "durationS": self.duration_s,
            "sessions": self.sessions,
            "subagents": self.subagents,
            **self._counts(self.total),
            "requestsWithoutBlocks": self.without_blocks,
            "tenants": {name: self._counts(counts) for name, counts in self.tenants.items() if name},
            "arrivals": {"binS": self.arrivals.bin_s, "requests": self.arrivals.bins()},
            "provenance": trace.provenance.to_dict(),
        }

    def _counts(self, counts: Counts) -> dict[str, Any]:
        told = bool(self.trace.block_tokens) and self.countable
        return {
            "requests": counts.requests,
            "inputTokens": counts.input_tokens,
            "outputTokens": counts.output_tokens,
            "blocks": counts.blocks,
            "uniqueBlocks": counts.unique_blocks if told else None,
            "infiniteHitRate": counts.infinite_hit_rate if told else None,
        }
