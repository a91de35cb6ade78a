"""How tenants fared beside each other, and by whose puts their entries went."""

from __future__ import annotations

from typing import Final

from saltern.replay.html.markup import Markup, element, join
from saltern.replay.html.over_time import OTHERS
from saltern.replay.html.tables import Cell, Shaded, table
from saltern.replay.results import ColumnResult, ReplayReport
from saltern.replay.rows import TENANT_ROWS, cell

#: Of a table of who evicted whom; more tenants are counted together.
_TENANTS_MAX: Final = 12
_SHADES: Final = 4


def tenants(report: ReplayReport) -> Markup:
    """Two tables for each column with several tenants."""
    results = [result for result in report.columns if len(result.tenants) > 1]
    if not results:
        return element("p", "One tenant, so nobody to be compared with.")
    note = (
        "Alone is the hit rate behind walls of its own share (column cold); rho is hit rate over that, so below 1 the "
        "neighbours cost it hits. Slowdown is mean TTFT over that in cold."
    )
    return join(element("p", note, class_="soft"), *(_tenants(report, result) for result in results))


def _tenants(report: ReplayReport, result: ColumnResult) -> Markup:
    part = "" if result.complete else " (part)"
    rows = [
        [name or "-", *(cell(row.value(tenant), row.unit) for row in TENANT_ROWS)]
        for name, tenant in result.tenants.items()
    ]
    headings = ["tenant", *(row.label for row in TENANT_ROWS)]
    return join(
        element("h3", f"{result.column}{part}"),
        table(f"Tenants in {result.column}, {report.engine}", headings, rows),
        _evictions(report, result),
    )


def _evictions(report: ReplayReport, result: ColumnResult) -> Markup | None:
    counts, names = evictions(result)
    if not counts:
        return None
    most = max(counts.values())

    def shaded(loser: str, taker: str) -> Shaded:
        count = counts.get((loser, taker), 0)
        shade = f"heat-{-(-_SHADES * count // most)}"
        return Shaded(f"{count:,}" if count else "-", shade)

    rows: list[list[Cell]] = [[loser or "-", *(shaded(loser, taker) for taker in names)] for loser in names]
    caption = f"Who evicted whom in {result.column}, {report.engine}: whose entries went (down), by whose puts (across)"
    return table(caption, ["whose \\ by", *(name or "-" for name in names)], rows, class_="heat")


def evictions(result: ColumnResult) -> tuple[dict[tuple[str, str], int], list[str]]:
    """Entries that went by (whose, by whose put), none of them 0, and the tenants in it; the least are joined."""
    counts = {
        (loser, taker): count
        for loser, tenant in result.tenants.items()
        for taker, count in tenant.evicted_by.items()
        if count > 0
    }
    weights: dict[str, int] = {}
    for (loser, taker), count in counts.items():
        weights[loser] = weights.get(loser, 0) + count
        weights[taker] = weights.get(taker, 0) + count
    ranked = sorted(weights, key=lambda name: (-weights[name], name))
    if len(ranked) <= _TENANTS_MAX:
        return counts, sorted(ranked)
    kept = set(ranked[: _TENANTS_MAX - 1])
    others = OTHERS.format(len(ranked) - len(kept))
    joined: dict[tuple[str, str], int] = {}
    for (loser, taker), count in counts.items():
        key = (loser if loser in kept else others, taker if taker in kept else others)
        joined[key] = joined.get(key, 0) + count
    return joined, [*sorted(kept), others]
