"""One replay as one page: whether it pays, all figures, plots, fairness, cost, and what all of it rests on."""

from __future__ import annotations

from typing import Final

from saltern.replay.facts import report_facts
from saltern.replay.html.markup import Markup, element, join
from saltern.replay.html.over_time import over_time
from saltern.replay.html.page import contents, engine_label, page, section
from saltern.replay.html.plots import Spread, dot_plot
from saltern.replay.html.scales import seconds_label, time_label
from saltern.replay.html.tables import Shaded, behind, pairs, table
from saltern.replay.html.tenants import tenants
from saltern.replay.results import BreakEven, ColumnResult, CostResult, EngineKind, ReplayReport
from saltern.replay.rows import Unit, all_rows, cell

_SECTIONS: Final = [
    ("pays", "Does it pay?"),
    ("columns", "Every figure, column by column"),
    ("latency", "Time to first token"),
    ("time", "Over time"),
    ("tenants", "Tenants: fairness, and who evicted whom"),
    ("cost", "Cost, if assumptions were others"),
    ("rests-on", "What this rests on"),
]


def report_page(report: ReplayReport) -> str:
    """The report as a document of its own."""
    kind = str(report.engine)
    parts = {
        "pays": _verdicts(report),
        "columns": _columns(report),
        "latency": _latency(report),
        "time": over_time(report),
        "tenants": tenants(report),
        "cost": _cost(report),
        "rests-on": pairs(report_facts(report)),
    }
    head = element(
        "header",
        element("h1", f"Replay of {report.trace.name}"),
        element("p", engine_label(kind), report.engine.note),
        _incomplete(report),
    )
    body = join(
        head,
        contents(_SECTIONS),
        element("main", [section(key, kind, title, parts[key]) for key, title in _SECTIONS]),
        _incomplete(report),
        element("footer", element("p", report.program, " \N{MIDDLE DOT} sha256 ", report.trace.sha256, class_="soft")),
    )
    return page(f"{report.engine.upper()}: replay of {report.trace.name}", body)


def _incomplete(report: ReplayReport) -> Markup | None:
    if report.complete:
        return None
    return element(
        "p",
        element("strong", "Not complete"),
        f" ({report.ended}): this was known when it ended. Columns marked as part cover the requests until then.",
        class_="warning",
    )


def column_heading(result: ColumnResult) -> str:
    """Its name, marked where it does not cover the whole traffic."""
    return str(result.column) + ("" if result.complete else " (part)")


def _verdicts(report: ReplayReport) -> Markup:
    if not report.costs:
        return element("p", "Nothing to compare: that takes the column no-cache and another.")
    return element("ul", map(_verdict, report.costs), class_="verdicts")


def _verdict(cost: CostResult) -> Markup:
    said, class_ = {True: ("Pays.", "pays"), False: ("Does not pay.", "loses"), None: ("Not known.", None)}[cost.pays]
    return element("li", element("strong", said), f"{cost.verdict}.", class_=class_)


def _columns(report: ReplayReport) -> Markup:
    rows = [[row.label, *(cell(row.value(one), row.unit) for one in report.columns)] for row in all_rows(report)]
    caption = f"All {report.engine}. A dash is not known or has no meaning there; it is never a zero."
    return table(caption, ["figure", *map(column_heading, report.columns)], rows)


def _latency(report: ReplayReport) -> Markup:
    names = ["p50", "p95", "p99"]
    target_s = report.setup.slo.ttft_s
    found = [(one, [one.ttft.p50_s, one.ttft.p95_s, one.ttft.p99_s]) for one in report.columns if one.ttft.count]
    if not found:
        return element("p", "No request was served.")
    said = [
        f"{one.column}: "
        + ", ".join(f"{name} {cell(value, Unit.SECONDS)}" for name, value in zip(names, values, strict=True))
        for one, values in found
    ]
    target = "" if target_s is None else f" The target is {cell(target_s, Unit.SECONDS)}."
    plot = dot_plot(
        "ttft",
        f"{report.engine.capitalize()}: time to first token by column",
        f"{'; '.join(said)}.{target} The axis is logarithmic.",
        names,
        [Spread(column_heading(one), values) for one, values in found],
        label=seconds_label,
        target=target_s,
    )
    rows = [[column_heading(one), *(cell(value, Unit.SECONDS) for value in values)] for one, values in found]
    how = report.engine if report.engine is EngineKind.SIMULATED else "reads measured, prefill modelled"
    caption = f"Queue, transfer and prefill together, {how}; further to the left is better. Logarithmic axis."
    figure = behind(plot, caption, ["column", *names], rows)
    return element("div", figure, class_="wide")


def _cost(report: ReplayReport) -> Markup:
    if not report.costs:
        return element("p", "Nothing to compare: that takes the column no-cache and another.")
    rows = [
        [
            str(cost.column),
            f"{cost.extra_cost:+.1%}",
            cell(cost.completions_ratio, Unit.RATIO),
            cell(cost.relative_cost, Unit.RATIO),
        ]
        for cost in report.costs
    ]
    found = table(
        f"Found, {report.engine}: relative cost is (1 + extra cost) / (ratio of completions within the target)",
        ["column", "extra cost of the store", "completions beside no-cache", "relative cost"],
        rows,
    )
    grid = report.costs[-1]
    return join(found, _sensitivity(grid), _break_even(report, grid.break_even))


def _sensitivity(cost: CostResult) -> Markup:
    ratios = sorted({one.completions_ratio for one in cost.sensitivity})
    cells = {(one.extra_cost, one.completions_ratio): one.relative_cost for one in cost.sensitivity}
    rows = [
        [f"+{extra:.0%}", *(_shaded(cells.get((extra, ratio))) for ratio in ratios)]
        for extra in sorted({extra for extra, _ in cells})
    ]
    caption = (
        "Arithmetic, neither simulated nor measured: relative cost for an extra cost (down) and a ratio of completions "
        "within the target (across). Underlined is below 1: there it pays."
    )
    return table(
        caption, ["extra cost", *(f"\N{MULTIPLICATION SIGN}{ratio:g}" for ratio in ratios)], rows, class_="heat"
    )


def _shaded(cost: float | None) -> str | Shaded:
    if cost is None:
        return "-"
    # 1.25 / 1.25 costs the same, whatever its last bit says.
    is_below = cost < 1 - 1e-9
    limits = ((0.8, "saves-2"), (1 - 1e-9, "saves-1"), (1 + 1e-9, "even"), (1.25, "costs-1"))
    shade = next((name for limit, name in limits if cost < limit), "costs-2")
    return Shaded(f"{cost:.3f}", f"{shade} below" if is_below else shade)


def _break_even(report: ReplayReport, even: BreakEven | None) -> Markup | None:
    if even is None:
        return None
    rows = [
        (
            "bandwidth",
            f"{even.bandwidth_bytes_per_s / 1e9:.2f} GB/s: below it, reading a prefix of {even.prefix_tokens:,} tokens "
            "takes longer than computing it",
        ),
        *(
            (f"hold time, {tier}", f"{time_label(hold_s)}: kept longer, it costs more than computing it again")
            for tier, hold_s in even.hold_s.items()
        ),
        (
            "hit rate",
            f"{cell(even.hit_rate, Unit.RATE)}: at it, engine time set free costs what the store does "
            f"({report.costs[-1].column})",
        ),
    ]
    return join(element("h3", "Break-even"), pairs(rows))
