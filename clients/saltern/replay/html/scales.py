"""Where ticks of an axis stand, and what is written beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

#: Steps of time that people read easily, in seconds.
_TIME_STEPS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
#: Beyond these nothing is drawn to scale: a report may come from anywhere, and no figure in it may end the program.
_LEAST: Final = 1e-12
_MOST: Final = 1e18
_DAY_S: Final = 86400.0
_TIME_UNITS: Final = ((_DAY_S, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from ``low`` to ``high``; ``place`` says which share of its length a value is at, from 0 to 1."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Values past an end are at that end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(top: float, ticks_wanted: int = 5) -> Scale:
    """From 0 to a round number that is at least ``top``."""
    top = min(top, _MOST) if top > _LEAST else 1.0
    step = _round_step(top / ticks_wanted)
    count = math.ceil(top / step - 1e-9)
    return Scale(0.0, count * step, [number * step for number in range(count + 1)])


def times(end_s: float, ticks_wanted: int = 6) -> Scale:
    """From 0 to ``end_s``, with ticks at round times."""
    end_s = min(end_s, _MOST) if end_s > _LEAST else 1.0
    wanted_s = end_s / ticks_wanted
    if wanted_s < 0.5:
        step = _round_step(wanted_s)
    else:
        days = _round_step(wanted_s / _DAY_S) * _DAY_S
        step = next((float(step) for step in _TIME_STEPS_S if step >= wanted_s), days)
    return Scale(0.0, end_s, [number * step for number in range(math.floor(end_s / step + 1e-9) + 1)])


def logarithmic(values: Sequence[float]) -> Scale:
    """Whole decades around the positive ones of ``values``; linear where there are none."""
    positive = [min(value, _MOST) for value in values if value > _LEAST]
    if not positive:
        return linear(1.0)
    low = math.floor(math.log10(min(positive)))
    high = max(low + 1, math.ceil(math.log10(max(positive))))
    decades = [10.0**power for power in range(low, high + 1)]
    if high - low <= 3:
        ticks = [factor * decade for decade in decades[:-1] for factor in (1, 2, 5)] + decades[-1:]
    else:
        ticks = decades[:: math.ceil((high - low) / 8)]
    return Scale(decades[0], decades[-1], ticks, is_log=True)


def time_label(seconds: float) -> str:
    """A time in the largest unit of which there is one: ``90 s`` is ``1.5 min``."""
    for size, unit in _TIME_UNITS:
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return "0" if not seconds else f"{seconds * 1e3:.3g} ms"


def seconds_label(seconds: float) -> str:
    """A time in seconds, or milliseconds where that is shorter: as latencies are told."""
    return f"{seconds:,g} s" if seconds >= 0.1 or not seconds else f"{seconds * 1e3:g} ms"


def size_labels(unit: str) -> Callable[[float], str]:
    """Labels of bytes, in powers of 1,000, with ``unit`` behind them (``/s``, or nothing)."""

    def label(value: float) -> str:
        for name in ("B", "kB", "MB", "GB", "TB"):
            if value < 1000:
                return f"{value:.3g} {name}{unit}" if value else "0"
            value /= 1000
        return f"{value:.3g} PB{unit}"

    return label


def _round_step(least: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
