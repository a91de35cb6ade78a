"""Two replays as one page: what they were made with, then every figure of both."""

from __future__ import annotations

from itertools import groupby
from typing import Final

from saltern.replay.diff import Change, Comparison
from saltern.replay.html.markup import Markup, element, join
from saltern.replay.html.page import contents, page, section
from saltern.replay.html.plots import Spread, dot_plot
from saltern.replay.html.scales import seconds_label
from saltern.replay.html.tables import behind, table
from saltern.replay.rows import Unit, cell, change_cell, percent_cell

_SECTIONS: Final = [
    ("differences", "What differs in how they were made"),
    ("plots", "Side by side"),
    ("figures", "Every figure"),
]


def diff_page(comparison: Comparison) -> str:
    """The comparison as a document of its own."""
    kind = comparison.engine
    parts = {"differences": _differences(comparison), "plots": _plots(comparison), "figures": _figures(comparison)}
    head = element(
        "header",
        element("h1", "Two replays compared"),
        element("p", element("strong", "A"), f" {comparison.first_name}, {comparison.first_engine}"),
        element("p", element("strong", "B"), f" {comparison.second_name}, {comparison.second_engine}"),
        _warning(comparison),
    )
    body = join(
        head,
        contents(_SECTIONS),
        element("main", [section(key, kind, title, parts[key]) for key, title in _SECTIONS]),
    )
    return page(f"{kind.upper()}: {comparison.first_name} and {comparison.second_name}", body)


def _warning(comparison: Comparison) -> Markup | None:
    if comparison.same_experiment:
        return None
    return element(
        "p",
        element("strong", "Different experiments."),
        " Traffic or engine are not the same, so a change below does not say what a change of the setup does.",
        class_="warning",
    )


def _differences(comparison: Comparison) -> Markup:
    rows = [
        [one.name + (" (another experiment)" if one.is_experiment else ""), one.first, one.second]
        for one in comparison.differences
    ]
    found = (
        table("Made with", ["setting", "A", "B"], rows, class_="text")
        if rows
        else element("p", "Nothing: they were made alike.")
    )
    left_out = element("ul", [element("li", one) for one in comparison.left_out]) if comparison.left_out else None
    return join(found, element("p", "Not compared:") if left_out else None, left_out)


def _plots(comparison: Comparison) -> Markup:
    rate = _plot(comparison, "hit_rate", "hit rate", Unit.RATE)
    ttft = _plot(comparison, "ttft_p95_s", "TTFT p95", Unit.SECONDS)
    if rate is None and ttft is None:
        return element("p", "No column is in both.")
    return join(rate, ttft)


def _plot(comparison: Comparison, key: str, what: str, unit: Unit) -> Markup | None:
    found = [one for one in comparison.changes if one.key == key and one.tenant is None]
    if not found:
        return None
    is_rate = unit is Unit.RATE
    said = "; ".join(f"{one.column}: A {cell(one.first, unit)}, B {cell(one.second, unit)}" for one in found)
    plot = dot_plot(
        key.replace("_", "-"),
        f"{comparison.engine.capitalize()}: {what} by column, A and B",
        f"{said}." + ("" if is_rate else " The axis is logarithmic."),
        ["A", "B"],
        [Spread(str(one.column), [one.first, one.second]) for one in found],
        label=(lambda value: f"{value:.1f}") if is_rate else seconds_label,
        top=1.0 if is_rate else None,
    )
    axis = "" if is_rate else ". Logarithmic axis"
    rows = [[str(one.column), cell(one.first, unit), cell(one.second, unit)] for one in found]
    figure = behind(plot, f"{what[0].upper()}{what[1:]}, {comparison.engine}{axis}", ["column", "A", "B"], rows)
    return element("div", figure, class_="wide")


def _figures(comparison: Comparison) -> Markup:
    tables = []
    for (column, tenant), changes in groupby(comparison.changes, key=lambda one: (one.column, one.tenant)):
        name = str(column) if tenant is None else f"{column}, tenant {tenant or '-'}"
        heading = element("h3", str(column)) if tenant is None else None
        caption = f"{name}: {comparison.engine}"
        tables.append(
            join(heading, table(caption, ["figure", "A", "B", "change", "relative to A"], map(_row, changes)))
        )
    return join(*tables) if tables else element("p", "No column is in both.")


def _row(change: Change) -> list[str]:
    return [
        change.label,
        cell(change.first, change.unit),
        cell(change.second, change.unit),
        change_cell(change.absolute, change.unit),
        percent_cell(change.relative),
    ]
