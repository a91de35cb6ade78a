"""Calls in flight, and what came of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Rate:
    """What one stretch of time gave.

    Attributes:
        server_cpu_us: CPU time of the serving process for each call; 0 where there is none.
    """

    per_s: float
    p50_ms: float
    p99_ms: float
    server_cpu_us: float


async def keep_in_flight(
    call: Callable[[], Awaitable[object]], *, in_flight: int, duration_s: float, server_pid: int | None = None
) -> Rate:
    """Keep ``in_flight`` calls going for ``duration_s`` seconds; an error of any of them ends it."""
    took_s: list[float] = []
    began_s, cpu_s = perf_counter(), cpu_of(server_pid)

    async def one_after_another() -> None:
        while (at_s := perf_counter()) < began_s + duration_s:
            await call()
            took_s.append(perf_counter() - at_s)

    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
    elapsed_s = perf_counter() - began_s
    took_s.sort()
    return Rate(
        per_s=len(took_s) / elapsed_s,
        p50_ms=1000 * took_s[len(took_s) // 2],
        p99_ms=1000 * took_s[len(took_s) * 99 // 100],
        server_cpu_us=1e6 * (cpu_of(server_pid) - cpu_s) / len(took_s),
    )


def median(rates: list[Rate]) -> Rate:
    """The round in the middle, by calls per second."""
    return sorted(rates, key=lambda rate: rate.per_s)[len(rates) // 2]


def cpu_of(pid: int | None) -> float:
    """Seconds of CPU that a process has taken; 0 for none."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
