"""What happened when: for each column hit rate, bytes moved and who held how much, as plots with their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from saltern.replay.html.markup import Markup, element, join
from saltern.replay.html.palette import SERIES_MAX
from saltern.replay.html.plots import Line, line_plot
from saltern.replay.html.scales import size_labels, time_label
from saltern.replay.html.tables import behind
from saltern.replay.results import Column, ColumnResult, EngineKind, ReplayReport, Series
from saltern.replay.rows import Unit, cell

#: What tenants are called that are drawn as one.
OTHERS: Final = "all others ({})"


@dataclass(frozen=True, slots=True)
class _View:
    """One kind of plot, drawn for each column on one scale.

    Attributes:
        what: is in the plot, in words.
        lines: of one column, at most :data:`SERIES_MAX`.
        label: writes a value, beside the axis and in the table.
        top: of the axis; as the largest value of any column needs where None.
    """

    key: str
    heading: str
    note: str
    what: str
    lines: Callable[[Series], list[Line]]
    label: Callable[[float], str]
    top: float | None = None


def over_time(report: ReplayReport) -> Markup:
    """Panels of all columns that had nodes."""
    results = [result for result in report.columns if result.column is not Column.NO_CACHE and result.series.bin_s > 0]
    if not results:
        return element("p", "No column with nodes was run.")
    names = drawn_names((result.series for result in results), SERIES_MAX)
    capacity = cell(report.setup.capacity_bytes, Unit.BYTES)
    views = (
        _View(
            "hit-rate",
            "Hit rate",
            "Prompt tokens that nodes had, of all in each stretch of time. A gap is a stretch without requests.",
            "hit rate over time",
            lambda series: [Line("hit rate", series.hit_rate)],
            lambda value: f"{value:.3g}",
            top=1.0,
        ),
        _View(
            "moved",
            "Bytes each second",
            "Read from and written to all nodes together, a mean over each stretch of time.",
            "bytes read from and written to nodes each second",
            _moved,
            size_labels("/s"),
        ),
        _View(
            "held",
            "Memory, by tenant",
            f"Bytes that each tenant holds on all nodes together, which have {capacity}.",
            "bytes held by each tenant over time",
            lambda series: held_lines(series, names),
            size_labels(""),
        ),
    )
    return join(*(_panels(view, report.engine, results) for view in views))


def _panels(view: _View, engine: EngineKind, results: Sequence[ColumnResult]) -> Markup:
    known = [value for result in results for line in view.lines(result.series) for value in _known(line)]
    top = max(known, default=0.0) if view.top is None else view.top
    figures = [_figure(view, engine, result, top) for result in results]
    return join(
        element("h3", view.heading), element("p", view.note, class_="soft"), element("div", figures, class_="panels")
    )


def _figure(view: _View, engine: EngineKind, result: ColumnResult, top: float) -> Markup:
    bin_s, lines = result.series.bin_s, view.lines(result.series)
    told = [_range(line, view.label) for line in lines]
    plot = line_plot(
        f"{view.key}-{result.column}",
        f"{engine.capitalize()}: {view.what}, column {result.column}",
        "; ".join([*told, f"in steps of {time_label(bin_s)}, all of which are in the table of figures"]) + ".",
        lines,
        step=bin_s,
        label=view.label,
        top=top,
    )
    rows = (
        [time_label(number * bin_s), *("-" if value is None else view.label(value) for value in values)]
        for number, values in enumerate(zip_longest(*(line.values for line in lines)))
    )
    part = "" if result.complete else " (part)"
    return behind(plot, f"{result.column}{part}, {engine}", ["from", *(line.name for line in lines)], rows)


def _range(line: Line, label: Callable[[float], str]) -> str:
    known = _known(line)
    if not known:
        return f"{line.name} not known"
    return f"{line.name} between {label(min(known))} and {label(max(known))}, {label(known[-1])} at the end"


def _moved(series: Series) -> list[Line]:
    return [
        Line("read", [moved / series.bin_s for moved in series.read_bytes]),
        Line("written", [moved / series.bin_s for moved in series.written_bytes]),
    ]


def drawn_names(every: Iterable[Series], most: int) -> list[str]:
    """Tenants that are drawn by name: all of them, or those that held most, with one place left for the others.

    One choice for all columns, so that a tenant has the same line in each.
    """
    held: dict[str, int] = {}
    for series in every:
        for name, values in series.occupancy_bytes.items():
            held[name] = held.get(name, 0) + sum(values)
    ranked = sorted(held, key=lambda name: (-held[name], name))
    return sorted(ranked if len(ranked) <= most else ranked[: most - 1])


def held_lines(series: Series, names: Sequence[str]) -> list[Line]:
    """What each of ``names`` held, and the sum of all others."""
    held = series.occupancy_bytes
    found = [Line(name or "-", held.get(name, [])) for name in names]
    others = [values for name, values in held.items() if name not in names]
    if others:
        sums = [sum(values) for values in zip_longest(*others, fillvalue=0)]
        found.append(Line(OTHERS.format(len(others)), sums))
    return found


def _known(line: Line) -> list[float]:
    return [value for value in line.values if value is not None]
