"""A replay's report for people, as tables; for programs, as the JSON that ``--json`` writes."""

from __future__ import annotations

import click

from saltern.cli.charts import sparkline
from saltern.cli.failure import one_line
from saltern.cli.render import Table, make_console
from saltern.cli.settings import Settings
from saltern.replay.facts import report_facts
from saltern.replay.results import ColumnResult, CostResult, ReplayReport, encode_report
from saltern.replay.rows import TENANT_ROWS, Unit, all_rows, cell


def print_report(settings: Settings, report: ReplayReport) -> None:
    """All of it; what is not complete says so first and last."""
    if settings.json:
        click.echo(encode_report(report).decode(), nl=False)
        return
    if not report.complete:
        click.echo(f"NOT COMPLETE ({one_line(report.ended)}): what follows was known when it ended\n")
    _print_head(settings, report)
    _print_columns(settings, report)
    for result in report.columns:
        if len(result.tenants) > 1:
            _print_tenants(settings, result)
    _print_series(settings, report)
    for cost in report.costs:
        click.echo(f"{cost.verdict}.\n")
    _print_cost(settings, report)
    if not report.complete:
        click.echo(f"NOT COMPLETE ({one_line(report.ended)})")


def _print_head(settings: Settings, report: ReplayReport) -> None:
    table = Table()
    for name, value in report_facts(report):
        table.add(name, value)
    table.print(settings)
    click.echo()


def _print_columns(settings: Settings, report: ReplayReport) -> None:
    names = [str(result.column) + ("" if result.complete else " (part)") for result in report.columns]
    headings = [name.upper() for name in names]
    table = Table(report.engine.upper(), *headings, right=headings)
    for row in all_rows(report):
        table.add(row.label, *(cell(row.value(result), row.unit) for result in report.columns))
    table.print(settings)
    click.echo()


def _print_tenants(settings: Settings, result: ColumnResult) -> None:
    headings = [row.label.upper() for row in TENANT_ROWS]
    table = Table(f"TENANTS, {result.column}", *headings, "EVICTED BY", right=headings)
    for name, tenant in result.tenants.items():
        takers = ", ".join(f"{taker or '-'} {count:,}" for taker, count in sorted(tenant.evicted_by.items()) if count)
        table.add(name or "-", *(cell(row.value(tenant), row.unit) for row in TENANT_ROWS), takers or "-")
    table.print(settings)
    click.echo()


def _print_series(settings: Settings, report: ReplayReport) -> None:
    encoding = make_console(settings).encoding
    for result in report.columns:
        rates = result.series.hit_rate
        if any(rates):
            line = sparkline(rates, top=1.0, encoding=encoding)
            click.echo(f"hit rate, {result.column}, {result.series.bin_s:g} s each, full at 1\n{line}")
    click.echo()


def _print_cost(settings: Settings, report: ReplayReport) -> None:
    cost: CostResult | None = report.costs[-1] if report.costs else None
    if cost is None:
        return
    even = cost.break_even
    if even is not None:
        holds = ", ".join(f"{tier} {hold / 3600:,.1f} h" for tier, hold in even.hold_s.items()) or "-"
        table = Table()
        table.add(
            f"break-even, prefix of {even.prefix_tokens:,} tokens",
            f"bandwidth {even.bandwidth_bytes_per_s / 1e9:.2f} GB/s (below it, reading takes longer than computing)",
        )
        table.add("", f"hold time {holds} (longer, keeping it costs more than computing it again)")
        table.add(
            "", f"hit rate {cell(even.hit_rate, Unit.RATE)} (at it, engine time set free costs what the store does)"
        )
        table.print(settings)
        click.echo()
    ratios = sorted({one.completions_ratio for one in cost.sensitivity})
    headings = [f"x{ratio:g}" for ratio in ratios]
    table = Table("RELATIVE COST: EXTRA COST / COMPLETIONS", *headings, right=headings)
    for extra in sorted({one.extra_cost for one in cost.sensitivity}):
        cells = {one.completions_ratio: one.relative_cost for one in cost.sensitivity if one.extra_cost == extra}
        table.add(f"+{extra:.0%}", *(f"{cells[ratio]:.3f}" for ratio in ratios))
    table.print(settings)
