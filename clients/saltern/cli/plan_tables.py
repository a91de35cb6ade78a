"""A plan for people: what to order, what each tenant gets, the curve, and what was simulated."""

from __future__ import annotations

import click

from saltern.cli.charts import area_chart
from saltern.cli.failure import one_line
from saltern.cli.render import Table, make_console
from saltern.cli.settings import Settings
from saltern.replay.plan_facts import TENANT_HEADINGS, TRIAL_HEADINGS, plan_facts, tenant_cells, trial_cells
from saltern.replay.plan_results import Plan, encode_plan
from saltern.replay.rows import Unit, cell

_CHART_ROWS = 8


def print_plan(settings: Settings, plan: Plan, replay_command: str) -> None:
    if settings.json:
        click.echo(encode_plan(plan).decode(), nl=False)
        return
    if not plan.complete:
        click.echo("NOT COMPLETE (interrupted): what follows was known when it ended\n")
    table = Table()
    for name, value in plan_facts(plan):
        table.add(name, value)
    table.print(settings)
    click.echo()
    _print_tenants(settings, plan)
    _print_curve(settings, plan)
    _print_trials(settings, plan)
    click.echo(f"{one_line(plan.verdict)}.\n")
    click.echo(f"all columns, costs and failures of it: {replay_command}")


def _print_tenants(settings: Settings, plan: Plan) -> None:
    table = Table(*(heading.upper() for heading in TENANT_HEADINGS), right=[h.upper() for h in TENANT_HEADINGS[1:]])
    for name, tenant in plan.tenants.items():
        table.add(*tenant_cells(name, tenant))
    table.print(settings)
    click.echo()


def _print_curve(settings: Settings, plan: Plan) -> None:
    encoding = make_console(settings).encoding
    rates = [point.hit_rate for point in plan.curve[1:]]
    step_bytes = plan.curve[1].size_bytes
    last = plan.curve[-1].size_bytes
    top = max(plan.infinite_hit_rate, 0.0001)
    click.echo(f"PREDICTED hit rate of LRU by size, all tenants in one cache, up to {cell(last, Unit.BYTES)}")
    lines = area_chart(rates, rows=_CHART_ROWS, top=top, encoding=encoding)
    for number, line in enumerate(lines):
        label = top * (_CHART_ROWS - number) / _CHART_ROWS
        click.echo(f"{label:7.4f} {line}")
    at = sum(one.dram_reserved_bytes + one.ssd_reserved_bytes for one in plan.tenants.values())
    mark = min(len(rates) - 1, max(0, round(at / step_bytes) - 1)) if step_bytes else 0
    click.echo(f"        {' ' * mark}^ {cell(at, Unit.BYTES)} is suggested\n")


def _print_trials(settings: Settings, plan: Plan) -> None:
    headings = [heading.upper() for heading in TRIAL_HEADINGS]
    table = Table(f"TRIED, {plan.engine.upper()}", *headings, right=headings)
    for number, trial in enumerate(plan.trials):
        table.add("suggested" if number == plan.chosen else str(number + 1), *trial_cells(plan, trial))
    table.print(settings)
    click.echo()
