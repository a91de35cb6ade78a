"""Charts as geometry: what stands where in a drawing of a thousand by a hundred units; a template draws it as SVG.

Only the plot is drawn. Labels are text of the page around it, so that they stay readable on a narrow screen, and every
chart has the same numbers as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.console.views.texts import NOTHING

WIDTH: Final = 1000
HEIGHT: Final = 100
#: Of a slot, left empty between bars.
_GAP: Final = 0.18
#: Colours that the style sheet has.
_SERIES_MAX: Final = 6

Number = int | float


@dataclass(frozen=True, slots=True)
class Slot:
    """One hour or day: its label, and a value for each series; None where there is no record."""

    label: str
    values: tuple[Number | None, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    series: int
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart and its table.

    Attributes:
        name: for ids in the page; unique there.
        title, summary: what a screen reader says of the drawing.
        bars: of a bar chart. lines: of a line chart, each an SVG path; gaps are between them. areas: below the lines.
        points: of a line chart: where a lone value would otherwise not be seen, and what is told of each.
        top: label of the upper edge.
        first, last: labels of the ends of the axis.
        legend: names of series, with their totals; empty for one series.
        heads, rows: the table.
    """

    name: str
    title: str
    summary: str
    bars: tuple[Bar, ...] = ()
    lines: tuple[str, ...] = ()
    areas: tuple[str, ...] = ()
    points: tuple[Bar, ...] = ()
    top: str = ""
    first: str = ""
    last: str = ""
    legend: tuple[tuple[int, str, str], ...] = ()
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.bars or self.lines or self.points)


def bar_chart(
    name: str,
    title: str,
    slots: Sequence[Slot],
    series: Sequence[str],
    text: Callable[[Number], str],
    *,
    slot_word: str,
) -> Chart:
    """Bars, stacked where there are several series.

    Args:
        text: how a value is written.
        slot_word: what a slot is, such as ``Hour``.
    """
    assert len(series) <= _SERIES_MAX, "sum up what is rare before it is drawn"
    totals = [sum(value or 0 for value in slot.values) for slot in slots]
    top = max(totals, default=0)
    sums = [sum(slot.values[number] or 0 for slot in slots) for number in range(len(series))]
    legend = tuple((number, word, text(sums[number])) for number, word in enumerate(series))
    return Chart(
        name=name,
        title=title,
        summary=_summary(sum(sums), text, slots, top),
        bars=tuple(_bars(slots, series, text, top)) if top else (),
        top=text(top),
        first=slots[0].label if slots else "",
        last=slots[-1].label if slots else "",
        legend=legend if len(series) > 1 else (),
        heads=(slot_word, *series),
        rows=_rows(slots, text),
    )


def _bars(slots: Sequence[Slot], series: Sequence[str], text: Callable[[Number], str], top: Number) -> Iterator[Bar]:
    step = WIDTH / len(slots)
    for index, slot in enumerate(slots):
        below = 0.0
        for number, value in enumerate(slot.values):
            if not value:
                continue
            height = HEIGHT * value / top
            below += height
            what = f"{slot.label}: {text(value)}" + (f" {series[number]}" if len(series) > 1 else "")
            x, width = index * step + step * _GAP / 2, step * (1 - _GAP)
            yield Bar(_r(x), _r(HEIGHT - below), _r(width), _r(height), number, what)


def ratio_chart(name: str, title: str, slots: Sequence[Slot], *, slot_word: str, series: str) -> Chart:
    """A line from 0 to 1, broken where there is no value: not asked is not missed."""
    step = WIDTH / max(len(slots), 1)
    runs: list[list[tuple[float, float]]] = [[]]
    points: list[Bar] = []
    for index, slot in enumerate(slots):
        value = slot.values[0]
        if value is None:
            runs.append([])
            continue
        x, y = _r((index + 0.5) * step), _r(HEIGHT * (1 - value))
        runs[-1].append((x, y))
        points.append(Bar(_r(index * step), 0, _r(step), HEIGHT, 0, f"{slot.label}: {_percent(value)}"))
    drawn = [_widened(run, step) for run in runs if run]
    lines = ["M" + " L".join(f"{x} {y}" for x, y in run) for run in drawn]
    areas = [f"{line} L{run[-1][0]} {HEIGHT} L{run[0][0]} {HEIGHT} Z" for line, run in zip(lines, drawn, strict=True)]
    values = [slot.values[0] for slot in slots if slot.values[0] is not None]
    summary = f"between {_percent(min(values))} and {_percent(max(values))}" if values else "nothing was asked for"
    return Chart(
        name=name,
        title=title,
        summary=summary,
        lines=tuple(lines),
        areas=tuple(areas),
        points=tuple(points),
        top="100 %",
        first=slots[0].label if slots else "",
        last=slots[-1].label if slots else "",
        heads=(slot_word, series),
        rows=_rows(slots, _percent),
    )


def _widened(run: list[tuple[float, float]], step: float) -> list[tuple[float, float]]:
    """A lone slot between gaps is drawn as wide as it is; a point would not be seen."""
    if len(run) > 1:
        return run
    x, y = run[0]
    return [(_r(x - step / 2), y), (_r(x + step / 2), y)]


def _percent(value: Number) -> str:
    return f"{100 * value:.1f} %"


def _summary(total: Number, text: Callable[[Number], str], slots: Sequence[Slot], top: Number) -> str:
    if not total:
        return "nothing in this time"
    peak = next(slot for slot in slots if sum(value or 0 for value in slot.values) == top)
    return f"{text(total)} in all, at most {text(top)} ({peak.label})"


def _rows(slots: Sequence[Slot], text: Callable[[Number], str]) -> tuple[tuple[str, ...], ...]:
    """The newest first; slots without a record are left out."""
    return tuple(
        (slot.label, *(NOTHING if value is None else text(value) for value in slot.values))
        for slot in reversed(slots)
        if any(value is not None for value in slot.values)
    )


def _r(value: float) -> float:
    return round(value, 2)
