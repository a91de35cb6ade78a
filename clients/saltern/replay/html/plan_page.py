"""One plan as one page: what is suggested, for whom, the curve behind it, and what was simulated."""

from __future__ import annotations

from typing import Final

from saltern.replay.html.markup import Markup, element, join
from saltern.replay.html.page import contents, engine_label, page, section
from saltern.replay.html.palette import SERIES_MAX
from saltern.replay.html.plots import Line, line_plot
from saltern.replay.html.scales import linear
from saltern.replay.html.tables import behind, pairs, table
from saltern.replay.plan_facts import TENANT_HEADINGS, TRIAL_HEADINGS, plan_facts, size, tenant_cells, trial_cells
from saltern.replay.plan_results import Plan, PlanPoint

_SECTIONS: Final = [
    ("tenants", "What each tenant should have"),
    ("curve", "Hit rate by size"),
    ("trials", "What was simulated"),
    ("rests-on", "What this rests on"),
]
#: What comes from curves alone.
_LABELS: Final = {"curve": "predicted"}
_GIB: Final = 2**30
_TIB: Final = 2**40


def plan_page(plan: Plan) -> str:
    """The plan as a document of its own."""
    kind = str(plan.engine)
    parts = {
        "tenants": _tenants(plan),
        "curve": _curves(plan),
        "trials": _trials(plan),
        "rests-on": pairs(plan_facts(plan)),
    }
    said = "Reached." if plan.reached else "Not reached."
    head = element(
        "header",
        element("h1", f"Plan for {plan.trace.name}"),
        element("p", engine_label(kind), plan.engine.note),
        element(
            "ul",
            element("li", element("strong", said), f"{plan.verdict}.", class_="pays" if plan.reached else "loses"),
            class_="verdicts",
        ),
    )
    body = join(
        head,
        contents(_SECTIONS),
        element("main", [section(key, _LABELS.get(key, kind), title, parts[key]) for key, title in _SECTIONS]),
        element("footer", element("p", plan.program, " \N{MIDDLE DOT} sha256 ", plan.trace.sha256, class_="soft")),
    )
    return page(f"{plan.engine.upper()}: plan for {plan.trace.name}", body)


def _tenants(plan: Plan) -> Markup:
    caption = (
        "Sizes over all nodes. Infinite, predicted and simulated are hit rates: without end, by the curve, and beside "
        "the others. More than it needs at most is of no use to a tenant."
    )
    return table(caption, list(TENANT_HEADINGS), [tenant_cells(*one) for one in plan.tenants.items()])


def _trials(plan: Plan) -> Markup:
    rows = [
        ["suggested" if number == plan.chosen else str(number + 1), *trial_cells(plan, trial)]
        for number, trial in enumerate(plan.trials)
    ]
    caption = "Every size that was tried, in order; in time is the share of requests that met the target of time."
    return table(caption, ["tried", *TRIAL_HEADINGS], rows)


def _curves(plan: Plan) -> Markup:
    drawn = [_curve("all", "All tenants in one cache", plan, [Line("all", _rates(plan.curve))], plan.curve)]
    if len(plan.tenant_curves) > 1:
        drawn += [
            _curve(
                f"tenant-{number}",
                f"{one.tenant or 'Unnamed'} alone",
                plan,
                [Line(one.tenant, _rates(one.points))],
                one.points,
            )
            for number, one in enumerate(plan.tenant_curves[: SERIES_MAX * 2])
        ]
    return element("div", drawn, class_="wide")


def _rates(points: list[PlanPoint]) -> list[float | None]:
    return [point.hit_rate for point in points]


def _curve(key: str, title: str, plan: Plan, lines: list[Line], points: list[PlanPoint]) -> Markup:
    last = points[-1]
    half = next(point for point in points if point.hit_rate >= last.hit_rate / 2)
    said = (
        f"Hit rate of an LRU cache by its size: half of the most, {half.hit_rate:.3f}, at {size(half.size_bytes)}; "
        f"{last.hit_rate:.3f} at {size(last.size_bytes)}, which holds everything."
    )
    unit_bytes, unit = (_TIB, "TiB") if last.size_bytes >= 4 * _TIB else (_GIB, "GiB")
    plot = line_plot(
        key,
        f"Predicted: {title}",
        said,
        lines,
        step=(points[1].size_bytes if len(points) > 1 else 1) / unit_bytes,
        label=lambda value: f"{value:g}",
        across=linear,
        across_label=lambda value: f"{value:,.4g} {unit}" if value else "0",
        top=1.0,
    )
    rows = [[size(point.size_bytes), f"{point.hit_rate:.4f}"] for point in points]
    return behind(plot, f"{title}: hit rate, predicted", ["size", "hit rate"], rows)
