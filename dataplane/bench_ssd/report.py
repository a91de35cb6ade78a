"""What one measurement found, and how several become one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Span:
    """Time and processor time that something took; see :func:`timed`."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast bytes went: medians over the rounds.

    Attributes:
        gb_per_s: 10^9 bytes in a second.
        cpu_s_per_gb: processor time of the whole process, kernel included, for 10^9 bytes.
        rounds_gb_per_s: each round for itself.
    """

    gb_per_s: float
    cpu_s_per_gb: float
    rounds_gb_per_s: list[float]


@dataclass(slots=True)
class Rounds:
    """Collects rounds of one measurement."""

    spans: list[tuple[int, Span]] = field(default_factory=list)

    def add(self, size_bytes: int, span: Span) -> None:
        self.spans.append((size_bytes, span))

    def rate(self) -> Rate:
        """The medians of what was added."""
        speeds = [size_bytes / 1e9 / span.wall_s for size_bytes, span in self.spans]
        costs = [span.cpu_s / (size_bytes / 1e9) for size_bytes, span in self.spans]
        return Rate(
            gb_per_s=round(statistics.median(speeds), 3),
            cpu_s_per_gb=round(statistics.median(costs), 3),
            rounds_gb_per_s=[round(speed, 3) for speed in speeds],
        )


@contextmanager
def timed() -> Iterator[Span]:
    """Measures what happens inside; the span is complete after the block."""
    span = Span()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield span
    span.wall_s, span.cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s


def ratio(ours: Rate, limit: Rate) -> float:
    """Median over the rounds of ours to the limit, round by round: neighbours in time, so noise cancels out."""
    pairs: Sequence[tuple[float, float]] = list(zip(ours.rounds_gb_per_s, limit.rounds_gb_per_s, strict=True))
    return round(statistics.median(mine / its for mine, its in pairs), 3)
